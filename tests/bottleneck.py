"""The losses of the bottleneck, literally: loops over windows, texts, positions and heads."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from capt.pretrain.base.randomness import mix64
from tests.language import language_mapping

WORDS = ("river", "stone", "house", "garden", "light", "dark", "night", "water", "fire", "wind", "bird", "road", "city")


def ragged_mapping(folder: Path, **changes: Any) -> dict[str, Any]:
    """A small job on documents of one word, of a few, and of more than a window."""
    text, draw = folder / "text.txt", random.Random(0)
    if not text.exists():
        lengths = [1, 4, 90, 1, 1, 7, 40, 2, 12] * 8
        text.write_text("\n\n".join(" ".join(draw.choices(WORDS, k=length)) for length in lengths) + "\n")
    return language_mapping(folder, **changes)


def sees(key: int, text: int, row: int, column: int, rate: float) -> bool:
    """True where the decoder sees the word at place ``column`` of a text from place ``row``."""
    odd = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xF1357AEA2E62A9C5)
    word = (key + odd[0] * text + odd[1] * row + odd[2] * column) % (1 << 64)
    return int(mix64(np.array([word], dtype=np.uint64))[0]) % (1 << 24) >= round(rate * (1 << 24))


def literal_losses(module: Any, batch: Any, section: Any, pooling: str) -> dict[str, Tensor]:
    """The loss of each head of a `LanguageModule`, a mean over the batch, in the precision of its weights."""
    hidden = module.capt.encoder(batch.corrupted, padded=batch.padded, documents=batch.documents)
    heads, mlm = module.bottleneck, module.capt.mlm
    bags, words = [], []
    for window, numbers in enumerate(batch.numbers.tolist()):
        for text in range(max(numbers) + 1):
            at = [place for place, number in enumerate(numbers) if number == text]
            ids = [int(batch.words[window, place]) for place in at]
            states = [hidden[window, place] for place in at]
            h = states[0] if pooling == "cls" else torch.stack(states).sum(0) / len(states)
            told = [id_ for id_ in ids if id_ >= 0]
            if heads.bow is not None and told:
                x = _norm(heads.bow.norm, heads.bow.dense.weight @ h + heads.bow.dense.bias)
                logits = (heads.bow.weight @ x + heads.bow.bias)[: heads.bow.classes]
                bags.append(-sum(torch.log_softmax(logits, 0)[id_] for id_ in told) / len(told))
            if heads.decoder is not None:
                words += _decoded(heads.decoder, mlm, h, ids, int(batch.keys[window]), text, section.decoder_rate)
    masked = [
        -torch.log_softmax(_scores(mlm, hidden[window, place]), 0)[label]
        for window, labels in enumerate(batch.labels.tolist())
        for place, label in zip(batch.positions[window].tolist(), labels, strict=True)
        if label >= 0
    ]
    found = {"mlm": masked, "bow": bags, "decoder": words}
    return {name: torch.stack(losses).mean() for name, losses in found.items() if losses}


def _norm(norm: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape, norm.weight, norm.bias, norm.eps)


def _scores(mlm: Any, x: Tensor) -> Tensor:
    x = _norm(mlm.norm, mlm.activation(F.linear(x, mlm.dense.weight, mlm.dense.bias)))
    return (mlm.weight @ x + mlm.bias)[: mlm.vocab_size]


def _position(place: int, width: int) -> Tensor:
    half = width // 2
    angles = [place * 10_000 ** (-k / half) for k in range(half)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def _decoded(decoder: Any, mlm: Any, h: Tensor, ids: list[int], key: int, text: int, rate: float) -> list[Tensor]:
    layer, width = decoder.layer, len(h)
    vector, losses = _norm(decoder.vector_norm, h), []
    for row, id_ in enumerate(ids, 1):
        if id_ < 0:
            continue
        query = vector + _position(row, width)
        seen = [vector + _position(0, width)]
        for column, other in enumerate(ids, 1):
            if other >= 0 and column != row and sees(key, text, row, column, rate):
                word = decoder.weight[other] if decoder.widen is None else decoder.widen.weight @ decoder.weight[other]
                seen.append(_norm(decoder.word_norm, word) + _position(column, width))
        x = _norm(layer.attention_norm, query + _attention(layer.attention, query, torch.stack(seen)))
        inner = F.gelu(layer.ffn_in.weight @ x + layer.ffn_in.bias)
        x = _norm(layer.ffn_norm, x + layer.ffn_out.weight @ inner + layer.ffn_out.bias)
        losses.append(-torch.log_softmax(_scores(mlm, x), 0)[id_])
    return losses


def _attention(attention: Any, query: Tensor, context: Tensor) -> Tensor:
    q = attention.query.weight @ query + attention.query.bias
    k, v = F.linear(context, attention.key_value.weight, attention.key_value.bias).chunk(2, 1)
    size, out = len(q) // attention.heads, []
    for head in range(attention.heads):
        part = slice(head * size, (head + 1) * size)
        weights = torch.softmax(k[:, part] @ q[part] / math.sqrt(size), 0)
        out.append(weights @ v[:, part])
    return attention.output.weight @ torch.cat(out) + attention.output.bias

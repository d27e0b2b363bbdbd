"""The outputs of our own model on real and random text, and the check that compares every export with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.architecture import EncoderConfig
from capt.pretrain.models.capt import CaptModel
from capt.pretrain.models.heads import mean_over_tokens
from capt.tokenizer.encode import TextTokenizer

Pooling = Literal["head", "cls", "mean"]

TOLERANCE = 1e-5
"""Largest difference from our own model, in fp32, relative to the largest value (or 1, where that is larger)."""

TEXTS = (
    "A cat sat on the mat, and nobody minded.",
    "Contrastive pretraining pulls a sentence and its corrupted view together.",
    "Why not?",
    "x = [i ** 2 for i in range(10)]  # squares",
    "Zürich, São Paulo, Владивосток, 北京 and Αθήνα are cities; naïve café.",
    "In 1859 he published it (price: 15 shillings), 'the one long argument'.",
)
"""Texts of several lengths and scripts."""

LONG_TEXT = "It is a truth universally acknowledged, that a text may be longer than a position table. " * 400


_NOUNS = [
    "river", "house", "teacher", "engine", "garden", "market", "letter", "winter", "painting", "harbour", "song",
    "bridge",
]  # fmt: skip
_VERBS = ["opens", "follows", "repairs", "describes", "remembers", "crosses", "measures", "paints"]
SPREAD = tuple(
    f"The {_NOUNS[i % 12]} {_VERBS[i * 5 % 8]} a {_NOUNS[(i * 7 + 3) % 12]}{' near the old mill' * (i % 3)}."
    for i in range(40)
)
"""Short texts that differ, by which the spread of vectors is measured."""


def probe_batches(config: EncoderConfig, tokenizer: TextTokenizer) -> Iterator[Int[Tensor, "n L"]]:
    """Batches of token ids: one text, all ``TEXTS`` with padding, a random sequence as long as the position table."""
    yield tokenize(TEXTS[:1], tokenizer, config.max_positions)
    yield tokenize(TEXTS, tokenizer, config.max_positions)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.classes, (1, config.max_positions), generator=generator)
    # All tokens are to be real ones: padding within the sequence would be masked.
    yield ids.masked_fill(ids == config.pad_id, tokenizer.special.unk)


def card_inputs(folder: Path, *, pairs: bool = True, singles: bool = True) -> Iterator[dict[str, Tensor]]:
    """Yield the output of the tokenizer in ``folder`` as a model card uses it: of a text, a pair, batches, a long text.

    Every key that the tokenizer returns is in it: the exported model must take them all.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # In another order, so that the texts of a pair differ in length.
    backwards = list(TEXTS[::-1])
    given: list[tuple[str | list[str], ...]] = []
    given += [(TEXTS[0],), (list(TEXTS),), (LONG_TEXT,)] if singles else []
    given += [(TEXTS[0], TEXTS[1]), (list(TEXTS), backwards), (LONG_TEXT[:4000], TEXTS[1])] if pairs else []
    for texts in given:
        yield dict(tokenizer(*texts, padding=True, truncation=True, return_tensors="pt"))


def tokenize(texts: Sequence[str], tokenizer: TextTokenizer, max_length: int) -> Int[Tensor, "n L"]:
    """``<s> text </s>`` of each text, cut to ``max_length`` ids and padded on the right to the longest."""
    rows = tokenizer.encode_framed(texts, max_length)
    width = max(map(len, rows))
    return torch.tensor([row + [tokenizer.special.pad] * (width - len(row)) for row in rows])


def pool(
    model: CaptModel, hidden: Float[Tensor, "n L h"], tokens: Int[Tensor, "n L"], pooling: Pooling
) -> Float[Tensor, "n h"]:
    """Unit rows from final hidden states, in fp32: ``head`` is s(x) of Eq. 1, ``cls`` and ``mean`` leave it out."""
    hidden = hidden.float()
    kind = model.config.pooling if pooling == "head" else pooling
    pooled = hidden[:, 0] if kind == "cls" else mean_over_tokens(hidden, tokens, model.config.pad_id)
    if pooling == "head" and model.aggregation is not None:
        return model.aggregation(pooled)  # type: ignore[no-any-return]
    return F.normalize(pooled, dim=-1, eps=1e-12)


def embed(model: CaptModel, tokens: Int[Tensor, "n L"], pooling: Pooling) -> Float[Tensor, "n h"]:
    """Unit rows as our model gives them; see :func:`pool`."""
    if pooling == "head":
        return model.embed(tokens, padded=True)
    return pool(model, model.encode(tokens, padded=True), tokens, pooling)


def require_pooling(model: CaptModel, pooling: Pooling, source: str) -> None:
    """Raise ``CheckpointError`` when ``pooling`` needs the aggregation head and the model was trained without one."""
    if pooling == "head" and model.aggregation is None:
        raise CheckpointError(
            f"{source}: the model has no aggregation head (it was trained without contrast); use --pooling mean or cls"
        )


ONE_VECTOR = 1e-4
"""Largest change of a vector, as a share of its length, by the texts beside it or by what computes it."""


def relative_change(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """The largest distance of a row of ``b`` from that of ``a``, as a share of its length; inf for no number."""
    lengths = np.linalg.norm(a, axis=1).clip(1e-12)
    change = float((np.linalg.norm(a.astype(np.float64) - b, axis=1) / lengths).max())
    return change if np.isfinite(change) else float("inf")


def one_vector(encode: Callable[[list[str]], NDArray[np.float32]]) -> tuple[float, float]:
    """Return by how much the vectors of ``TEXTS`` change among each other, and that of a short one beside a long one.

    ``encode`` makes the vectors of texts in one batch.
    """
    alone = np.concatenate([encode([text]) for text in TEXTS])
    short = min(range(len(TEXTS)), key=lambda number: len(TEXTS[number]))
    beside = encode([TEXTS[short], LONG_TEXT])[:1]
    return relative_change(alone, encode(list(TEXTS))), relative_change(alone[short : short + 1], beside)


def load_with_transformers(cls: Any, folder: Path) -> Any:
    """Load an export with a class of transformers. Raises ``CheckpointError``: it misses or ignores a tensor."""
    loaded, report = cls.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(map(str, sorted(report[problem])))
            raise CheckpointError(f"transformers reports {problem.replace('_', ' ')}: {names}; nothing written")
    return loaded.eval()


def require_close(what: str, ours: Tensor, theirs: Tensor | NDArray[np.float32]) -> float:
    """The largest difference of two fp32 arrays over max(1, largest value of ``ours``).

    Raises:
        CheckpointError: they differ by more than ``TOLERANCE``, in shape, or are not finite.
    """
    theirs = torch.as_tensor(theirs)
    if ours.shape != theirs.shape:
        raise CheckpointError(
            f"{what}: shape {tuple(theirs.shape)}, our model gives {tuple(ours.shape)}; nothing written"
        )
    difference = float((ours.double() - theirs.double()).abs().max() / ours.double().abs().max().clamp_min(1))
    # `not <=`, so that NaN is refused as well.
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"{what}: differs from our model by {difference:.2g} (allowed {TOLERANCE}); nothing written"
        )
    return difference

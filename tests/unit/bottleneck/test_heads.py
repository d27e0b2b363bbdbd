"""The heads on packed windows and on padded rows, in blocks, and in validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capt.pretrain.base.blocks import blocks
from capt.pretrain.bottleneck.config import BottleneckSection
from capt.pretrain.bottleneck.texts import _TEXT, Texts, TextSizes
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.engines.local import LocalEngine
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress
from capt.pretrain.language.module import LanguageModule
from capt.pretrain.language.task import LanguageTask
from capt.pretrain.models import cross_entropy
from capt.pretrain.models.modernbert.config import ModernBertConfig
from tests.bottleneck import ragged_mapping

_LENGTHS = ((3, 2, 7), (12,), (2, 2, 2, 2, 4), (1, 11))
"""Tokens of the texts of each window; the first of each window has <s>, and all end with a separator."""


def _module(cls: str, head: str = "both") -> LanguageModule:
    mapping = {
        "task": {"type": "capt_language"}, "data": {"sequence_length": 12, "cross_document_attention": False},
        "contrast": {"weight": 0}, "bottleneck": {"head": head, "pooling": cls, "decoder_rate": 0.4},
    }  # fmt: skip
    job: Any = job_from_mapping(mapping, "test")
    torch.manual_seed(0)
    config = ModernBertConfig(
        size="custom", layers=2, hidden=32, heads=2, ffn=48, vocab_size=60, pad_id=1, max_positions=12, dropout=0.0,
        attention_dropout=0.0, initializer_range=0.3,
    )  # fmt: skip
    return LanguageModule(job, config).double()


def _loss(module: LanguageModule, tokens: Tensor, numbers: Tensor, keys: Tensor) -> Tensor:
    words = torch.where(tokens > 4, tokens, -100)
    sizes = TextSizes.of(numbers.numpy(), words.numpy())
    none = torch.zeros(len(tokens), 1, dtype=torch.int64)
    documents = numbers if (numbers > 0).any() else None
    output = module(
        tokens, tokens, none, none - 100, documents, padded=bool((tokens == 1).any()), step=0,
        texts=Texts(numbers, words, keys, sizes),
    )  # fmt: skip
    return output.bottleneck.bow + output.bottleneck.decoder  # type: ignore[no-any-return]


def test_the_encoder_begins_as_without_heads() -> None:
    plain, state = _module("mean", "none"), _module("mean").state_dict()
    assert not [name for name in plain.state_dict() if "bottleneck" in name]
    assert all(torch.equal(x, state[name]) for name, x in plain.state_dict().items())


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_packed_windows_are_padded_rows(pooling: str) -> None:
    """Losses and gradients of an encoder whose positions are relative: each text alone, under its own key."""
    module, draw = _module(pooling), torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 60, (4, 12), generator=draw)
    numbers = torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in _LENGTHS])
    tokens[:, 0] = 0
    tokens.masked_fill_(torch.nn.functional.pad(numbers.diff(dim=1), (0, 1), value=1) > 0, 2)
    keys = torch.tensor([5, -9, 1 << 40, 77])
    packed = _loss(module, tokens, numbers, keys)
    packed.backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    rows = [tokens[window][numbers[window] == text] for window in range(4) for text in range(len(_LENGTHS[window]))]
    alone = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
    of_texts = torch.cat(
        [key + torch.tensor(_TEXT) * torch.arange(len(row)) for key, row in zip(keys, _LENGTHS, strict=True)]
    )
    padded = _loss(module, alone, torch.where(alone == 1, -1, 0), of_texts)
    padded.backward()
    torch.testing.assert_close(packed, padded)
    assert any("decoder" in name for name in gradients)
    for name, p in module.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, gradients[name], msg=name)


def test_blocks_of_rows_are_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    module, draw = _module("mean"), torch.Generator().manual_seed(1)
    tokens, numbers = torch.randint(5, 60, (40, 12), generator=draw), torch.zeros(40, 12, dtype=torch.int64)
    found, sizes = [], []
    for rows in (1 << 30, 7):
        monkeypatch.setattr(cross_entropy, "_FEWEST_ROWS", rows)
        monkeypatch.setattr(cross_entropy, "_LOGITS_BYTES", {"cpu": 0})
        monkeypatch.setattr(cross_entropy, "blocks", lambda n, size: sizes.append(size) or blocks(n, size))
        module.zero_grad()
        loss = _loss(module, tokens, numbers, torch.arange(40))
        (3 * loss).backward()
        found.append([loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)])
        with torch.no_grad():
            torch.testing.assert_close(_loss(module, tokens, numbers, torch.arange(40)), loss)
    assert 7 in sizes
    assert 1 << 30 in sizes
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_validation_counts_valid_windows_alone(tmp_path: Path) -> None:
    """Any micro-batch, whose last one is filled up, gives the means over texts and over words."""
    found = []
    for micro in (2, 4, 9):
        mapping = ragged_mapping(tmp_path, bottleneck={"head": "both"}, batch={"global": 36, "micro": micro})
        job: Any = job_from_mapping(mapping, "test")
        task = LanguageTask(job, tmp_path / "run")
        module = task.build_modules()["model"].eval()
        report = task.validate({"model": LocalEngine("model", module, job, ModuleOptimizer(job.optimizer))}, Progress())
        assert report.keys() == job.metric_names()
        found.append([float(report[f"loss/{head}"]) for head in ("bow", "decoder")])
    np.testing.assert_allclose(found, [found[0]] * 3, rtol=1e-6)
    assert all(abs(value - np.log(420)) < 1 for value in found[0])


def test_the_names_of_heads() -> None:
    assert [BottleneckSection(head=head).heads for head in ("none", "bow", "decoder", "both")] == [
        (), ("bow",), ("decoder",), ("bow", "decoder"),
    ]  # fmt: skip

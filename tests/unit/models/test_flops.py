from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from capt.pretrain.models.architecture import flops_per_token
from capt.pretrain.models.config import RobertaConfig
from tests.documented import ROOT
from tests.unit.models.support import LENGTH, batch, small_model

N, MASKED = 5, 3


def _counted(contrast: bool, pooling: str) -> float:
    """Count a training step by the dispatcher (the attention is spelt out in products when dropout is on)."""
    model = small_model(contrast, torch.float32, pooling=pooling)
    with FlopCounterMode(display=False) as counter:
        out = model(*batch(N, MASKED))
        loss = out.mlm_loss_sum if out.s is None else out.mlm_loss_sum + (out.s * out.s_hat).sum()
        loss.backward()
    return counter.get_total_flops() / (N * LENGTH)


def test_mlm_alone_is_what_runs() -> None:
    expected = flops_per_token(small_model(False).config, LENGTH, MASKED / LENGTH, views=1)
    assert _counted(False, "cls") == pytest.approx(expected, rel=0.02)  # + the gradient of the vocabulary's bias


def test_mean_pooling_is_what_runs() -> None:
    expected = flops_per_token(small_model(pooling="mean").config, LENGTH, MASKED / LENGTH, views=2)
    assert _counted(True, "mean") == pytest.approx(expected, rel=0.02)


def test_roberta_base_by_hand_with_the_vocabulary_and_as_the_page_says() -> None:
    h, ffn, layers, vocabulary, length, masks = 768, 3072, 12, 50265, 512, 0.15
    everywhere, row = 4 * h * h, 4 * h * h + 4 * h * ffn + 4 * h * length  # keys and values; query, output, the rest
    encoder = 3 * (layers * everywhere + (layers - 1 + masks) * row)
    head = 3 * masks * (2 * h * h + 2 * h * vocabulary)
    counted = flops_per_token(RobertaConfig(size="base", vocab_size=vocabulary), length, masks, views=1)
    assert counted == pytest.approx(encoder + head, rel=1e-9)
    told = " ".join((ROOT / "docs/guide/training.md").read_text().split())
    figures = f"{counted / 1e6:.0f} MFLOP: {encoder / 1e6:.0f} of the encoder, and {head / 1e6:.0f} of the head"
    assert figures in told
    assert f"needs {3 * layers * (everywhere + row) / 1e6:.0f}, nearly the same" in told


def test_both_views_count_what_is_read() -> None:
    """The original's rows of the last layer equal the corrupted's in number for a static shape; only <s> is needed."""
    expected = flops_per_token(small_model().config, LENGTH, MASKED / LENGTH, views=2)
    assert expected < _counted(True, "cls") < 1.2 * expected


def test_attention_within_documents_counts_what_it_computes() -> None:
    """Windows of equal documents, of lengths that need no padding: the products that run are those that are counted."""
    length, part, n = 256, 32, 2
    model = small_model(False, torch.float32, max_positions=length, layers=3)
    tokens = torch.randint(5, 97, (n, length))
    documents = (torch.arange(length) // part).expand(n, -1)
    with FlopCounterMode(display=False) as counter:
        model.encoder.train()(tokens, documents=documents, runs=n * length // part).sum().backward()
    expected = 3 * n * model.config.flops(float(length), float(length), seen=float(part))
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-6)
    assert 3 * n * model.config.flops(float(length), float(length)) > 1.5 * expected

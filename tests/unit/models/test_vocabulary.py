"""``pad_vocab_to`` changes the size of two tables and nothing that is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from capt.pretrain.models.capt import CaptModel, unpadded
from capt.pretrain.models.heads import TABLES, with_rows
from tests.unit.models.support import VOCABULARY, assert_same, batch, small_config, small_model

ROWS = 128


def _pair(**fields: Any) -> tuple[CaptModel, CaptModel]:
    """The same model without and with padding, whose rows hold numbers here that would take most of the softmax."""
    plain = small_model(**fields)
    padded = CaptModel(small_config(pad_vocab_to=64, **fields)).double()
    padded.load_state_dict(with_rows(plain.state_dict(), ROWS))
    with torch.no_grad():
        padded.mlm.weight[VOCABULARY:] = 3.0
        padded.mlm.bias[VOCABULARY:] = 50.0
    return plain, padded


def test_a_seed_means_the_same_model_for_any_padding() -> None:
    states = []
    for multiple in (1, 64):
        torch.manual_seed(3)
        states.append(CaptModel(small_config(pad_vocab_to=multiple)).state_dict())
    plain, padded = states
    for name, tensor in padded.items():
        if name in TABLES:
            assert len(tensor) == ROWS
            assert not tensor[VOCABULARY:].any()
        assert torch.equal(tensor[: len(plain[name])], plain[name])


@pytest.mark.parametrize("autocast", [False, True])
def test_losses_and_gradients_are_those_of_the_unpadded_model(autocast: bool) -> None:
    results = []
    for model in _pair(dropout=0.0, attention_dropout=0.0):
        model = model.float() if autocast else model
        tokens, corrupted, positions, labels = batch()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model.train()(tokens, corrupted, positions, labels)
        assert out.s is not None
        (out.mlm_loss_sum + (out.s @ out.s_hat.T).logsumexp(0).sum()).backward()
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert not any(named[name][VOCABULARY:].any() for name in TABLES if name in named)
        results.append((out.mlm_loss_sum, out.mlm_correct, with_rows(named, VOCABULARY)))
    (loss, correct, ours), (padded_loss, padded_correct, theirs) = results
    torch.testing.assert_close(padded_loss, loss, rtol=1e-6 if autocast else 1e-13, atol=0)
    assert int(correct) == int(padded_correct)
    assert_same(ours, theirs, 2e-2 if autocast else 1e-11)


def test_scores_are_of_the_ids_alone() -> None:
    plain, padded = _pair()
    hidden = torch.randn(3, 32, dtype=torch.float64)
    torch.testing.assert_close(padded.mlm.logits(hidden), plain.mlm.logits(hidden), rtol=1e-13, atol=1e-13)
    cut = unpadded(padded)
    assert cut.config.pad_vocab_to == 1
    assert cut.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(tensor, cut.state_dict()[name]) for name, tensor in plain.state_dict().items())
    assert unpadded(plain) is plain

"""The LSTM computes under autocast on every processor."""

from __future__ import annotations

import pytest
import torch

from capt.pretrain.models import lstm
from capt.pretrain.models.lstm import LSTM


def _states(module: LSTM, *, given: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randn(5, 3, 8, generator=generator, requires_grad=True)
    begin = torch.randn(1, 3, 16, generator=generator)
    states, _ = module(words, (begin, torch.zeros_like(begin))) if given else module(words)
    module.zero_grad()
    states.float().square().sum().backward()
    assert words.grad is not None
    return states.detach(), words.grad


@pytest.mark.parametrize("given", [False, True])
def test_without_bf16_it_computes_in_fp32(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = LSTM(8, 16)
    expected = _states(module, given=given)
    monkeypatch.setattr(lstm, "lacks_bf16", lambda device: True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = _states(module, given=given)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("given", [False, True])
def test_under_autocast_it_is_near_fp32_on_this_processor(given: bool) -> None:
    module = LSTM(8, 16)
    expected = _states(module, given=given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = _states(module, given=given)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.02)

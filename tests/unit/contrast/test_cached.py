"""A contrast over many micro-batches in the memory of one, against the graph of all of them together."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_job
from capt.pretrain.contrast import capt_loss
from capt.pretrain.contrast.cached import cached_backward
from capt.pretrain.contrast.queue import ShardedQueue
from capt.pretrain.contrastive import views as module
from capt.pretrain.contrastive.task import ContrastTask
from capt.pretrain.contrastive.views import CachedContrast, KeptGraphs, Losses, Views

ROWS, WIDTH = 3, 5


class Encoder(nn.Module):
    """Two views of a batch, with dropout, so that the second pass must draw what the first drew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4)).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        both = nn.functional.normalize(self.net(torch.cat([x, x + 0.1])), dim=1)
        first, second = both.split(len(x))
        return first, second


def _queue() -> ShardedQueue:
    queue = ShardedQueue(7, 4, dtype=torch.float64)
    rows = torch.randn(7, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    queue.enqueue(nn.functional.normalize(rows, dim=1))
    return queue


def _batches(count: int) -> list[Tensor]:
    x = torch.randn(count * ROWS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return list(x.split(ROWS))


def _reference(encoder: Encoder, batches: list[Tensor], temperature: Tensor | float) -> Tensor:
    """All graphs together, dropout drawn in the same order."""
    torch.manual_seed(0)
    views = [encoder(batch) for batch in batches]
    s, s_hat = (torch.cat(parts) for parts in zip(*views, strict=True))
    loss = capt_loss(s, s_hat, _queue(), temperature=temperature)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(("count", "keep"), [(1, 0), (2, 0), (5, 0), (5, 2), (5, 9)])
def test_gradient_is_that_of_one_large_batch(count: int, keep: int) -> None:
    whole, cached, batches = Encoder(), Encoder(), _batches(count)
    expected = _reference(whole, batches, 0.1)
    torch.manual_seed(0)
    passes = []
    cached.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    loss = cached_backward(cached, batches, lambda s, s_hat: capt_loss(s, s_hat, _queue(), temperature=0.1), keep=keep)
    again = count - min(keep, count)
    assert passes == [True] * (count - again) + [False] * again + [True] * again
    torch.testing.assert_close(loss, expected)
    assert not loss.requires_grad
    for a, b in zip(cached.parameters(), whole.parameters(), strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-13)


def test_an_iterator_of_micro_batches_is_gone_through_twice() -> None:
    """Its second pass, which gives the gradients, would find nothing left."""
    whole, cached, batches = Encoder(), Encoder(), _batches(3)
    _reference(whole, batches, 0.1)
    torch.manual_seed(0)
    once = (batch for batch in batches)
    cached_backward(cached, once, lambda s, s_hat: capt_loss(s, s_hat, _queue(), temperature=0.1))
    for a, b in zip(cached.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-13)


def test_it_is_not_the_mean_over_micro_batches() -> None:
    """A contrast of each micro-batch alone has another gradient altogether: hence the cache."""
    whole, apart, batches = Encoder(), Encoder(), _batches(4)
    _reference(whole, batches, 0.1)
    torch.manual_seed(0)
    for batch in batches:
        (capt_loss(*apart(batch), _queue(), temperature=0.1) / len(batches)).backward()
    difference = sum(
        float((a.grad - b.grad).norm()) for a, b in zip(apart.parameters(), whole.parameters(), strict=True)
    )  # type: ignore[operator]
    assert difference > 0.1 * sum(float(b.grad.norm()) for b in whole.parameters())  # type: ignore[union-attr]


def test_no_micro_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="one micro-batch or more"):
        cached_backward(lambda x: (x,), [], lambda s: s.sum())


@pytest.mark.parametrize(("chosen", "keep"), [(False, 0), (True, 0), (True, 2)])
def test_a_learned_temperature_and_left_out_samples(chosen: bool, keep: int) -> None:
    """The surrogates have the gradient of the whole step where an engine takes the mean over unlike micro-batches."""
    whole, cached = Encoder(), Encoder()
    batches, starts = list(torch.cat(_batches(3)).split([4, 2, 3])), [0, 4, 6]
    tau, tau_cached = (torch.tensor(0.2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    only = [torch.tensor([0, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([1])] if chosen else [None] * 3
    rows = torch.arange(9)
    if chosen:
        rows = torch.cat([each + start for start, each in zip(starts, only, strict=True) if each is not None])
    torch.manual_seed(0)
    s, s_hat = (torch.cat(parts) for parts in zip(*[whole(batch) for batch in batches], strict=True))
    expected = capt_loss(s[rows], s_hat[rows], _queue(), temperature=tau)
    expected.backward()

    def views(number: int) -> Views:
        s, s_hat = cached(batches[number])
        return Views(s, s_hat, torch.arange(len(s)) + starts[number], tau_cached * 1.0, only[number])

    def contrast(all_views: Views) -> Tensor:
        assert torch.equal(all_views.ids, torch.arange(9))
        assert (all_views.only is None) == (not chosen)
        kept = torch.arange(9) if all_views.only is None else all_views.only
        assert torch.equal(kept, rows)
        return capt_loss(all_views.s[kept], all_views.s_hat[kept], _queue(), temperature=all_views.temperature)

    torch.manual_seed(0)

    def losses(number: int) -> Losses:
        return views(number), torch.zeros(()), {}

    passes = [[functools.partial(each, number) for number in range(3)] for each in (views, losses)]
    step = CachedContrast(*passes, contrast, KeptGraphs(keep, torch.device("cpu")))
    torch.testing.assert_close(step.loss, expected.detach())
    for number in range(3):
        seen, _, _ = step.losses(number)
        assert seen is not None
        (step.surrogate(number, seen) / 3).backward()
    for a, b in zip([*cached.parameters(), tau_cached], [*whole.parameters(), tau], strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-13)


def test_graphs_are_kept_as_far_as_a_gpu_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 100 bytes, 10 of them reserve; weights and all else take 40 at the peak, with the one graph of 12.

    Of these 40, 15 are the optimizer's, from the first update on: the second, as fp16 leaves out the first one.
    """
    used = [15]
    peak = [25]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: used[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 45)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (55, 120))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, used[0]))
    monkeypatch.setattr(module, "MARGIN", 0.1)
    kept = KeptGraphs("auto", torch.device("cuda"))

    def step(sizes: list[int], was_skipped: bool = False, sequences: int = 9, at_most: int = 0) -> int:
        kept.begin_step(sequences)
        before, count = used[0], 0
        while count < len(sizes) and kept.has_room_for(count):
            with kept.measured():
                used[0] += sizes[count]
            count += 1
        used[0], peak[0] = before, max(peak[0], at_most)
        kept.end_step(lambda: was_skipped)
        return count

    assert step([12] * 9, was_skipped=True) == 1
    assert step([12] * 9) == 1
    used[0], peak[0] = 30, 40
    assert step([12] * 9) == 1
    assert step([12] * 9) == (90 - 40) // 12 + 1
    assert step([5, 5, 5, 40, 5, 5]) == 4  # graphs of texts differ; from now on one of 40 must fit beside the others
    assert step([12] * 9) == 2
    peak[0] = 88
    assert step([15] * 18, sequences=18, at_most=55) == 1, "a larger step has a larger contrast: measured again"
    assert step([15] * 18, sequences=18) == (90 - 55) // 15 + 1


@pytest.mark.parametrize(("stage", "keeps"), [(2, True), (3, False)])
def test_on_a_gpu_zero_3_keeps_no_graph(stage: int, keeps: bool) -> None:
    task: Any = SimpleNamespace(job=load_job("capt_tiny"), _kept=None)
    engine = mock.MagicMock(zero_stage=stage, device=torch.device("cuda"))
    assert ContrastTask._kept_graphs(task, engine, 8).has_room_for(0) == keeps


def test_the_number_of_kept_graphs_is_the_one_that_is_asked_for() -> None:
    kept = KeptGraphs(2, torch.device("cpu"))
    assert [kept.has_room_for(number) for number in range(4)] == [True, True, False, False]

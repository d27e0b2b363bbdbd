"""Queued negatives weighted by their nearness, on one process: exact in value and gradient, at every hardness."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.contrast import ContrastSection
from capt.pretrain.contrast import ContrastStats, ShardedQueue, capt_loss, info_nce
from capt.pretrain.contrast.kernels import Precision
from tests.unit.contrast.reference import effective_negatives_by_terms, hard_weights_by_terms, info_nce_dense
from tests.unit.contrast.support import Problem, clustered, near, relative, unit
from tests.unit.contrast.test_capt import _largest

N, D, K = 5, 40, 300
HARDNESS = (0.5, 10.0, 100.0, 1000.0)


def _queue(pushed: int = 250, dtype: torch.dtype = torch.float64, ids: Tensor | None = None) -> ShardedQueue:
    queue = ShardedQueue(K, D, dtype=dtype)
    queue.enqueue(unit(pushed, D, seed=7, dtype=dtype), ids=ids)
    return queue


def _run(s: Tensor, s_hat: Tensor, queue: ShardedQueue, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    s, s_hat = s.clone().requires_grad_(), s_hat.clone().requires_grad_()
    loss = capt_loss(s, s_hat, queue, **options)
    d_s, d_s_hat = torch.autograd.grad(loss, (s, s_hat))
    return loss.detach(), d_s, d_s_hat


def _problem(
    s: Tensor, s_hat: Tensor, queue: ShardedQueue, temperature: float, hardness: float, **more: Any
) -> Problem:
    return Problem(s, s_hat, torch.zeros(len(s), dtype=torch.int64), queue.rows, temperature, hardness=hardness, **more)


@functools.cache
def _literal(hardness: float, temperature: float, noise: float, pushed: int) -> tuple[float, Tensor, Tensor, float]:
    s = unit(N, D, seed=0)
    return _problem(s, near(s, noise, seed=1), _queue(pushed), temperature, hardness).solve()


def test_two_queued_rows_by_hand() -> None:
    """Cosines 1 and 0, hardness log 3: they count 2 * 3 / 4 and 2 * 1 / 4 times. The positive has cosine 0."""
    axes = torch.eye(3, dtype=torch.float64)
    both = torch.ones(1, 2, dtype=torch.bool)
    weights = hard_weights_by_terms(axes[:1], axes[[0, 2]], both, math.log(3))
    assert weights[0].tolist() == pytest.approx([1.5, 0.5], rel=1e-14)
    queue = ShardedQueue(2, 3, dtype=torch.float64)
    queue.enqueue(axes[[0, 2]])
    loss = info_nce(axes[:1], axes[1:2], queue=queue, temperature=0.5, in_batch="none", hardness=math.log(3))
    assert float(loss) == pytest.approx(math.log(1 + 1.5 * math.exp(2) + 0.5), rel=1e-14)


@pytest.mark.parametrize("impl", ["chunked", "dense"])
@pytest.mark.parametrize("pushed", [250, 800], ids=["half-filled", "wrapped"])
@pytest.mark.parametrize("noise", [10.0, 0.05], ids=["random", "saturated"])
@pytest.mark.parametrize("temperature", [0.5, 0.05, 0.005])
@pytest.mark.parametrize("hardness", HARDNESS)
def test_exact_in_float64(hardness: float, temperature: float, noise: float, pushed: int, impl: str) -> None:
    s = unit(N, D, seed=0)
    s_hat, queue = near(s, noise, seed=1), _queue(pushed)
    loss, d_s, d_s_hat = _run(s, s_hat, queue, temperature=temperature, hardness=hardness, impl=impl)
    expected = _literal(hardness, temperature, noise, pushed)
    assert abs(float(loss) - expected[0]) <= 1e-12 * max(expected[0], 1.0)
    assert relative(d_s, expected[1]) < 1e-10
    assert relative(d_s_hat, expected[2]) < 1e-10


@pytest.mark.parametrize("noise", [10.0, 0.05], ids=["random", "saturated"])
@pytest.mark.parametrize(
    ("hardness", "temperature", "bound"), [(1.0, 0.05, 1e-5), (30.0, 0.05, 1e-5), (30.0, 0.5, 1e-5), (1e3, 0.05, 1e-3)]
)
def test_float32(hardness: float, temperature: float, bound: float, noise: float) -> None:
    """Exponentials that stay in range by themselves, and others that do not (e^1020 overflows float64, too)."""
    s = unit(N, D, seed=0, dtype=torch.float32)
    s_hat, queue = near(s, noise, seed=1), _queue(800, torch.float32)
    loss, *gradients = _run(s, s_hat, queue, temperature=temperature, hardness=hardness)
    expected, *wanted, _ = _problem(s, s_hat, queue, temperature, hardness).solve()
    assert abs(float(loss) - expected) < bound * expected
    for actual, want in zip(gradients, wanted, strict=True):
        assert relative(actual, want) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_hardest_hardness_leaves_the_nearest_row_alone(dtype: torch.dtype) -> None:
    """It then counts as all rows together did. The logits of fp32 are off by 6e-8 of their size, and so is the loss."""
    anchors, positives, queue = unit(1, D, seed=0, dtype=dtype), unit(1, D, seed=1, dtype=dtype), _queue(dtype=dtype)
    loss = info_nce(anchors, positives, queue=queue, temperature=0.1, in_batch="none", hardness=1e5)
    nearest = float((queue.rows @ anchors[0]).max())
    margin = math.log(250) + (nearest - float(anchors[0] @ positives[0])) / 0.1
    allowed = 6e-8 * 2e5 if dtype == torch.float32 else 1e-9
    assert float(loss) == pytest.approx(math.log1p(math.exp(margin)), abs=allowed)


def test_hardly_any_hardness_is_hardly_a_change_and_none_is_none() -> None:
    s, s_hat, queue = unit(N, D, seed=0), unit(N, D, seed=1), _queue()
    plain, hardly, none, much = (
        _run(s, s_hat, queue, temperature=0.1, **options)
        for options in ({}, {"hardness": 1e-9}, {"hardness": 0.0}, {"hardness": 10.0})
    )
    assert all(torch.equal(a, b) for a, b in zip(none, plain, strict=True))
    assert all(0 < relative(a, b) < 1e-8 for a, b in zip(hardly, plain, strict=True))
    assert float(much[0]) > float(plain[0]) + 0.1


def test_live_rows_count_once_and_without_a_queue_there_is_nothing_to_weigh() -> None:
    s, s_hat = unit(N, D, seed=0), unit(N, D, seed=1)
    alone = capt_loss(s, s_hat, temperature=0.1)
    assert torch.equal(capt_loss(s, s_hat, temperature=0.1, hardness=10.0), alone)
    empty = ShardedQueue(K, D, dtype=torch.float64)
    assert float(capt_loss(s, s_hat, empty, temperature=0.1, hardness=10.0)) == pytest.approx(float(alone), rel=1e-14)


@pytest.mark.parametrize("temperature", [0.3, 0.05])
@pytest.mark.parametrize("hardness", [10.0, 1000.0])
def test_gradient_of_a_learned_temperature(temperature: float, hardness: float) -> None:
    s, s_hat, queue = unit(N, D, seed=0), unit(N, D, seed=1), _queue()
    tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    capt_loss(s, s_hat, queue, temperature=tau, hardness=hardness).backward()
    assert tau.grad is not None
    expected = _problem(s, s_hat, queue, temperature, hardness).solve()[3]
    assert tau.grad.item() == pytest.approx(expected, rel=1e-10)


def test_the_weights_take_no_gradient() -> None:
    """The comparisons above tell the conventions apart: with gradient it is another one, by far."""
    anchors, positives, queue = unit(4, D, seed=0), unit(4, D, seed=1), _queue()
    all_queued, slopes = torch.ones(4, 250, dtype=torch.bool), {}
    for convention in ("numbers", "functions"):
        q = anchors.clone().requires_grad_()
        weights = 250 * torch.softmax(10 * q @ queue.rows.T, 1)
        weights = weights.detach() if convention == "numbers" else weights
        info_nce_dense(q, positives, queue.rows, all_queued, 0.1, weights).mean().backward()
        slopes[convention] = q.grad
    q = anchors.clone().requires_grad_()
    info_nce(q, positives, queue=queue, temperature=0.1, in_batch="none", hardness=10.0).backward()
    assert q.grad is not None
    assert relative(q.grad, slopes["numbers"]) < 1e-12
    assert relative(q.grad, slopes["functions"]) > 0.1


@pytest.mark.parametrize("hardness", [10.0, 1000.0])
def test_rows_of_the_anchors_instance_are_neither_weighted_nor_counted(hardness: float) -> None:
    ids, queue_ids = torch.tensor([3, 3, 8, 1, 2]), torch.arange(250) % 9
    s, s_hat, queue = unit(N, D, seed=0), unit(N, D, seed=1), _queue(ids=queue_ids)
    loss, d_s, d_s_hat = _run(s, s_hat, queue, temperature=0.1, ids=ids, hardness=hardness)
    expected = _problem(s, s_hat, queue, 0.1, hardness, ids=ids, queue_ids=queue.ids).solve()
    assert float(loss) == pytest.approx(expected[0], rel=1e-12)
    assert max(relative(d_s, expected[1]), relative(d_s_hat, expected[2])) < 1e-10


@pytest.mark.parametrize("hardness", [10.0, 1000.0], ids=["fixed", "running"])
def test_an_anchor_without_any_negative_has_no_loss(hardness: float) -> None:
    s, s_hat = unit(2, D, seed=0), unit(2, D, seed=1)
    queue = _queue(ids=torch.full((250,), 3))
    stats = ContrastStats()
    same = torch.tensor([3, 3])
    found = _run(s, s_hat, queue, temperature=0.1, ids=same, hardness=hardness)
    assert not any(values.any() for values in found)
    capt_loss(s, s_hat, queue, temperature=0.1, ids=same, hardness=hardness, stats=stats)
    assert stats.effective_negatives == 0


@pytest.mark.parametrize("temperature", [0.5, 0.05, 0.005])
@pytest.mark.parametrize("share", [None, 0.4])
def test_diagnostics_are_of_the_weighted_terms_and_the_margin_of_the_rows(
    temperature: float, share: float | None
) -> None:
    s, s_hat, queue, stats = unit(N, D, seed=0), unit(N, D, seed=1), _queue(), ContrastStats()
    loss = capt_loss(s, s_hat, queue, temperature=temperature, hardness=20.0, queue_share=share, stats=stats)
    rows, problem = torch.cat([s, s_hat]), _problem(s, s_hat, queue, temperature, 20.0)
    keys, weights = torch.cat([rows, queue.rows]), problem.weights()
    assert weights is not None
    weights[:, 2 * N :] *= 1.0 if share is None else share * 2 * N / 250
    partners, is_negative = torch.cat([s_hat, s]), problem.is_negative()
    expected = info_nce_dense(rows, partners, keys, is_negative, temperature, weights).sum() / N
    assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    numbers = effective_negatives_by_terms(rows, keys, is_negative, temperature, weights)
    assert stats.effective_negatives == pytest.approx(sum(numbers) / len(numbers), rel=1e-10)
    nearest = (rows @ keys.T).masked_fill(~is_negative, -torch.inf).amax(1)
    assert stats.margin == pytest.approx(float(((rows * partners).sum(1) - nearest).mean()), rel=1e-10)


@pytest.mark.parametrize("with_ids", [False, True])
def test_no_tensor_near_anchors_times_queue_or_as_large_as_the_queue(with_ids: bool) -> None:
    n, d, k = 64, 96, 4096
    largest = _largest(n, d, k, "chunked", ids=torch.arange(n) if with_ids else None, hardness=10.0)
    assert 0 < largest.elements < min(2 * n * k / 4, k * d), largest.name


@pytest.mark.parametrize(("hardness", "temperature"), [(10.0, 0.5), (10.0, 0.05), (200.0, 0.05)])
def test_the_loss_stays_within_the_bound_of_its_precision(hardness: float, temperature: float) -> None:
    """docs/contrast.md: logits of both sums are moved; bf16 rounds the anchors on the wire and once more."""
    s = clustered(24, 96, seed=3).float()
    s_hat, queue = near(s, 0.3, seed=4), ShardedQueue(400, 96)
    queue.enqueue(clustered(400, 96, seed=5).float())
    options = {"temperature": temperature, "hardness": hardness}
    exact = _problem(s, s_hat, queue, temperature, hardness).solve()[0]
    plain = float(capt_loss(s, s_hat, queue, precision="fp32", **options))
    errors: dict[Precision, float] = {"bf16x6": 2**-21, "bf16x3": 2**-14, "bf16": 2**-6}
    for precision, error in errors.items():
        loss = float(capt_loss(s, s_hat, queue, precision=precision, **options))
        allowed = 2 * error * (2 * hardness + 1 / temperature) + 2 * abs(plain - exact)
        assert abs(loss - exact) <= allowed, precision


@pytest.mark.parametrize("hardness", [-1.0, math.nan, math.inf])
def test_no_such_hardness(hardness: float) -> None:
    with pytest.raises(ConfigError, match="hardness is a number of 0 or more"):
        capt_loss(unit(N, D, seed=0), unit(N, D, seed=1), _queue(), temperature=0.1, hardness=hardness)


def test_a_job_without_a_queue_has_nothing_to_weigh() -> None:
    with pytest.raises(ValidationError, match=r"contrast\.hardness weighs the rows of the queue: it needs"):
        ContrastSection(hardness=5.0, queue=0)
    assert ContrastSection(hardness=5.0, queue=64).hardness == 5.0
    assert ContrastSection().hardness == 0

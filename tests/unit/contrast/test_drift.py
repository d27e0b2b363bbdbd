"""Rows of a queue that follow the drift of the encoder, against literal loops in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.contrast import ContrastStats, ShardedQueue, capt_loss
from capt.pretrain.contrast.options import InBatch
from tests.unit.contrast.reference import capt_loss_dense, drifted_queue_by_terms
from tests.unit.contrast.support import relative, unit

N, D = 6, 8


def _steps(count: int) -> list[tuple[Tensor, Tensor]]:
    """Both views of some steps, of an encoder that drifts."""
    shift = unit(D, seed=50)
    rows = [[unit(N, D, seed=10 * t + view) + 0.4 * t * shift for view in (0, 1)] for t in range(count)]
    return [tuple(torch.nn.functional.normalize(view, dim=1) for view in views) for views in rows]  # type: ignore[misc]


def _queue(capacity: int = 1000, **options: Any) -> ShardedQueue:
    return ShardedQueue(capacity, D, **{"dtype": torch.float64, **options})


def _sorted(rows: Tensor) -> Tensor:
    """Rows in an order of their own: a queue gives them in none."""
    return rows[rows[:, 0].argsort()]


@pytest.mark.parametrize("drift", ["mean", "moments"])
@pytest.mark.parametrize("capacity", [1000, 17])
def test_negatives_are_those_of_the_literal_loops(drift: str, capacity: int) -> None:
    *old, (s, s_hat) = _steps(5)
    queue = _queue(capacity, drift=drift)
    for views in old:
        queue.enqueue(*views)
    pushed = [torch.cat(views) for views in old]
    live = torch.cat([s, s_hat])
    expected = drifted_queue_by_terms(pushed, live, capacity, scale=drift == "moments")
    found = queue.negatives([s, s_hat])
    torch.testing.assert_close(_sorted(found), _sorted(expected), rtol=1e-12, atol=1e-12)
    assert relative(_sorted(torch.cat(pushed)[-capacity:]), _sorted(expected)) > 0.05  # it is a correction

    s, s_hat = s.clone().requires_grad_(), s_hat.clone().requires_grad_()
    loss = capt_loss(s, s_hat, queue, temperature=0.1)
    truth = capt_loss_dense(s, s_hat, 0.1, expected) / N
    assert loss.item() == pytest.approx(truth.item(), rel=1e-12)
    for mine, theirs in zip(torch.autograd.grad(loss, (s, s_hat)), torch.autograd.grad(truth, (s, s_hat)), strict=True):
        assert relative(mine, theirs) < 1e-10


@pytest.mark.parametrize("drift", ["mean", "moments"])
def test_a_common_motion_of_the_rows_of_a_step_leaves_no_trace(drift: str) -> None:
    still, moved = _queue(drift=drift), _queue(drift=drift)
    rows, live = unit(N, D, seed=1), unit(N, D, seed=2)
    still.enqueue(rows)
    moved.enqueue(rows + 3 * unit(D, seed=3))
    torch.testing.assert_close(moved.negatives([live]), still.negatives([live]))


def test_moments_undo_a_scale_of_each_feature() -> None:
    plain, scaled = _queue(drift="moments"), _queue(drift="moments")
    rows, live = unit(N, D, seed=1), unit(N, D, seed=2)
    plain.enqueue(rows)
    scaled.enqueue(rows * torch.linspace(0.7, 1.5, D, dtype=torch.float64))
    torch.testing.assert_close(scaled.negatives([live]), plain.negatives([live]))


def test_a_feature_that_did_not_vary_is_not_blown_up() -> None:
    queue, rows = _queue(drift="moments"), unit(N, D, seed=1)
    rows[:, 0] = 0.3 + 1e-9 * torch.arange(N)
    queue.enqueue(rows)
    live = unit(N, D, seed=2)
    negatives = queue.negatives([live])
    assert (negatives[:, 0] - negatives[:, 0].mean()).abs().max() < 0.1


@pytest.mark.parametrize("drift", ["mean", "moments"])
def test_an_overflowed_step_spoils_neither_statistics_nor_rows(drift: str) -> None:
    queue = _queue(drift=drift)
    rows = unit(N, D, seed=1)
    queue.enqueue(rows)
    before = queue.negatives([unit(N, D, seed=2)]).clone()
    queue.enqueue(torch.full((N, D), torch.nan, dtype=torch.float64))
    after = queue.negatives([unit(N, D, seed=2)])
    torch.testing.assert_close(after[:N], before)
    assert (after[N:] == 0).all()
    resumed = _queue(drift=drift)
    resumed.load_state_dict(queue.state_dict())
    torch.testing.assert_close(resumed.negatives([unit(N, D, seed=2)]), after)
    some = unit(N, D, seed=3)
    some[2, 1] = torch.inf
    queue.enqueue(some)
    assert queue.negatives([unit(N, D, seed=2)]).isfinite().all()


@pytest.mark.parametrize("drift", ["mean", "moments"])
@pytest.mark.parametrize("rows", [1, N])
def test_rows_all_in_one_point_are_the_live_mean(drift: str, rows: int) -> None:
    """Their residuals are zeros, as those of one row are, and yet they are rows: not what overflowed."""
    queue, resumed = _queue(drift=drift), _queue(drift=drift)
    queue.enqueue(unit(1, D, seed=1).float().expand(rows, D))
    resumed.load_state_dict(queue.state_dict())
    live = unit(N, D, seed=2)
    mean = torch.nn.functional.normalize(live.mean(0), dim=0)
    for each in (queue, resumed):
        torch.testing.assert_close(each.negatives([live]), mean.expand(rows, D))


@pytest.mark.parametrize("drift", ["mean", "moments"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_residuals_of_half_precision_rows_are_exact(drift: str, dtype: torch.dtype) -> None:
    """A mean that is rounded to the rows' type would move all rows of a step alike."""
    queue, exact = _queue(drift=drift, dtype=torch.float32), _queue(drift=drift)
    rows, live = (0.1 * unit(N, D, seed=1) + unit(D, seed=3)).to(dtype), [unit(N, D, seed=2)]
    queue.enqueue(rows)
    exact.enqueue(rows.double())
    torch.testing.assert_close(queue.negatives(live).double(), exact.negatives(live), rtol=1e-5, atol=1e-5)


def test_left_out_samples_are_not_in_the_statistics() -> None:
    some, alone = _queue(drift="mean"), _queue(drift="mean")
    rows, only = unit(N, D, seed=1), torch.tensor([0, 2, 5])
    some.enqueue(rows, only=only)
    alone.enqueue(rows[only])
    live = [unit(N, D, seed=2)]
    torch.testing.assert_close(some.negatives(live), alone.negatives(live))


def test_residuals_in_bf16_are_near(tmp_path: Path) -> None:
    full, half = _queue(drift="moments"), _queue(drift="moments", dtype=torch.bfloat16)
    rows, live = unit(N, D, seed=1), [unit(N, D, seed=2)]
    for queue in (full, half):
        queue.enqueue(rows)
    assert half.negatives(live).dtype == torch.float32
    assert relative(half.negatives(live), full.negatives(live)) < 4e-3


@pytest.mark.parametrize("by_file", [True, False])
def test_state_goes_on_where_it_was(tmp_path: Path, by_file: bool) -> None:
    steps = _steps(6)
    queue, resumed = (_queue(31, drift="moments") for _ in range(2))
    for views in steps[:3]:
        queue.enqueue(*views)
    if by_file:
        queue.save_shard(tmp_path)
        resumed.load_shards(tmp_path)
    else:
        resumed.load_state_dict(queue.state_dict())
    for views in steps[3:5]:
        queue.enqueue(*views)
        resumed.enqueue(*views)
    assert torch.equal(resumed.negatives(steps[5]), queue.negatives(steps[5]))


def test_rows_of_another_drift_are_refused(tmp_path: Path) -> None:
    old = _queue()
    old.enqueue(unit(N, D, seed=1))
    old.save_shard(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds rows of drift none, this queue has mean.*contrast.drift=none"):
        _queue(drift="mean").load_shards(tmp_path)
    new = _queue(drift="mean")
    new.enqueue(unit(N, D, seed=1))
    with pytest.raises(CheckpointError, match=r"drift mean, this queue has moments"):
        _queue(drift="moments").load_state_dict(new.state_dict())
    new.save_shard(tmp_path)
    with pytest.raises(CheckpointError, match=r"contrast.drift=mean"):
        old.load_shards(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"drift": "median"}, "drift must be one of none, mean, moments")],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _queue(**options)


@pytest.mark.parametrize("temperature", [0.1, 0.01])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 1e6])
def test_a_share_of_the_queue_counts_its_rows_so_often(temperature: float, share: float) -> None:
    """Below tau = 1/64 the sums carry a running maximum."""
    queue, old = _queue(), unit(40, D, seed=1)
    queue.enqueue(old)
    s, s_hat = (unit(N, D, seed=2 + view).requires_grad_() for view in (0, 1))
    loss = capt_loss(s, s_hat, queue, temperature=temperature, queue_share=share)
    weight = min(1.0, share * 2 * N / 40)
    truth = capt_loss_dense(s, s_hat, temperature, old, queue_weight=weight) / N
    assert loss.item() == pytest.approx(truth.item(), rel=1e-10)
    mine, theirs = (torch.cat(torch.autograd.grad(each, (s, s_hat))) for each in (loss, truth))
    assert relative(mine, theirs) < 1e-9


def test_an_empty_queue_has_no_share() -> None:
    s, s_hat = unit(N, D, seed=2), unit(N, D, seed=3)
    alone = capt_loss(s, s_hat, temperature=0.1)
    assert capt_loss(s, s_hat, _queue(), temperature=0.1, queue_share=1.0) == alone


def test_a_queue_of_share_0_is_not_there() -> None:
    """Its rows lie on the anchors: as the largest logits they would push all live terms out of range."""
    s, s_hat, queue = unit(N, D, seed=2), unit(N, D, seed=3), _queue()
    queue.enqueue(s, s_hat)
    found, expected = ContrastStats(), ContrastStats()
    loss = capt_loss(s, s_hat, queue, temperature=0.002, queue_share=0.0, hardness=5.0, stats=found)
    assert loss == capt_loss(s, s_hat, temperature=0.002, stats=expected)
    for name in ("top1", "margin", "positive_probability", "effective_negatives"):
        assert getattr(found, name) == getattr(expected, name)


@pytest.mark.parametrize(("share", "in_batch"), [(1.0, "none"), (-1.0, "global"), (math.nan, "global")])
def test_a_share_is_a_number_and_needs_live_keys(share: float, in_batch: InBatch) -> None:
    s, s_hat = unit(N, D, seed=2), unit(N, D, seed=3)
    with pytest.raises(ConfigError, match="queue_share is a number of 0 or more, and a share of the live keys"):
        capt_loss(s, s_hat, _queue(), temperature=0.1, queue_share=share, in_batch=in_batch)

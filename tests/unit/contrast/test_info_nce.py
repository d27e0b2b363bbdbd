"""info_nce on one process, in each of its forms, against the dense oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast import ContrastStats, ShardedQueue, capt_loss, info_nce
from capt.pretrain.contrast.info_nce import check_rows
from tests.unit.contrast.reference import info_nce_dense
from tests.unit.contrast.support import relative, unit

N, D, TAU = 6, 17, 0.1


def _rows() -> tuple[Tensor, Tensor, Tensor]:
    a, p, extra = unit(N, D, seed=0), unit(N, D, seed=1), unit(4, D, seed=2)
    return a.requires_grad_(), p.requires_grad_(), extra.requires_grad_()


def _queue() -> ShardedQueue:
    queue = ShardedQueue(40, D, dtype=torch.float64)
    queue.enqueue(unit(33, D, seed=3))
    return queue


def _expected(q: Tensor, k: Tensor, keys: list[Tensor], live: int) -> Tensor:
    """Sum of losses: of the first ``live`` keys, those of the anchor's own index are left out."""
    rows = torch.cat(keys)
    is_negative = torch.ones(len(q), len(rows), dtype=torch.bool)
    for view in range(live // N):
        is_negative[:, view * N : (view + 1) * N] = ~torch.eye(N, dtype=torch.bool)
    return info_nce_dense(q, k, rows, is_negative, TAU).sum()


def _forms() -> list[tuple[dict[str, Any], Any, int]]:
    """Options, the oracle's sum of losses of (a, p, extra, queue rows), and the number of anchors."""
    return [
        ({}, lambda a, p, x, c: _expected(a, p, [p], N), N),
        ({"symmetric": True}, lambda a, p, x, c: _expected(a, p, [p], N) + _expected(p, a, [a], N), 2 * N),
        ({"within_view": True}, lambda a, p, x, c: _expected(a, p, [a, p], 2 * N), N),
        (
            {"symmetric": True, "within_view": True},
            lambda a, p, x, c: _expected(a, p, [a, p], 2 * N) + _expected(p, a, [a, p], 2 * N),
            2 * N,
        ),
        ({"within_view": True, "across_views": False}, lambda a, p, x, c: _expected(a, p, [a], N), N),
        (
            {"within_view": True, "across_views": False, "symmetric": True, "queue": True, "negatives": True},
            lambda a, p, x, c: _expected(a, p, [a, x, c], N) + _expected(p, a, [p, x, c], N),
            2 * N,
        ),
        ({"queue": True}, lambda a, p, x, c: _expected(a, p, [p, c], N), N),
        ({"queue": True, "in_batch": "none"}, lambda a, p, x, c: _expected(a, p, [c], 0), N),
        (
            {"queue": True, "in_batch": "none", "symmetric": True},
            lambda a, p, x, c: _expected(a, p, [c], 0) + _expected(p, a, [c], 0),
            2 * N,
        ),
        ({"negatives": True}, lambda a, p, x, c: _expected(a, p, [p, x], N), N),
        (
            {"negatives": True, "queue": True, "symmetric": True, "in_batch": "local"},
            lambda a, p, x, c: _expected(a, p, [p, x, c], N) + _expected(p, a, [a, x, c], N),
            2 * N,
        ),
    ]


@pytest.mark.parametrize(("options", "oracle", "anchors"), _forms(), ids=[str(form[0]) for form in _forms()])
@pytest.mark.parametrize("impl", ["chunked", "dense"])
@pytest.mark.parametrize("stats", [None, ContrastStats()], ids=["fixed", "running"])
def test_each_form(options: dict[str, Any], oracle: Any, anchors: int, impl: str, stats: ContrastStats | None) -> None:
    a, p, extra = rows = _rows()
    queue = _queue()
    arguments = {
        **options,
        "queue": queue if options.get("queue") else None,
        "negatives": extra if options.get("negatives") else None,
    }
    loss = info_nce(a, p, temperature=TAU, impl=impl, stats=stats, **arguments)
    wanted = oracle(a, p, extra, queue.rows) / anchors
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-13)
    summed = info_nce(a, p, temperature=TAU, reduction="sum", **arguments)
    assert summed.item() == pytest.approx(wanted.item() * anchors, rel=1e-13)
    gradients = torch.autograd.grad(loss, rows, materialize_grads=True)
    expected = torch.autograd.grad(wanted, rows, materialize_grads=True)
    for actual, want in zip(gradients, expected, strict=True):
        assert relative(actual, want) < 1e-12 if want.any() else not actual.any()


def test_capt_is_the_symmetric_form_with_both_views() -> None:
    a, p, _ = _rows()
    over_rows = info_nce(a, p, temperature=TAU, symmetric=True, within_view=True)
    assert capt_loss(a, p, temperature=TAU).item() == pytest.approx(2 * over_rows.item(), rel=1e-15)


def test_keys_of_a_frozen_encoder_take_no_gradient() -> None:
    a, p, _ = _rows()
    (actual,) = torch.autograd.grad(info_nce(a, p.detach(), temperature=TAU), a)
    (expected,) = torch.autograd.grad(_expected(a, p.detach(), [p.detach()], N) / N, a)
    assert relative(actual, expected) < 1e-12


def test_validation_without_gradients() -> None:
    a, p, _ = _rows()
    with torch.no_grad():
        loss = info_nce(a.detach(), p.detach(), temperature=TAU, queue=_queue())
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(info_nce(a, p, temperature=TAU, queue=_queue()).item(), rel=1e-14)


def test_numerical_gradient() -> None:
    """Independent of any oracle: finite differences of the loss itself, through the normalisation."""
    queue = ShardedQueue(40, 9, dtype=torch.float64)
    queue.enqueue(unit(40, 9, seed=6))
    raw = unit(3, 9, seed=4).requires_grad_(), unit(3, 9, seed=5).requires_grad_()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        x, y = (torch.nn.functional.normalize(rows, dim=-1) for rows in (x, y))
        return capt_loss(x, y, queue, temperature=0.2)

    assert torch.autograd.gradcheck(loss, raw, eps=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("positives", "negatives", "message"),
    [
        (unit(N - 1, D, seed=1), None, "must have one shape"),
        (unit(N, D, seed=1), unit(2, D + 1, seed=1), "negatives the same width"),
        (unit(N, D, seed=1), 2 * unit(2, D, seed=1), "negatives must have unit norm"),
        (unit(N, D, seed=1).to(torch.complex128), None, r"positives must be rows of real numbers, got .*complex128"),
        (torch.eye(N, D, dtype=torch.int64), None, r"positives must be rows of real numbers, got .*int64"),
        (unit(N, D, seed=1)[0], None, r"positives must be rows of real numbers, got \(\d+,\)"),
    ],
)
def test_rows_that_do_not_fit(positives: Tensor, negatives: Tensor | None, message: str) -> None:
    """Asked of the check itself: in tests the annotations of the public function refuse wrong shapes even earlier."""
    with pytest.raises(ConfigError, match=message):
        check_rows(unit(N, D, seed=0), positives, negatives, None, wait_for_values=True)


def test_a_queue_on_another_device_is_refused() -> None:
    """A queue on the meta device was not a queue at all, silently."""
    a, p, _ = _rows()
    with pytest.raises(ConfigError, match="the queue is on meta, the anchors on cpu"):
        info_nce(a, p, temperature=TAU, queue=ShardedQueue(8, D, device="meta"))


def test_without_a_batch_negatives_need_an_owner() -> None:
    a, p, extra = _rows()
    with pytest.raises(ConfigError, match="in_batch=none asks whose hard negative each of negatives is"):
        info_nce(a, p, temperature=TAU, queue=_queue(), negatives=extra, in_batch="none")

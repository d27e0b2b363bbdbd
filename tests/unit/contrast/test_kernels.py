"""The chunked kernel equals the dense one, on shapes that fit no block."""

from __future__ import annotations

import pytest
import torch

from capt.pretrain.contrast.kernels import KERNELS, Precision, Products, SoftmaxSums, _blocks
from capt.pretrain.contrast.masks import InstanceIds, NegativeMask
from capt.pretrain.plan.simulated import ADDS_IN_ANOTHER_TYPE
from tests.unit.contrast.support import relative, unit

SHAPES = [(1, 1, 3), (5, 127, 123), (300, 7, 9), (259, 2100, 17), (3, 0, 4), (0, 5, 4)]


def _problem(n: int, c: int, d: int, tau: float) -> tuple[torch.Tensor, torch.Tensor]:
    return unit(n, d, seed=0) / tau, unit(c, d, seed=1)


def _sums(n: int, d: int, value: float, reference: float | None) -> SoftmaxSums:
    full = torch.full((n, d + 1), value, dtype=torch.float64)
    at = None if reference is None else torch.full((n,), reference, dtype=torch.float64)
    return SoftmaxSums(full[:, 0].clone(), full[:, 1:].clone(), at, full[:, 0].clone())


def _mask(n: int, c: int) -> NegativeMask:
    return NegativeMask(InstanceIds(torch.arange(n) % 11, torch.arange(c) % 7))


@pytest.mark.parametrize(("n", "c", "d"), SHAPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_sums_are_equal(n: int, c: int, d: int, masked: bool, running: bool) -> None:
    q, keys = _problem(n, c, d, 0.05)
    results = []
    for kernel in (KERNELS["chunked"], KERNELS["dense"]):
        sums = _sums(n, d, 1.0, -3.0 if running else None)
        kernel.accumulate(sums, q, keys, _mask(n, c) if masked else None)
        results.append(sums)
    for name in ("normaliser", "weighted_keys", "running_max", "squares"):
        torch.testing.assert_close(getattr(results[0], name), getattr(results[1], name), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("n", "c", "d"), SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_key_gradients_are_equal(n: int, c: int, d: int, masked: bool) -> None:
    q, keys = _problem(n, c, d, 0.05)
    lse = (q @ keys.T).logsumexp(1) + 0.1 if c else torch.zeros(n, dtype=torch.float64)
    mask = _mask(n, c) if masked else None
    actual, expected = (KERNELS[name].key_gradient(q, keys, lse, mask) for name in ("chunked", "dense"))
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_an_own_key_far_above_all_negatives_is_no_number_too_large(name: str) -> None:
    """Its logit is not in lse: in fp32, exp of the difference would be infinite, and 0 times that is not a number."""
    q, keys = torch.tensor([[120.0, 0.0]]), torch.tensor([[1.0, 0.0], [-0.9, 0.1], [0.0, 1.0]])
    lse = (q @ keys[1:].T).logsumexp(1)
    found = KERNELS[name].key_gradient(
        q, keys, lse, NegativeMask(InstanceIds(torch.tensor([7]), torch.tensor([7, 8, 9])))
    )
    expected = (q @ keys.T - lse[:, None]).exp()[:, 1:].T @ q
    assert torch.equal(found[0], torch.zeros(2))
    torch.testing.assert_close(found[1:], expected)


def test_a_zero_anchor_asks_nothing_of_the_keys() -> None:
    """It is what pads the rows of a rank that has fewer than another."""
    q, keys = _problem(3, 5, 4, 0.5)
    q[2] = 0.0
    lse = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    without = KERNELS["dense"].key_gradient(q[:2], keys, lse[:2], None)
    assert relative(KERNELS["chunked"].key_gradient(q, keys, lse, None), without) < 1e-14


def test_normaliser_alone_needs_no_second_product() -> None:
    q, keys = _problem(5, 127, 8, 0.1)
    sums = SoftmaxSums(torch.zeros(5, dtype=torch.float64), None, None)
    KERNELS["chunked"].accumulate(sums, q, keys, None)
    torch.testing.assert_close(sums.normaliser, torch.exp(q @ keys.T).sum(1), rtol=1e-13, atol=0.0)


def test_running_max_survives_logits_that_overflow_exp() -> None:
    q, keys = unit(4, 6, seed=2) * 5000, unit(90, 6, seed=3)
    sums = _sums(4, 6, 0.0, -5000.0)
    KERNELS["chunked"].accumulate(sums, q, keys, None)
    logits = q @ keys.T
    assert sums.running_max is not None
    torch.testing.assert_close(sums.running_max, logits.amax(1))
    torch.testing.assert_close(sums.normaliser.log() + sums.running_max, logits.logsumexp(1), rtol=1e-13, atol=0.0)


@pytest.mark.parametrize(
    ("n", "c", "d"), [(1, 1, 1), (10, 507, 123), (513, 30_000, 64), (4096, 3, 64), (3000, 9000, 7)]
)
def test_blocks_cover_everything_once_and_stay_small(n: int, c: int, d: int) -> None:
    seen = torch.zeros(n, c, dtype=torch.int8)
    for rows, columns in _blocks(torch.empty(n, d), torch.empty(c, d)):
        block = seen[rows, columns]
        block += 1
        assert block.shape[1] <= -(-c // 8)
        assert block.numel() <= 1024 * 1024
        assert c < 8 or block.numel() <= 0.6 * c * d
    assert bool((seen == 1).all())


@pytest.mark.skipif(not ADDS_IN_ANOTHER_TYPE, reason="this torch has no shapes of addmm with out_dtype")
@pytest.mark.parametrize("precision", ["bf16", "bf16x3", "bf16x6"])
@pytest.mark.parametrize("queue", [torch.float32, torch.bfloat16])
def test_the_tensor_core_path_asks_only_for_what_torch_has(precision: Precision, queue: torch.dtype) -> None:
    """bfloat16 operands into float32 sums exist on a GPU only; the meta device checks calls, shapes and dtypes."""
    q, keys = torch.empty(64, 32, device="meta"), torch.empty(500, 32, dtype=queue, device="meta")
    weighted, lse = torch.empty(64, 32, device="meta"), torch.empty(64, device="meta")
    mask = NegativeMask(InstanceIds(*(torch.empty(n, dtype=torch.int64, device="meta") for n in (64, 500))))
    for reference in (None, lse):
        KERNELS["chunked"].accumulate(SoftmaxSums(lse, weighted, reference), q, keys, mask, Products(precision))
    assert KERNELS["chunked"].key_gradient(q, keys, lse, mask, Products(precision)).dtype == torch.float32

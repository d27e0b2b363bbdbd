"""The precisions of the contrast's products: what each costs in digits, and that it is no more than the bounds say."""

from __future__ import annotations

import functools
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast import ShardedQueue, capt_loss
from capt.pretrain.contrast.kernels import Precision, Products, multiply
from tests.unit.contrast.support import Problem, clustered, near, relative, unit

RELATIVE_ERROR: dict[Precision, float] = {
    "fp32": 0.0, "tf32": 2**-9, "bf16x6": 2**-21, "bf16x3": 2**-14, "bf16": 2**-7 + 2**-16,
}  # fmt: skip
"""The bound :math:`\\delta` of each precision."""

HERE: tuple[Precision, ...] = ("bf16x6", "bf16x3", "bf16")
"""The precisions that a CPU has; tests/gpu measures tf32."""

N, D, K = 24, 96, 700


def _rows() -> tuple[Tensor, Tensor, Tensor]:
    """Originals among many hard negatives, corruptions half of which are found, a queue; fp32."""
    s = clustered(N, D, seed=3).float()
    s_hat = torch.cat([near(s[: N // 2], 0.02, seed=4), near(s[N // 2 :], 0.3, seed=5)])
    return s, s_hat, torch.cat([clustered(K // 2, D, seed=6).float(), unit(K - K // 2, D, seed=7, dtype=torch.float32)])


@functools.cache
def _exact(tau: float, dtype: torch.dtype) -> tuple[float, Tensor]:
    """Loss and both gradients of the rows in float64, those of the queue as it holds them."""
    s, s_hat, queued = _rows()
    problem = Problem(s, s_hat, torch.zeros(N, dtype=torch.int64), queued.to(dtype), tau)
    exact, d_s, d_s_hat, _ = problem.solve()
    return exact, torch.cat([d_s, d_s_hat])


@functools.cache
def _solve(tau: float, precision: Precision, impl: str = "chunked", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Loss and both gradients, and the same of the rows that the queue holds in float64."""
    s, s_hat, queued = _rows()
    s.requires_grad_()
    s_hat.requires_grad_()
    queue = ShardedQueue(K, D, dtype=dtype)
    queue.enqueue(queued)
    loss = capt_loss(s, s_hat, queue, temperature=tau, precision=precision, impl=impl)
    loss.backward()
    assert s.grad is not None
    assert s_hat.grad is not None
    assert torch.equal(queue.rows, queued.to(dtype))
    exact, gradient = _exact(tau, dtype)
    return [loss.detach(), torch.cat([s.grad, s_hat.grad]), torch.tensor(exact), gradient]


def _bounds(tau: float, delta: float) -> tuple[float, Tensor]:
    """docs/contrast.md: what products with the error ``delta`` may do to the loss, and to each row of the gradient."""
    s, s_hat, queue = (rows.double() for rows in _rows())
    rows, partners = torch.cat([s, s_hat]), torch.cat([s_hat, s])
    logits = rows @ torch.cat([rows, queue]).T / tau
    instances = torch.arange(N).repeat(2)
    logits[:, : 2 * N].masked_fill_(instances[:, None] == instances[None, :], -torch.inf)
    positive = (rows * partners).sum(1) / tau
    margins = logits.logsumexp(1) - positive
    sigma = margins.sigmoid()
    p = (logits - (positive + torch.logaddexp(margins, torch.zeros_like(margins)))[:, None]).exp()[:, : 2 * N].sum(0)
    epsilon = delta / tau
    shift, twice = math.expm1(epsilon), math.expm1(2 * epsilon)
    anchor = sigma * (2 * shift + (1 + shift) * (twice + delta))
    live = p * (twice + delta * (1 + twice))
    return 2 * epsilon, (anchor + sigma.roll(N) * shift + live) / (tau * N)


@pytest.mark.parametrize("precision", HERE)
@pytest.mark.parametrize("tau", [0.5, 0.05, 0.02])
def test_loss_and_gradient_stay_within_the_bounds(precision: Precision, tau: float) -> None:
    plain, plain_gradient, *_ = _solve(tau, "fp32")
    loss, gradient, exact, exact_gradient = _solve(tau, precision)
    for_loss, for_rows = _bounds(tau, RELATIVE_ERROR[precision])
    assert abs(loss - exact) <= for_loss + 2 * abs(plain - exact)
    in_fp32 = 2 * (plain_gradient - exact_gradient).norm(dim=1)
    assert bool(((gradient - exact_gradient).norm(dim=1) <= for_rows + in_fp32).all())


@pytest.mark.parametrize("tau", [0.05, 0.02])
def test_no_precision_passes_for_the_next_better_one(tau: float) -> None:
    errors = {}
    for precision in ("fp32", *HERE):
        _, gradient, _, exact = _solve(tau, precision)
        errors[precision] = (gradient - exact).norm(dim=1)
    highest = {name: float(rows.max()) for name, rows in errors.items()}
    assert highest["bf16"] > 100 * highest["bf16x3"] > 500 * highest["bf16x6"]
    assert highest["bf16x6"] < 2 * highest["fp32"]
    _, for_rows = _bounds(tau, RELATIVE_ERROR["bf16x3"])
    assert bool((errors["bf16"] > for_rows + 2 * errors["fp32"]).any())


@pytest.mark.parametrize("precision", HERE)
def test_both_kernels_multiply_alike(precision: Precision) -> None:
    chunked, dense = (_solve(0.05, precision, impl) for impl in ("chunked", "dense"))
    assert relative(chunked[1], dense[1]) < 1e-5


@pytest.mark.parametrize("precision", ["bf16x6", "bf16x3"])
def test_rows_stored_in_bf16_are_one_exact_term(precision: Precision) -> None:
    rows = unit(5, 7, seed=0, dtype=torch.float32).bfloat16()
    (term,) = Products(precision).split(rows, torch.float32)
    assert term.data_ptr() == rows.data_ptr()
    loss, gradient, exact, exact_gradient = _solve(0.05, precision, dtype=torch.bfloat16)
    assert abs(loss - exact) < (2e-6 if precision == "bf16x6" else 2e-4)
    assert relative(gradient, exact_gradient) < (2e-6 if precision == "bf16x6" else 2e-4)


@pytest.mark.parametrize("precision", get_args(Precision))
def test_a_product_of_two_numbers_is_as_near_as_its_bound(precision: Precision) -> None:
    """Over mantissas of all kinds, those in the middle between two bf16 numbers among them; sums of one term."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0x3F000000, 0x40000000, (2, 500), generator=generator, dtype=torch.int32)
    bits[:, :100] &= ~0xFFFF
    bits[:, :100] |= 0x8000 + torch.randint(-3, 4, (2, 100), generator=generator, dtype=torch.int32)
    if precision == "tf32":  # what the tensor cores read of an operand
        read = (bits & ~0x1FFF).view(torch.float32)
        found = read[0].double()[:, None] * read[1].double()[None, :]
    else:
        left, right = (Products(precision).split(x, torch.float32) for x in bits.view(torch.float32))
        columns, rows = tuple(t[:, None] for t in left), tuple(t[None, :] for t in right)
        found = multiply(torch.full((500, 500), torch.nan), columns, rows, add=False).double()
    a, b = bits.view(torch.float32).double()
    error = ((found - a[:, None] * b[None, :]) / (a[:, None] * b[None, :])).abs().max().item()
    assert error <= RELATIVE_ERROR[precision] + 6 * 2**-24
    assert error >= RELATIVE_ERROR[precision] / 8 - 2**-24  # and the bound is not an idle one


@pytest.mark.parametrize(("precision", "kind"), [("tf32", "tf32"), ("fp32", "ieee"), ("bf16x3", "ieee")])
def test_tf32_is_for_these_products_alone(precision: Precision, kind: str) -> None:
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    for outside in ("ieee", "tf32"):
        setting.fp32_precision = outside
        try:
            with Products(precision).applied_on(torch.device("cuda")):
                assert setting.fp32_precision == kind
            assert setting.fp32_precision == outside
            with pytest.raises(RuntimeError), Products(precision).applied_on(torch.device("cuda")):
                raise RuntimeError
            assert setting.fp32_precision == outside
        finally:
            setting.fp32_precision = before


def test_a_precision_that_is_not_here_is_refused() -> None:
    s = unit(3, 8, seed=0)
    with pytest.raises(ConfigError, match="needs a CUDA GPU"):
        capt_loss(s.float(), s.float(), temperature=0.1, precision="tf32")
    with pytest.raises(ConfigError, match="float64 rows are multiplied in float64"):
        capt_loss(s, s, temperature=0.1, precision="bf16x3")

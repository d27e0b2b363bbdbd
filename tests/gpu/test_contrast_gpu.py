"""The loss on a GPU in every precision against float64 on the CPU, and no waiting for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from capt.pretrain.contrast import ContrastStats, ShardedQueue, capt_loss
from capt.pretrain.contrast.kernels import Precision
from tests.unit.contrast.support import Problem, near, relative, unit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

N, D, K = 300, 256, 10_000


def _solve(
    dtype: torch.dtype, temperature: float, stats: bool = False, precision: Precision = "fp32"
) -> tuple[float, float, float]:
    """Relative errors of the loss and of both gradients against float64 on the same rows."""
    s = unit(N, D, seed=0).to("cuda", dtype).requires_grad_()
    s_hat = near(unit(N, D, seed=0), 0.05, seed=1).to("cuda", dtype).requires_grad_()
    queue = ShardedQueue(K, D, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32, device="cuda")
    queue.enqueue(unit(K + 500, D, seed=2).to("cuda", dtype))
    loss = capt_loss(
        s, s_hat, queue, temperature=temperature, precision=precision, stats=ContrastStats() if stats else None
    )
    loss.backward()
    assert s.grad is not None
    assert s_hat.grad is not None
    owner = torch.zeros(N, dtype=torch.int64)
    problem = Problem(s.detach().cpu(), s_hat.detach().cpu(), owner, queue.rows.cpu(), temperature)
    wanted, d_s, d_s_hat, _ = problem.solve()
    return abs(loss.item() - wanted) / wanted, relative(s.grad.cpu(), d_s), relative(s_hat.grad.cpu(), d_s_hat)


@pytest.mark.parametrize("stats", [False, True], ids=["fixed", "running"])
@pytest.mark.parametrize("temperature", [0.5, 0.1, 0.05, 0.02])
@pytest.mark.parametrize("precision", ["fp32", "bf16x6"])
def test_float32(temperature: float, stats: bool, precision: Precision) -> None:
    assert max(_solve(torch.float32, temperature, stats, precision)) < 1e-5


@pytest.mark.parametrize("stats", [False, True], ids=["fixed", "running"])
@pytest.mark.parametrize("temperature", [0.5, 0.1, 0.05])
@pytest.mark.parametrize(("precision", "bound"), [("bf16", 2e-2), ("tf32", 5e-3), ("bf16x3", 1e-4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_cores_with_float32_sums(
    temperature: float, stats: bool, precision: Precision, bound: float, dtype: torch.dtype
) -> None:
    """Gradients of bf16 rows are bf16 as well: half a unit of their last place, 2^-9, is left of any precision."""
    loss, *gradients = _solve(dtype, temperature, stats, precision)
    assert loss < bound
    assert max(gradients) < bound + (2**-8 if dtype == torch.bfloat16 else 0)


def test_tf32_is_a_tensor_cores_and_ends_with_the_loss() -> None:
    """The setting reaches the products (their digits change), and fp32 stays IEEE's where the process allows TF32."""
    before = torch.backends.cuda.matmul.fp32_precision
    errors = {name: _solve(torch.float32, 0.05, precision=name)[1] for name in ("fp32", "tf32")}
    assert errors["tf32"] > 10 * errors["fp32"]
    assert torch.backends.cuda.matmul.fp32_precision == before
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert _solve(torch.float32, 0.05)[1] < 1e-5
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")  # once a process
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16x6", "bf16x3", "bf16"])
def test_one_rank_never_waits_for_the_device(precision: Precision) -> None:
    """Loss, backward and enqueue only launch work (several ranks wait once, for each other's row counts)."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        s, s_hat = (unit(N, D, seed=i).to("cuda", torch.float32).requires_grad_() for i in (0, 1))
        queue = ShardedQueue(K, D, device="cuda")
        queue.enqueue(s, s_hat)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            capt_loss(s, s_hat, queue, temperature=0.05, precision=precision).backward()
            queue.enqueue(s, s_hat)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    finally:
        dist.destroy_process_group()


def test_saving_a_queue_copies_none_of_it_on_the_gpu(tmp_path: Path) -> None:
    queue = ShardedQueue(1 << 16, 256, device="cuda")
    queue.enqueue(unit((1 << 16) + 500, 256, seed=2).float().to("cuda"))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    queue.save_shard(tmp_path)
    assert torch.cuda.max_memory_allocated() - before < queue.nbytes // 10

"""The loss on a GPU: float32 and bfloat16 operands against float64 on the CPU, and no waiting for the device."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from pretrain.contrast import ContrastStats, ShardedQueue, capt_loss
from tests.support import free_port
from tests.unit.contrast.support import Problem, near, relative, unit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

N, D, K = 300, 256, 10_000


def _solve(dtype: torch.dtype, temperature: float, stats: bool = False) -> tuple[float, float, float]:
    """Relative errors of the loss and of both gradients against float64 on the same rows."""
    s = unit(N, D, seed=0).to("cuda", dtype).requires_grad_()
    s_hat = near(unit(N, D, seed=0), 0.05, seed=1).to("cuda", dtype).requires_grad_()
    queue = ShardedQueue(K, D, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32, device="cuda")
    queue.enqueue(unit(K + 500, D, seed=2).to("cuda", dtype))
    loss = capt_loss(s, s_hat, queue, temperature=temperature, stats=ContrastStats() if stats else None)
    loss.backward()
    assert s.grad is not None
    assert s_hat.grad is not None
    owner = torch.zeros(N, dtype=torch.int64)
    problem = Problem(s.detach().cpu(), s_hat.detach().cpu(), owner, queue.rows.cpu(), temperature)
    wanted, d_s, d_s_hat, _ = problem.solve()
    return abs(loss.item() - wanted) / wanted, relative(s.grad.cpu(), d_s), relative(s_hat.grad.cpu(), d_s_hat)


@pytest.mark.parametrize("stats", [False, True], ids=["fixed", "running"])
@pytest.mark.parametrize("temperature", [0.5, 0.1, 0.05, 0.02])
def test_float32(temperature: float, stats: bool) -> None:
    assert max(_solve(torch.float32, temperature, stats)) < 1e-5


@pytest.mark.parametrize("stats", [False, True], ids=["fixed", "running"])
@pytest.mark.parametrize("temperature", [0.5, 0.1, 0.05])
def test_bfloat16_operands_with_float32_sums(temperature: float, stats: bool) -> None:
    assert max(_solve(torch.bfloat16, temperature, stats)) < 2e-2


def test_one_rank_never_waits_for_the_device() -> None:
    """Loss, backward and enqueue only launch work (several ranks wait once, for each other's row counts)."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl", rank=0, world_size=1)
    try:
        s, s_hat = (unit(N, D, seed=i).to("cuda", torch.float32).requires_grad_() for i in (0, 1))
        queue = ShardedQueue(K, D, device="cuda")
        queue.enqueue(s, s_hat)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            capt_loss(s, s_hat, queue, temperature=0.05).backward()
            queue.enqueue(s, s_hat)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    finally:
        dist.destroy_process_group()

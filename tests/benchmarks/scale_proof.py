"""Proof of the simulation of `scale_step`: gloo ranks with real numbers do the same, and are measured alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.distributed import GATHER, REDUCE_SCATTER
from capt.pretrain.base.traits import using
from capt.pretrain.plan.simulated import AsOnGPU, OpTracer
from tests.benchmarks.scale_forms import contrast_received
from tests.benchmarks.scale_step import Simulated, contrast_step, job_at, simulate_contrast
from tests.support import run_ranks

_PATIENCE = 10.0
"""Seconds until a backend that still holds a tensor counts as a leak."""


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The side of a GPU with real numbers; what gloo does in a collective is neither counted nor still under way."""
    with ExitStack() as stack:
        stack.enter_context(using(AsOnGPU()))
        for name in (GATHER, "all_reduce"):
            stack.enter_context(mock.patch.object(dist, name, _settled(getattr(dist, name))))
        stack.enter_context(mock.patch.object(dist, REDUCE_SCATTER, _settled(_unseen(getattr(dist, REDUCE_SCATTER)))))
        yield


def _unseen(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Count nothing of what a backend does in a collective: gloo has no reduce-scatter, and makes a copy."""

    def plain(_: OpTracer, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    def call(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(OpTracer, "__torch_dispatch__", plain):
            return collective(*args, **kwargs)

    return call


def _settled(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return when the backend has let go of the tensors: a thread of gloo's holds them for a moment after its work."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        before = [_uses(each) for each in tensors]
        result = collective(*args, **kwargs)
        deadline = time.monotonic() + _PATIENCE
        while any(_uses(each) > count for each, count in zip(tensors, before, strict=True)):
            assert time.monotonic() < deadline, "the backend keeps a tensor of a collective that is done"
            time.sleep(1e-4)
        return result

    return call


def _uses(tensor: Any) -> int:
    return int(tensor._use_count())


def measures(found: Simulated) -> dict[str, Any]:
    """Figures that must be equal, to the byte: every collective, bytes that lived, operations, operators."""
    return {
        "received": [(each.name, each.received) for each in found.sent],
        "before": found.before,
        "peak": found.peak,
        "queue": found.queue,
        "flops": found.flops,
        "moved": found.moved,
        "operators": found.operators,
    }


def real_contrast(samples: int, overrides: Sequence[str]) -> dict[str, Any]:
    """`contrast_step` on this real rank, in blocks of the size that a GPU has."""
    with as_on_a_gpu():
        return measures(contrast_step(job_at(distributed.world_size(), samples, overrides)))


def proof(samples: int, overrides: Sequence[str], worlds: Sequence[int] = (2, 4)) -> list[dict[str, Any]]:
    """A row for each number of gloo ranks: their figures, and whether simulation and closed form give the same."""
    rows = []
    for world in worlds:
        job = job_at(world, samples, overrides)
        real = run_ranks(real_contrast, world, samples, overrides)
        simulated = [measures(simulate_contrast(job, world, rank)) for rank in range(world)]
        form = contrast_received(job, world, job.model.hidden)
        rows.append({
            "W": world,
            "K": job.contrast.queue,
            "collectives": len(real[0]["received"]),
            "bytes received": sum(size for _, size in real[0]["received"]),
            "peak, bytes": real[0]["peak"],
            "operations": real[0]["flops"],
            "simulated the same": real == simulated,
            "closed form the same": real[0]["received"] == form,
            "ok": real == simulated and real[0]["received"] == form,
        })  # fmt: skip
    return rows

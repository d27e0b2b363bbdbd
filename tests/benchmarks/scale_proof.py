"""What proves the simulation of `scale_step`: gloo ranks with real numbers do the same, and are measured alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capt.pretrain.base import distributed
from capt.pretrain.plan.simulated import as_on_a_gpu
from tests.benchmarks.scale_forms import contrast_received
from tests.benchmarks.scale_step import Simulated, contrast_step, job_at, simulate_contrast
from tests.support import run_ranks


def measures(found: Simulated) -> dict[str, Any]:
    """What must be the same, to the byte: every collective, bytes that lived, operations, operators."""
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

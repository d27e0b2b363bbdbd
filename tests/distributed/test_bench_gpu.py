"""The products of the GPU's benchmark are what it says, tried here on a CPU with small shapes."""

from __future__ import annotations

from typing import Any

from tests.language import random_steps
from tests.support import run_ranks

TINY = [
    "model.size=custom", "model.layers=2", "model.hidden=32", "model.heads=2", "model.ffn=32", "model.max_positions=32",
    "data.sequence_length=32", "batch.global=4", "batch.micro=2", "engine.precision=fp32", "contrast.queue=64",
]  # fmt: skip


def _rows() -> list[dict[str, Any]]:
    from tests.benchmarks import bench_gpu

    return list(bench_gpu.products(48, (4,), (96,), 1))


def test_every_row_is_measured() -> None:
    (rows,) = run_ranks(_rows, 1)
    named = {row["name"]: row for row in rows}
    assert len(named) == len(rows) == 4
    assert all(row["ms"] > 0 for row in rows)
    errors = [named[f"products, 4 anchors, 96 rows, {name}"]["error of sums"] for name in ("bf16x6", "bf16x3", "bf16")]
    assert errors[0] < 1e-6 < errors[1] < 1e-4 < errors[2] < 1e-2


def test_the_utilisation_of_a_gpu_is_measured_without_text() -> None:
    """Every logged step says how fast it was; tests/gpu measures it at full size."""
    (rows,) = run_ranks(random_steps, 1, "capt_large", [*TINY, "run.log_every=2"], 6)
    assert len(rows) == 3
    assert all(row["tokens_per_second"] > 0 and row["loss"] > 0 for row in rows)
    assert rows[-1]["loss"] != rows[0]["loss"]

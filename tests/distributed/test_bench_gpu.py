"""The products of the GPU's benchmark are what it says, tried here on a CPU with small shapes."""

from __future__ import annotations

from typing import Any

from tests.support import run_ranks


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

"""Ledgers of runs that were never trained: what ranks would write over a history of launches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capt.pretrain.reliability.ledger.files import (
    ROW,
    Header,
    LedgerWriter,
    Order,
    digest_contents,
    digest_ids,
    launch_folder,
    new_launch,
)

ORDER = Order(samples=53, seed=3, data="text", noise="", shuffle=True)
MIXED = Order(
    samples=53, seed=3, data="text", noise="", shuffle=True, sizes=(31, 7, 15), names=("a", "b", "c"),
    course=((0.0, 3.0, 1.0, 0.0), (200.0, 1.0, 1.0, 2.0)), limits=(0, 21, 0),
)  # fmt: skip
"""Order of three sources, one of which grows, and one of which is left after three epochs."""
BATCH = 12

Feed = Callable[[int, int, np.ndarray], np.ndarray]
"""Input of a rank, of (step, rank, the sample numbers whose turn it is): sample numbers."""


def as_planned(step: int, rank: int, samples: np.ndarray) -> np.ndarray:
    return samples


def launch(
    run: Path,
    world: int,
    begin: int,
    ends: Sequence[int],
    *,
    feed: Feed = as_planned,
    order: Order = ORDER,
    **header: Any,
) -> None:
    """A launch that begins after step ``begin``; rank r has recorded its steps up to ``ends[r]``."""
    folder = launch_folder(run, new_launch(run))
    sampler = order.sampler()
    for rank in range(world):
        head = Header(
            **{"rank": rank, "world": world, "step": begin, "samples": begin * BATCH, "batch": BATCH, "order": order}
            | header
        )
        writer = LedgerWriter(folder, head)
        for step in range(begin + 1, ends[rank] + 1):
            start = head.samples + (step - begin - 1) * BATCH
            samples = feed(step, rank, np.array([g for g in range(start, start + BATCH) if g % world == rank]))
            epochs, ids = sampler.locate(samples)
            writer.append(step, len(ids), digest_ids(ids), digest_contents(ids, [epochs]))
        writer.close()


def checkpoint(run: Path, step: int, samples: int | None = None) -> None:
    """A checkpoint of which only the manifest is there."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    file = {"size": 0, "sha256": "0" * 64}
    manifest = {
        "format_version": 1, "task": "toy", "world_size": 1, "zero_stage": 0, "modules": {},
        "progress": {"step": step, "samples": step * BATCH if samples is None else samples},
        "files": {"config.yaml": file, "state.json": file},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))


def file_of(run: Path, number: int, rank: int) -> Path:
    return launch_folder(run, number) / f"rank-{rank:05d}.ledger"


def edit(path: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change the rows of a file."""
    line, _, content = path.read_bytes().partition(b"\n")
    path.write_bytes(line + b"\n" + change(np.frombuffer(content, dtype=ROW).copy()).tobytes())

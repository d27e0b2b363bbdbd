"""Random access to a region store of 2 GB on one core, and the memory of 4 loader workers over it above that of one.

The store has pictures of 36 regions with 2,048 fp16 features, and lies in the page cache: it is read once before. A
read is `RegionStore.regions` of 32 pictures in random order. Memory is what a process and its loader workers have of
their own plus their parts of what they share (PSS), the highest of ten looks a second while every picture is read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, set_start_method
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capt.pretrain.config.schema import LoaderSection
from capt.pretrain.engine.loading import training_batches
from capt.pretrain.regions.picture import Labels, Picture
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.regions.writer import write_store

REGIONS, SIZE, BATCH = 36, 2048, 32
IMAGES_A_SECOND, MEGABYTES = 2000, 200
_TURNS, _TURN_SECONDS = 5, 2.0


@dataclass(frozen=True)
class _Batch:
    """Output of a loader worker."""

    features: Tensor
    boxes: Tensor


class _Assemble:
    """Reads 32 pictures of the store."""

    def __init__(self, store: RegionStore) -> None:
        self._store = store
        self._order = np.random.default_rng(1).permutation(len(store))

    def __call__(self, start: int) -> list[_Batch]:
        read = self._store.regions(np.sort(self._order[start : start + BATCH]))
        return [_Batch(torch.from_numpy(read.features), torch.from_numpy(read.boxes))]


def _pictures(count: int) -> Iterator[Picture]:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(REGIONS, SIZE)).astype(np.float32)
    boxes = np.tile(np.array([10, 20, 300, 400], dtype=np.float32), (REGIONS, 1))
    labels = Labels(rng.integers(0, 1600, REGIONS), rng.random(REGIONS, dtype=np.float32))
    for number in range(count):
        yield Picture(f"COCO_train2014_{number:012}", 640, 480, np.roll(features, number, 1), boxes, labels, labels)


def reads_a_second(folder: Path, seconds: float = _TURN_SECONDS) -> dict[str, float]:
    """Pictures a second, by row and by name: medians over the turns."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    store = RegionStore.open(folder)
    for start in range(0, len(store), BATCH):
        store.regions(np.arange(start, min(start + BATCH, len(store))))
    names = store.names()
    rng = np.random.default_rng(2)
    speeds: dict[str, list[float]] = {"rows": [], "names": []}
    for turn in range(2 * _TURNS):
        what = ("rows", "names")[turn % 2]
        done, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            rows = rng.integers(0, len(store), BATCH)
            store.regions(rows if what == "rows" else store.rows([names[row] for row in rows]))
            done += BATCH
        speeds[what].append(done / elapsed)
    return {what: statistics.median(each) for what, each in speeds.items()}


def peak_of_loading(folder: Path, workers: int) -> dict[str, float]:
    """Megabytes at most of this process and its loader workers while these read the whole store."""
    set_start_method("fork", force=True)  # the default, which a rank has; this process was spawned, and would keep that
    store = RegionStore.open(folder)
    peaks = {"Pss": 0.0, "Rss": 0.0}
    done = Event()

    def watch() -> None:
        while not done.wait(0.1):
            for what, found in _memory().items():
                peaks[what] = max(peaks[what], found)

    watcher = Thread(target=watch)
    watcher.start()
    loader = LoaderSection(workers=workers)
    pictures = sum(
        len(batch.features)
        for step in training_batches(_Assemble(store), range(0, len(store), BATCH), loader)
        for batch in step
    )
    done.set()
    watcher.join()
    assert pictures == len(store), "every picture is read once"
    return peaks


def _memory() -> dict[str, float]:
    """Megabytes of this process and its children.

    These are stopped meanwhile: a page that a second process maps between two looks would count more than once.
    """
    totals = {"Pss": 0.0, "Rss": 0.0}
    children = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    _signal(children, signal.SIGSTOP)
    try:
        for pid in ["self", *children]:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name in totals:
                        totals[name] += int(value.split()[0]) / 1024
    finally:
        _signal(children, signal.SIGCONT)
    return totals


def _signal(processes: list[int], number: signal.Signals) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _in_process(function: Any, *arguments: Any) -> Any:
    """Call a function in a fresh process, which has nothing of ours in memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure(folder: Path, pictures: int, seconds: float = _TURN_SECONDS) -> list[dict[str, Any]]:
    """Write a store of ``pictures`` pictures to ``folder`` and measure both numbers."""
    store = folder / "store"
    manifest = write_store(store, _pictures(pictures), feature_dtype="fp16", features_of={"backend": "benchmark"})
    size = sum(file.bytes for file in manifest.files.values()) / 1e9
    speeds = _in_process(reads_a_second, store, seconds)
    one, four = (_in_process(peak_of_loading, store, workers) for workers in (1, 4))
    more = four["Pss"] - one["Pss"]
    return [
        {
            "what": f"random reads from {size:.2f} GB, pictures a second",
            "measured": round(speeds["rows"]),
            "bound": IMAGES_A_SECOND,
            "ok": speeds["rows"] >= IMAGES_A_SECOND,
        },
        {"what": "the same by name", "measured": round(speeds["names"])},
        {"what": "1 worker, PSS in MB", "measured": round(one["Pss"])},
        {"what": "4 workers, PSS in MB", "measured": round(four["Pss"])},
        {
            "what": "4 workers above 1, PSS in MB",
            "measured": round(more),
            "bound": MEGABYTES,
            "ok": more <= MEGABYTES,
        },
        {"what": "4 workers above 1, RSS in MB (4 times what they share)", "measured": round(four["Rss"] - one["Rss"])},
    ]


def main() -> int:
    """Measure, print, and say whether both bounds are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=13_600, help="of 147 KB each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name), options.pictures)
    sys.stdout.write(json.dumps({"rows": rows}) + "\n")
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

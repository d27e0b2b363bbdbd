"""Compares what every rank was fed in a launch with the order of the samples.

Whether a rank was fed the ids whose turn it was is seen from the digests of those that it was really fed (`hash_ids`);
other ids have the same digest with a chance of 2^-64.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from capt.pretrain.base.errors import quoted
from capt.pretrain.engine.step_folders import checkpoints_of, step_of
from capt.pretrain.reliability.ledger.files import Header, LedgerFile, find_exchange, hash_ids, read_launch
from capt.pretrain.reliability.ledger.history import Fault, Launch, remedy_for_files

_AT_ONCE = 1 << 16
"""Samples whose place in the order is computed in one pass."""


def check_launch(run: Path, launch: Launch, since: int) -> tuple[list[Fault], list[str]]:
    """Find the faults in the rows of each rank from step ``since`` on. Of steps done again there are only notes.

    ``recorded_to``, ``contents`` and ``right_to`` of the launch are set.
    """
    head, faults = launch.head, []
    recorded = []
    total: np.ndarray | None = None
    for file in read_launch(launch.folder):
        own = file.rows["contents"].astype(np.uint32)
        # Contents add up over the ranks, as far as all have recorded them.
        total = own if total is None else total[: len(own)] + own[: len(total)]
        launch.unlearnt = file.rows["step"][file.unlearnt].tolist()  # alike on all ranks
        rows, begin = file.rows, max(head.step, since - 1)
        if begin > head.step:
            rows = rows[np.searchsorted(rows["step"], begin, side="right") :]
        recorded.append(begin + len(rows))
        found = _check_rank(run, launch, file, rows, begin)
        if found is None and recorded[-1] < launch.needed_to:
            rank, step, last = rank_of(file), recorded[-1] + 1, launch.needed_to
            text = f"step {step} is not recorded ({last - step + 1} up to step {last}, which a checkpoint contains)"
            text += f": launch {launch.number}, rank {rank} ({file.path})"
            found = Fault("hole", text, remedy_for_files(run), step, None, rank, file.path)
        if found is not None:
            faults.append(found)
    launch.contents = launch.contents if total is None else total
    launch.recorded_to = max(head.step, min(recorded))
    launch.right_to = min((fault.step - 1 for fault in faults if fault.step), default=launch.right_to)
    kept = [fault for fault in faults if fault.step is not None and fault.step <= launch.kept_to]
    return kept, [f"{fault.text}; it was done again" for fault in faults if fault not in kept]


def rank_of(file: LedgerFile) -> int:
    """The rank that wrote a file."""
    return file.header.rank


def _check_rank(run: Path, launch: Launch, file: LedgerFile, rows: np.ndarray, begin: int) -> Fault | None:
    """The first thing that is wrong with the rows of a rank, which follow step ``begin``."""
    expected = begin + 1 + np.arange(len(rows))
    odd = np.flatnonzero(rows["step"] != expected)
    good = rows[: odd[0]] if len(odd) else rows
    rank, head = rank_of(file), launch.head
    turns = _Turns(head, rank, begin, len(good))
    off = np.flatnonzero(np.abs(good["rows"].astype(np.int64) - turns.counts) > 1)  # of which no id can be told
    where = f"launch {launch.number}, rank {rank} ({file.path})"
    # Digests are compared up to the first step of which no id can be told.
    for first, planned, ends in turns.pieces(int(off[0]) if len(off) else len(good)):
        some, starts = good[first : first + len(ends)], np.concatenate([[0], ends[:-1]])
        digests = np.add.reduceat(hash_ids(planned), starts)
        wrong = np.flatnonzero((some["ids"] != digests) | (some["rows"] != ends - starts))
        if len(wrong):
            row, turn = some[wrong[0]], planned[starts[wrong[0]] : ends[wrong[0]]]
            step = int(row["step"])
            text, used = _describe(turn, int(row["rows"]), int(row["ids"]), head.order.samples)
            return Fault("ids", f"step {step}, {where}: {text}", go_back(run, step), step, used, rank, file.path)
    if len(off):
        row = good[off[0]]
        text = f"step {row['step']}, {where}: {_several(int(row['rows']), int(turns.counts[off[0]]))}"
        return Fault("ids", text, go_back(run, int(row["step"])), int(row["step"]), None, rank, file.path)
    if not len(odd):
        return None
    step, found = int(expected[odd[0]]), int(rows["step"][odd[0]])
    if found > step:
        text = f"step {step} is not recorded, the next row belongs to step {found}: {where}"
        return Fault("hole", text, remedy_for_files(run), step, None, rank, file.path)
    text = f"step {found} is recorded after step {step - 1}: {where}"
    return Fault("steps", text, remedy_for_files(run), step, None, rank, file.path)


class _Turns:
    """The ids whose turn it was on a rank in each of ``steps`` steps after ``begin``.

    Attributes:
        counts: how many there were in each step.
    """

    def __init__(self, head: Header, rank: int, begin: int, steps: int) -> None:
        self._sampler, self._world = head.order.sampler(), head.world
        starts, sizes = np.empty(steps, dtype=np.int64), np.empty(steps, dtype=np.int64)
        before, stages = head.batch_sizes.samples_before, head.batch_sizes.stages
        shift = head.samples - before(head.step)
        for number, stage in enumerate(stages):
            end = stages[number + 1].step if number + 1 < len(stages) else begin + steps
            first, last = max(stage.step, begin), min(end, begin + steps)
            if first < last:
                here = slice(first - begin, last - begin)
                starts[here] = shift + before(first) + np.arange(last - first, dtype=np.int64) * stage.batch
                sizes[here] = stage.batch
        # Rank r has the samples g with g % world = r: the first of each step, then how many.
        self._first = starts + (rank - starts) % head.world
        self.counts = -((self._first - starts - sizes) // head.world)

    def pieces(self, steps: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """The first ``steps`` steps in pieces: the number of the first, the ids, and where those of each step end."""
        at_once = max(1, _AT_ONCE // int(self.counts.max(initial=1)))
        for first in range(0, steps, at_once):
            counts = self.counts[first : min(first + at_once, steps)]
            ends = counts.cumsum()
            within = np.arange(ends[-1], dtype=np.int64) - np.repeat(ends - counts, counts)
            samples = np.repeat(self._first[first : first + len(counts)], counts) + within * self._world
            yield first, self._sampler.locate(samples)[1], ends


def _describe(planned: np.ndarray, rows: int, digest: int, samples: int) -> tuple[str, int | None]:
    exchange = find_exchange(planned, rows, digest, samples)
    if exchange is None:
        return _several(rows, len(planned)), None
    used, lost = exchange
    if lost is None:
        return f"id {used} comes once too often", used
    if used is None:
        return f"id {lost} was not used", lost
    return f"id {used} was used in the place of id {lost}: in its epoch one comes twice, the other never", used


def _several(rows: int, planned: int) -> str:
    amount = "" if rows == planned else f" ({rows} and not {planned})"
    return f"used other samples than those whose turn it was{amount}; more than one differs"


def go_back(run: Path, step: int) -> str:
    """Say how to train the steps from ``step`` on again."""
    before = [path.name for path in checkpoints_of(run) if step_of(path) < step]
    way = f"capt resume {quoted(run)} --checkpoint {quoted(before[-1])}" if before else "a new run"
    return f"the model has learnt from it: {way} does these steps again; tell the maintainers how it came about"

"""The launches of a run as one history: which steps of which launch are in the model, and which were done again.

A launch that begins after step C takes back what earlier launches did beyond C: their work was lost with the processes,
or given up for another future (``--checkpoint``). So of launch k the steps ``C_k + 1 .. K_k`` are *kept*, where
``K_k = min(C_j : j > k)``. The kept steps of all launches follow one another without a gap. A step is *committed* once
a checkpoint contains it: all kept steps are that a later launch began with, and of the last launch those up to the
newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from capt.pretrain.base.errors import UserError, quoted
from capt.pretrain.engine.checkpoint import read_job_of_run, read_manifest
from capt.pretrain.engine.step_folders import checkpoints_of, is_step, step_of
from capt.pretrain.reliability.ledger.files import Header, LedgerHead, launch_folder, launches_of, read_heads

Kind = Literal["hole", "damaged", "steps", "position", "ids", "order", "contents"]
"""Kind of fault: steps that the run continued from are not recorded; a file is not a ledger, or contradicts others;
step numbers do not grow by one; a launch begins at another sample than the one after the last; a step used other
samples than were its turn; the order was changed within an epoch; a step was done again with other contents."""


@dataclass(frozen=True)
class Fault:
    """A violation that the check has found: where, what, and the remedy."""

    kind: Kind
    text: str
    remedy: str
    step: int | None = None
    id: int | None = None
    rank: int | None = None
    file: Path | None = None


@dataclass
class Launch:
    """A launch that trained: its number, its files by rank, and which of its steps are in the model."""

    number: int
    folder: Path
    head: Header
    kept_to: int
    """The last step of it that is in the model, as far as is recorded for a launch that is the last."""
    needed_to: int
    """The last step that must be recorded: a checkpoint or a later launch contains it."""
    recorded_to: int = 0
    """The last step that all ranks have recorded."""
    contents: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    """The digest of the contents of each step that all ranks have recorded."""
    right_to: int = 1 << 62
    """The last step before anything wrong was found in this launch."""
    unlearnt: Sequence[int] = ()
    """Steps whose update was left out (``guard.spike=skip``)."""

    @property
    def kept(self) -> int:
        """Number of its steps that are in the model."""
        return max(0, min(self.kept_to, self.recorded_to) - self.head.step)

    @property
    def left_out(self) -> int:
        """Samples that ``guard.spike`` has left out: before its kept steps, and in them."""
        if not self.kept:
            return 0
        return self.head.left_out + self.samples_of(
            step for step in self.unlearnt if step <= self.head.step + self.kept
        )

    def samples_of(self, steps: Iterable[int]) -> int:
        """Count the samples of these steps (counted from 1) together."""
        return sum(self.head.batch_sizes.size(step - 1) for step in steps)

    def samples_at(self, step: int) -> int:
        """Count the samples that the run has used after ``step``, which is a step of this launch."""
        before = self.head.batch_sizes.samples_before
        return self.head.samples + before(step) - before(self.head.step)


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint on disk: its step and samples."""

    step: int = 0
    samples: int = 0


def newest_checkpoint(run: Path) -> Newest:
    """The newest complete checkpoint of a run; step 0 without one. Raises ``CheckpointError``."""
    found = checkpoints_of(run)
    if not found:
        return Newest()
    progress = read_manifest(found[-1]).progress
    return Newest(progress.step, progress.samples)


def first_step(run: Path) -> int:
    """The step at which a run has begun: 0, or that of the checkpoint of another run (``run.branch_from``)."""
    branch = None
    with suppress(UserError, FileNotFoundError):  # the ledger alone has been copied
        branch = read_job_of_run(run).run.branch_from
    return 0 if branch is None or not is_step(branch.name) else step_of(branch)


def read_history(run: Path, newest: Newest, since: int = 1) -> tuple[list[Launch], list[Fault]]:
    """The launches that trained, in their order, and what is wrong with the files of steps from ``since`` on."""
    launches: list[Launch] = []
    faults: dict[int, Fault] = {}
    known = launches_of(run)
    # Launches are numbered without a gap, so that a folder which is gone shows.
    for before, number in pairwise((0, *(number for number, _ in known))):
        if number > before + 1:
            which = f"launch {before + 1}" if number == before + 2 else f"launches {before + 1} to {number - 1}"
            text = f"the ledger of {which} is not there, but that of launch {number} is"
            faults[before + 1] = Fault("hole", text, remedy_for_files(run), file=launch_folder(run, before + 1))
    for number, folder in known:
        try:
            head, problem = _head(read_heads(folder))
        except (UserError, OSError) as error:
            faults[number] = Fault("damaged", str(error), remedy_for_files(run), file=folder)
            continue
        if problem is not None:
            text, rank, file = problem
            faults[number] = Fault("damaged", text, remedy_for_files(run), rank=rank, file=file or folder)
        elif head is not None:
            launches.append(Launch(number, folder, head, kept_to=1 << 62, needed_to=0))
    for place, launch in enumerate(launches):
        later = [other.head.step for other in launches[place + 1 :]]
        if later:
            launch.kept_to = launch.needed_to = min(later)
        else:
            # No launch has continued from it: only what a checkpoint holds must be recorded.
            launch.needed_to = max(launch.head.step, newest.step)
    for number in list(faults):  # of a launch the steps up to the beginning of the next one may be in the model
        after = next((launch.head.step for launch in launches if launch.number > number), None)
        if after is not None and after < since:
            del faults[number]
    return launches, [faults[number] for number in sorted(faults)]


def remedy_for_files(run: Path) -> str:
    """Return the remedy where files are lost or damaged."""
    rest = f"capt ledger check {quoted(run)} --since STEP checks the rest"
    return f"put back the files of {run / 'ledger'}; where they are lost, or run.ledger was false, {rest}"


def _head(files: Sequence[LedgerHead]) -> tuple[Header | None, tuple[str, int | None, Path | None] | None]:
    """The header that all ranks share; None for a launch that ended before its first step. Or what is wrong."""
    if not any(file.has_rows for file in files):
        return None, None
    heads = [file.header for file in files]
    first = next(head for head in heads if head is not None)
    by_name = {file.path.name: file for file in files}
    for rank in range(first.world):
        file = by_name.get(f"rank-{rank:05d}.ledger")
        if file is None or file.header is None:
            return None, (f"rank {rank} of {first.world} has no ledger", rank, file.path if file else None)
        # Ranks may have resumed from folders of their own hosts.
        same = file.header.model_copy(update={"rank": first.rank, "checkpoint": first.checkpoint})
        if same != first:
            return None, (f"the header of rank {rank} is not that of rank {first.rank}", rank, file.path)
    if first.left_out > first.samples:
        return None, (f"{first.left_out} of the first {first.samples} samples are left out", None, None)
    least = min(stage.batch for stage in first.batch_sizes.stages)
    if len(files) != first.world or least < first.world:
        return None, (f"{len(files)} files of {first.world} ranks, {least} samples a step", None, None)
    return first, None

"""``RUN/rollbacks.json``: which samples a run leaves out, because its loss had a spike there. Imports no torch.

A run that goes back from a spike at step s to a checkpoint takes the samples after those of step s next. The spike is
noted before the job ends, without the place to which it goes back; that is filled in by the first resume. Every later
resume from the same place leaves the same samples out; one from another place does not.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pydantic import Field, model_validator

from capt.pretrain.base.files import write_json
from capt.pretrain.base.records import Count, Record, read_record

FILE = "rollbacks.json"


class Rollback(Record):
    """Samples from ``start`` to before ``end`` are left out; ``start`` is None until the run has gone back."""

    step: Count
    reason: str = Field(max_length=1000)
    start: Count | None = None
    end: Count

    @model_validator(mode="after")
    def _goes_on(self) -> Rollback:
        if self.start is not None and self.start > self.end:
            raise ValueError(f"start {self.start} is after end {self.end}")
        return self


class Rollbacks(Record):
    """All of a run, the oldest first."""

    rollbacks: list[Rollback] = Field(default_factory=list, max_length=1_000_000)


def read_rollbacks(run: Path) -> list[Rollback]:
    """Read the rollbacks of the run in ``run``. Raises ``ConfigError``: the file is damaged."""
    with suppress(FileNotFoundError):
        return read_record(Rollbacks, run / FILE, "; without the file no samples are left out").rollbacks
    return []


def note_rollback(run: Path, rollback: Rollback) -> None:
    """Add one. Raises ``OSError`` and ``ConfigError``."""
    _write(run, [*read_rollbacks(run), rollback])


def resume_after(run: Path, samples: int, *, newest: bool) -> int:
    """Return how many samples a run that continues from ``samples`` leaves out.

    A rollback that is due is done now, if the run continues from its newest checkpoint (``newest``), and not from
    one that was named.
    """
    found = read_rollbacks(run)
    if any(each.start is None for each in found):
        # Where the run has not gone back from it, it leaves out nothing: it starts at its end.
        begin = {each.end: samples if newest and samples < each.end else each.end for each in found}
        found = [
            each if each.start is not None else each.model_copy(update={"start": begin[each.end]}) for each in found
        ]
        _write(run, found)
    return max((each.end - samples for each in found if each.start == samples), default=0)


def _write(run: Path, rollbacks: list[Rollback]) -> None:
    write_json(run / FILE, Rollbacks(rollbacks=rollbacks).model_dump())

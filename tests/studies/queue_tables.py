"""The tables of docs/results/queue.md: guards and queues over their seeds, and differences from no queue."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.runs import rows_of
from tests.studies.seeds import STATISTICS, paired, spread
from tests.studies.support import table, usual

if TYPE_CHECKING:
    from tests.studies.queue import Key

COLLAPSED = 0.5
"""A run has collapsed whose encoder at the end finds fewer of 512 held-out windows by their corruptions."""


class Trial(NamedTuple):
    """A run, measured on held-out text at its end; ``ratio`` is K / in-batch, ``worst`` the least retrieval of any
    validation in the second half, ``capt_fixed`` the CAPT loss without a queue at one temperature. ``sts_*`` are
    Spearman's rho x 100 on STS-B dev without fine-tuning."""

    text: str
    arm: str
    temperature: str
    queue: int
    ratio: float
    seed: int
    milliseconds: float
    loss: float
    capt_fixed: float
    accuracy: float
    retrieval: float
    worst: float
    uniformity: float
    alignment: float
    drift_mean: float
    sts_cls: float
    sts_mean: float
    sts_head: float

    @property
    def cell(self) -> tuple[str, str, int, str]:
        """Settings that its seeds share."""
        return self.text, self.temperature, self.queue, self.arm


SHOWN = {
    "retrieval": 3, "worst": 3, "loss": 3, "capt_fixed": 3, "accuracy": 4, "uniformity": 2, "alignment": 3,
    "drift_mean": 3, "sts_cls": 1, "sts_mean": 1, "sts_head": 1, "milliseconds": 0,
}  # fmt: skip
COMPARED = (
    "retrieval", "loss", "capt_fixed", "accuracy", "uniformity", "alignment", "drift_mean",
    "sts_cls", "sts_mean", "sts_head",
)  # fmt: skip


def trial_of(run: Path, key: Key, in_batch: int) -> Trial:
    """Results of a finished and measured run; ``in_batch`` are the rows of a step."""
    validations = [row for row in rows_of(run) if row.get("split") == "validation"]
    last, name = validations[-1], "retrieval/to_corrupted"
    sections = {part["name"]: part for part in json.loads((run / "sts.json").read_text())["sections"]}
    poolers = sections["STS-B dev"]["poolers"]
    return Trial(
        key.text, key.arm, key.temperature, key.queue, key.queue / in_batch, key.seed,
        round(1000 * usual(run, "seconds_per_step"), 1), last["loss/mlm"], last["loss/capt_fixed"],
        last["accuracy/mlm"], last[name], min(row[name] for row in validations[len(validations) // 2 :]),
        last["uniformity"], last["alignment"], last["noise/mean/drift"],
        *(round(100 * poolers[pooler]["spearman"], 2) for pooler in ("cls", "mean", "head")),
    )  # fmt: skip


def write_tables(trials: Sequence[Trial], out: Path) -> None:
    """Write the tables as Markdown; one without rows is left out."""
    tables = (cells_table(trials), differences_table(trials), lengths_table(trials))
    out.write_text("\n\n".join(filter(None, tables)) + "\n", encoding="utf-8")


def cells_table(trials: Sequence[Trial]) -> str:
    """Mean ± deviation over the seeds of each cell, and how many of its runs have collapsed."""
    rows = []
    for cell in sorted({trial.cell for trial in trials}):
        own = [trial for trial in trials if trial.cell == cell]
        first, fallen = own[0], sum(trial.retrieval < COLLAPSED for trial in own)
        names = [first.text, first.temperature, f"{first.queue:,}", f"{first.ratio:g}", first.arm]
        values = [spread([getattr(trial, field) for trial in own], digits=digits) for field, digits in SHOWN.items()]
        rows.append([*names, f"{fallen} of {len(own)}", *values])
    shown = [head.replace("_", " ") for head in SHOWN]
    return table(["text", "temperature", "queue", "K / in-batch", "guard", "collapsed", *shown], rows)


def differences_table(trials: Sequence[Trial]) -> str:
    """Each cell less the run without queue of the same seed."""
    rows = []
    for cell in sorted({trial.cell for trial in trials if trial.queue}):
        text, temperature, queue, arm = cell
        for values in _compared(trials, cell, (text, temperature, 0, "none")):
            rows.append([text, temperature, f"{queue:,}", arm, *values])
    return table(["text", "temperature", "queue", "guard", "metric", "with - without", *STATISTICS], rows)


def lengths_table(trials: Sequence[Trial]) -> str:
    """Each queue less the shortest and less the next shorter one of the same guard and seed."""
    rows = []
    cells = sorted({trial.cell for trial in trials if trial.queue})
    for cell in cells:
        text, temperature, queue, arm = cell
        shorter = [other for other in cells if (other[0], other[1], other[3]) == (text, temperature, arm)]
        shorter = [other for other in shorter if other[2] < queue]
        for other in dict.fromkeys([*shorter[:1], *shorter[-1:]]):
            for values in _compared(trials, cell, other):
                rows.append([text, temperature, arm, f"{queue:,}", f"{other[2]:,}", *values])
    return table(["text", "temperature", "guard", "queue", "against", "metric", "longer - shorter", *STATISTICS], rows)


def _compared(
    trials: Sequence[Trial], first: tuple[str, str, int, str], second: tuple[str, str, int, str]
) -> Iterator[list[str]]:
    """The paired differences of two cells, a row for each metric, where they have seeds in common."""
    for field in COMPARED:
        scores = [
            {trial.seed: getattr(trial, field) for trial in trials if trial.cell == which} for which in (first, second)
        ]
        result = paired(*scores)
        if result is not None:
            yield [field.replace("_", " "), *result.cells(SHOWN[field])]

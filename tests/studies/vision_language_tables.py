"""The tables of docs/results/vision_language.md, of trials: arms over their seeds, and paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.studies.seeds import STATISTICS, paired, spread
from tests.studies.support import table

PAIRS = (
    ("capt", "lxmert", "equal steps"),
    ("capt", "lxmert-equal-compute", "equal compute"),
    ("capt", "none", ""),
    ("lxmert", "none", ""),
    ("lxmert-equal-compute", "none", ""),
)


class Trial(NamedTuple):
    """A fine-tuning run. Accuracies are shares: ``test`` on held-out data, ``validation`` where it was selected.

    ``error`` is the standard error of ``test`` over sentences (rows about one are a group; None for VQA), ``baseline``
    the accuracy of the best constant answer on the test data.
    """

    world: str
    task: str
    arm: str
    seed: int
    pretraining_steps: int
    pretraining_seconds: float
    validation: float
    test: float
    error: float | None
    consistency: float | None
    baseline: float
    rows: int


def write_tables(trials: Sequence[Trial], out: Path) -> None:
    """Write both tables as Markdown."""
    out.write_text("\n\n".join(filter(None, [arms_table(trials), differences_table(trials)])) + "\n", encoding="utf-8")


def arms_table(trials: Sequence[Trial]) -> str:
    """Each arm: pretraining steps and seconds, mean and standard deviation in per cent, every seed, consistency."""
    rows = []
    for task, arm in dict.fromkeys((trial.task, trial.arm) for trial in trials):
        own = [trial for trial in trials if (trial.task, trial.arm) == (task, arm)]
        seconds = sum(trial.pretraining_seconds for trial in own) / len(own)
        consistent = [trial.consistency for trial in own if trial.consistency is not None]
        errors = [trial.error for trial in own if trial.error is not None]
        rows.append(
            [_name(own[0]), arm, str(own[0].pretraining_steps), f"{seconds:.0f}",
             spread([trial.test for trial in own], 100), ", ".join(f"{100 * trial.test:.1f}" for trial in own),
             f"{100 * sum(errors) / len(errors):.1f}" if errors else "", f"{100 * own[0].baseline:.1f}",
             spread([trial.validation for trial in own], 100), spread(consistent, 100) if consistent else ""]
        )  # fmt: skip
    heads = ["task", "arm", "pretraining steps", "seconds", "test, mean ± sd", "each seed", "s.e.", "constant answer",
             "validation", "consistency"]  # fmt: skip
    return table(heads, rows)


def differences_table(trials: Sequence[Trial]) -> str:
    """Paired differences over the seeds in points."""
    rows = []
    for task in dict.fromkeys(trial.task for trial in trials):
        own = [trial for trial in trials if trial.task == task]
        scores = {arm: {t.seed: t.test for t in own if t.arm == arm} for arm in {t.arm for t in own}}
        for first, second, what in PAIRS:
            result = paired(scores.get(first, {}), scores.get(second, {}))
            if result is not None:
                note = f" ({what})" if what else ""
                rows.append([_name(own[0]), f"{first} - {second}{note}", *result.cells(scale=100)])
    return table(["task", "difference", "points", *STATISTICS], rows)


def _name(trial: Trial) -> str:
    return trial.task + (" (synthetic)" if trial.world == "microworld" else "")

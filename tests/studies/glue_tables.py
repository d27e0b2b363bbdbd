"""The tables of docs/results/glue.md: arms over their pretraining seeds, and paired differences with two intervals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.studies.glue_trials import Predictions, Pretraining, Trial, quoted_examples
from tests.studies.resampling import SCORES, Interval, over_examples, over_runs_and_examples
from tests.studies.seeds import STATISTICS, Paired, paired, spread
from tests.studies.support import table

PAIRS = (
    ("capt", "mlm", "equal tokens"),
    ("capt", "mlm-equal-compute", "equal compute"),
    ("capt", "none", ""),
    ("mlm", "none", ""),
    ("mlm-equal-compute", "none", ""),
    ("mlm-equal-compute", "mlm", "more steps"),
    ("capt-cls", "mlm", "equal tokens"),
    ("capt-cls", "mlm-equal-compute", "equal compute"),
    ("capt-cls", "capt", "the contrast's pooler"),
)
STS = tuple(f"sts_{split}_{pooler}" for split in ("dev", "test") for pooler in ("cls", "mean", "head"))


class Difference(NamedTuple):
    """``first - second`` on a task, in points.

    ``seeds`` pairs the means over the fine-tuning seeds by pretraining seed. ``whole`` resamples pretraining runs,
    fine-tuning seeds and examples, ``examples`` the examples alone; both are None for the mean of the tasks.
    """

    task: str
    first: str
    second: str
    what: str
    seeds: Paired
    whole: Interval | None
    examples: Interval | None


def write_tables(
    before: Sequence[Pretraining],
    trials: Sequence[Trial],
    predictions: Predictions,
    glue: Path,
    out: Path,
    pairs: Sequence[tuple[str, str, str]] = PAIRS,
) -> list[Difference]:
    """Write ``tables.md``, and return the differences of ``pairs`` that are in it."""
    differences = differences_of(trials, predictions, glue, pairs)
    parts = [
        "## Fine-tuned", scores_table(trials), seeds_table(trials), differences_table(differences),
        "## Before fine-tuning", pretraining_table(before), sts_differences_table(before, pairs),
    ]  # fmt: skip
    (out / "tables.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    return differences


def by_seed(trials: Sequence[Trial], task: str, arm: str) -> dict[int, float]:
    """Pretraining seed -> the mean over the fine-tuning seeds, in points; ``mean`` is the mean of the tasks."""
    tasks = list(dict.fromkeys(t.task for t in trials)) if task == "mean" else [task]
    found: dict[int, float] = {}
    for seed in dict.fromkeys(t.seed for t in trials if t.arm == arm):
        means = [
            statistics.fmean(t.score for t in trials if (t.task, t.arm, t.seed) == (each, arm, seed)) for each in tasks
        ]
        found[seed] = 100 * statistics.fmean(means)
    return found


def scores_table(trials: Sequence[Trial]) -> str:
    """Mean ± deviation over the pretraining seeds; the number of constant predictions follows."""
    tasks = list(dict.fromkeys(trial.task for trial in trials))
    first = {task: next(trial for trial in trials if trial.task == task) for task in tasks}
    rows = [["constant prediction", *(f"{100 * first[task].constant:.1f}" for task in tasks), ""]]
    for arm in dict.fromkeys(trial.arm for trial in trials):
        cells = []
        for task in tasks:
            constant = sum(trial.degenerate for trial in trials if (trial.task, trial.arm) == (task, arm))
            cells.append(
                spread(list(by_seed(trials, task, arm).values())) + (f" ({constant} constant)" if constant else "")
            )
        rows.append([arm, *cells, spread(list(by_seed(trials, "mean", arm).values()))])
    heads = [f"{task} ({first[task].metric}, {first[task].split}, {first[task].rows:,})" for task in tasks]
    return table(["arm", *heads, "mean of the tasks"], rows)


def seeds_table(trials: Sequence[Trial]) -> str:
    """Every pretraining seed, the deviation over fine-tuning seeds, and what selection on dev would have added."""
    rows = []
    for task, arm in dict.fromkeys((trial.task, trial.arm) for trial in trials):
        own = [trial for trial in trials if (trial.task, trial.arm) == (task, arm)]
        runs = [[trial.score for trial in own if trial.seed == seed] for seed in dict.fromkeys(t.seed for t in own)]
        within = [statistics.variance(run) for run in runs if len(run) > 1]
        rows.append(
            [task, arm, ", ".join(f"{value:.1f}" for value in by_seed(trials, task, arm).values()),
             f"{100 * statistics.fmean(within) ** 0.5:.1f}" if within else "",
             f"{100 * statistics.fmean(trial.dev_best for trial in own):.1f}",
             f"{100 * statistics.fmean(trial.dev_last for trial in own):.1f}"]
        )  # fmt: skip
    heads = ["each pretraining seed", "sd over fine-tuning seeds", "best epoch on dev", "last epoch on dev"]
    return table(["task", "arm", *heads], rows)


def differences_of(
    trials: Sequence[Trial], predictions: Predictions, glue: Path, pairs: Sequence[tuple[str, str, str]] = PAIRS
) -> list[Difference]:
    """The differences of ``pairs`` on every task, and of the mean of the tasks."""
    found: list[Difference] = []
    for task in dict.fromkeys(trial.task for trial in trials):
        labels = quoted_examples(task, glue).labels
        assert labels is not None, "quoted_examples reads labelled sets"
        metric = next(trial.metric for trial in trials if trial.task == task)
        for first, second, what in pairs:
            seeds = paired(by_seed(trials, task, first), by_seed(trials, task, second))
            if seeds is not None:
                arms = [predictions[f"{arm}/{task}"] for arm in (first, second)]
                found.append(Difference(task, first, second, what, seeds, *intervals(*arms, labels, metric)))
    for first, second, what in pairs:
        seeds = paired(by_seed(trials, "mean", first), by_seed(trials, "mean", second))
        if seeds is not None:
            found.append(Difference("mean", first, second, what, seeds, None, None))
    return found


def intervals(first: np.ndarray, second: np.ndarray, labels: np.ndarray, metric: str) -> tuple[Interval, Interval]:
    """Over runs, seeds and examples, and over the examples alone, in points."""

    def points(rows: np.ndarray, gold: np.ndarray) -> np.ndarray:
        return 100 * SCORES[metric](rows, gold)

    return over_runs_and_examples(first, second, labels, points), over_examples(first, second, labels, points)


def differences_table(differences: Sequence[Difference]) -> str:
    """Paired differences in points."""
    rows = []
    for each in differences:
        mean, _, *others = each.seeds.cells()
        ranges = ["" if interval is None else interval.cell() for interval in (each.whole, each.examples)]
        rows.append([each.task, _named(each.first, each.second, each.what), mean, *ranges, *others])
    heads = ["95%: runs, seeds, examples", "95%: examples alone", f"pretraining {STATISTICS[1]}", STATISTICS[2]]
    return table(["task", "difference", "points", *heads], rows)


def pretraining_table(before: Sequence[Pretraining]) -> str:
    """Steps, tokens, seconds and MLM loss of every arm, and Spearman's rho on STS-B by every pooler."""
    rows = []
    for arm in dict.fromkeys(run.arm for run in before):
        own = [run for run in before if run.arm == arm]
        scores = [[value for run in own if (value := getattr(run, key)) is not None] for key in STS]
        rows.append(
            [arm, f"{own[0].steps:,}", f"{own[0].million_tokens:.1f}",
             f"{statistics.fmean(run.seconds for run in own):.0f}", spread([run.loss_mlm for run in own], digits=3),
             *(spread(values) if values else "" for values in scores)]
        )  # fmt: skip
    return table(["arm", "steps", "million tokens", "seconds", "MLM loss", *map(_sts_name, STS)], rows)


def sts_differences_table(before: Sequence[Pretraining], pairs: Sequence[tuple[str, str, str]] = PAIRS) -> str:
    """Paired differences of rho x 100 on STS-B without fine-tuning, by pooler."""
    rows = []
    for key in STS:
        arms: Mapping[str, dict[int, float]] = {
            arm: {run.seed: value for run in before if run.arm == arm and (value := getattr(run, key)) is not None}
            for arm in dict.fromkeys(run.arm for run in before)
        }
        for first, second, what in pairs:
            result = paired(arms.get(first, {}), arms.get(second, {}))
            if result is not None:
                rows.append([_sts_name(key), _named(first, second, what), *result.cells()])
    return table(["STS-B, pooler", "difference", "points", *STATISTICS], rows)


def _sts_name(key: str) -> str:
    _, split, pooler = key.split("_")
    return f"{split} {'`<s>`' if pooler == 'cls' else pooler}"


def _named(first: str, second: str, what: str) -> str:
    return f"{first} - {second}" + (f" ({what})" if what else "")

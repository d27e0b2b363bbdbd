"""The tables of docs/results/pretexts.md: what each arm took and reached, and paired differences over the seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.studies.seeds import seeds_compared, spread
from tests.studies.support import table

SETS = {
    "stsb": "STS-B test, Spearman",
    "qnli": "QNLI held out, MRR@10",
    "cranfield": "Cranfield, nDCG@10",
    "mrpc": "MRPC test, Spearman with the label",
}
DECIDING = ("stsb", "qnli", "cranfield")
"""The sets of the rule; MRPC is kept back, and decides nothing."""
BASELINES = ("none", "mlm", "mlm-equal-compute")
COMPARED = (("crop", "capt"), ("neighbour", "capt"), ("crop+mlm", "capt"), ("crop+both", "mlm+both"))
"""Beside each arm against each of `BASELINES`."""


class Trial(NamedTuple):
    """A measurement: the arm, the steps of pairs after it, and figures x 100; what the text took is of stage 0."""

    arm: str
    seed: int
    pairs: int
    stsb: float
    qnli: float
    cranfield: float
    mrpc: float | None = None
    steps: int | None = None
    tokens: int | None = None
    flops: float | None = None
    pretext: float | None = None


def write_tables(trials: Sequence[Trial], words: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Write the tables of ``trials`` and of what counting ``words`` gives as Markdown."""
    parts = [_taken(trials)]
    for stage in sorted({trial.pairs for trial in trials}):
        own = [trial for trial in trials if trial.pairs == stage]
        parts += [
            f"After {stage} steps of pairs:" if stage else "Before any pairs:",
            _figures(own, words),
            _differences(own),
        ]
    path.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def _taken(trials: Sequence[Trial]) -> str:
    rows = []
    for arm in _arms(trials):
        own = [trial for trial in trials if trial.arm == arm and trial.steps is not None]
        if not own:
            continue
        tokens, flops = own[0].tokens or 0, own[0].flops or 0.0
        known = [trial.pretext for trial in own if trial.pretext is not None]
        taken = ["1, which moves nothing", "", ""] if arm == "none" else [
            f"{own[0].steps:,}", f"{tokens / 1e6:.2f}", f"{flops / 1e12:.2f}"
        ]  # fmt: skip
        rows.append([arm, *taken, spread(known, digits=3) if known else ""])
    return table(["arm", "steps", "million tokens", "TFLOP", "found before training"], rows)


def _figures(trials: Sequence[Trial], words: Mapping[str, Mapping[str, float]]) -> str:
    sets = _sets(trials)
    rows = []
    for arm in _arms(trials):
        values = [list(_by_seed(trials, arm, name).values()) for name in sets]
        rows.append([arm, str(len(values[0])), *(spread(each) if each else "" for each in values)])
    for system, figures in words.items():
        rows.append([system, "", *(f"{figures[name]:.1f}" if name in figures else "" for name in sets)])
    return table(["arm", "seeds", *(SETS[name] for name in sets)], rows)


def _differences(trials: Sequence[Trial]) -> str:
    """Mean, t interval over the seeds and seeds above 0 for each set, and what the rule says of several seeds."""
    sets, arms = _sets(trials), _arms(trials)
    compared = [(arm, base) for base in BASELINES for arm in arms if arm not in BASELINES]
    compared += [("mlm", "none"), ("mlm-equal-compute", "none"), ("mlm-equal-compute", "mlm"), *COMPARED]
    rows = []
    for first, second in compared:
        cells, by_set = [], []
        for name in sets:
            differences = _paired(trials, first, second, name)
            if not differences:
                break
            if name in DECIDING:
                by_set.append(differences)
            cells.append(seeds_compared(differences))
        else:
            rows.append([f"{first} - {second}", *cells, rule(by_set) if len(by_set[0]) > 1 else ""])
    return table(["difference", *(SETS[name] for name in sets), "by the rule"], rows)


def rule(by_set: Sequence[Sequence[float]]) -> str:
    """Verdict on differences: ``for`` where all seeds are above 0 on two sets or more, and all below 0 on none.

    ``against`` is the mirror of it.
    """
    above = sum(all(each > 0 for each in differences) for differences in by_set)
    below = sum(all(each < 0 for each in differences) for differences in by_set)
    if above >= 2 and not below:
        return "for"
    return "against" if below >= 2 and not above else ""


def _arms(trials: Sequence[Trial]) -> list[str]:
    return list(dict.fromkeys(trial.arm for trial in trials))


def _sets(trials: Sequence[Trial]) -> list[str]:
    return [name for name in SETS if any(getattr(trial, name) is not None for trial in trials)]


def _by_seed(trials: Sequence[Trial], arm: str, name: str) -> dict[int, float]:
    values = {trial.seed: getattr(trial, name) for trial in trials if trial.arm == arm}
    return {seed: value for seed, value in values.items() if value is not None}


def _paired(trials: Sequence[Trial], first: str, second: str, name: str) -> list[float]:
    a, b = (_by_seed(trials, arm, name) for arm in (first, second))
    return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]

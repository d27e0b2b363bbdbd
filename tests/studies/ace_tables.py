"""The tables of docs/results/ace.md: every set by both rules, and paired differences over seeds and over word pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from capt.pretrain.embeddings.load import load_embeddings
from capt.pretrain.embeddings.similarity import Cosines, cosines_of, find_sets
from tests.studies.resampling import Interval, over_examples, spearman
from tests.studies.seeds import STATISTICS, paired, spread
from tests.studies.support import table

PAIRS = (
    ("noise+ace", "noise", "equal words"),
    ("ace", "noise", "equal words"),
    ("noise+ace", "self-adversarial", "equal words"),
    ("self-adversarial", "noise", "equal words"),
    ("noise+ace", "noise-equal-time", "equal time"),
    ("noise+ace", "self-adversarial-equal-time", "equal time"),
)
COMPARED = ("RW-STANFORD", "WS-353-ALL")
"""The sets of the differences: the paper's, and the one that gensim is compared on."""
RULES = ("drop", "zero")
RESAMPLES = 1000


class Trial(NamedTuple):
    """A run on a set. ``drop`` and ``zero`` are Spearman's rho x 100 by the two rules for unknown words."""

    start: str
    arm: str
    seed: int
    name: str
    pairs: int
    covered: int
    drop: float | None
    zero: float | None
    words: int
    words_per_second: float


def write_tables(trials: Sequence[Trial], run: Callable[[str, str, int], Path], sets: Path, out: Path) -> None:
    """Write ``tables.md``: for each start the sets by both rules, speed, and the differences of `PAIRS`."""
    parts = []
    for start in dict.fromkeys(trial.start for trial in trials):
        own = [trial for trial in trials if trial.start == start]
        parts += [f"## From {start}" if start == "scratch" else "## Fine-tuned", speed_table(own)]
        parts += [similarity_table(own, rule) for rule in RULES]
        parts.append(differences_table(own, cosines_of_runs(own, run, sets)))
    (out / "tables.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def speed_table(trials: Sequence[Trial]) -> str:
    """Words read, words a second and minutes of every arm, mean over the seeds."""
    rows = []
    for arm in dict.fromkeys(trial.arm for trial in trials):
        own = list({trial.seed: trial for trial in trials if trial.arm == arm}.values())
        words = np.mean([trial.words for trial in own])
        speed = np.mean([trial.words_per_second for trial in own])
        rows.append([arm, f"{words / 1e6:.1f}", f"{speed / 1e3:.1f}", f"{words / speed / 60:.1f}"])
    return table(["arm", "million words", "thousand words a second", "minutes"], rows)


def similarity_table(trials: Sequence[Trial], rule: str) -> str:
    """Mean and deviation over the seeds of every arm and set, by one rule; the coverage is in the head."""
    names = list(dict.fromkeys(trial.name for trial in trials))
    covered = {trial.name: f"{trial.covered:,} of {trial.pairs:,}" for trial in trials}
    rows = []
    for arm in dict.fromkeys(trial.arm for trial in trials):
        scores = [list(_by_seed(trials, arm, name, rule).values()) for name in names]
        rows.append([arm, *(spread(values, digits=2) if values else "" for values in scores)])
    return table([f"unknown words: {rule}", *(f"{name} ({covered[name]})" for name in names)], rows)


def _by_seed(trials: Sequence[Trial], arm: str, name: str, rule: str) -> dict[int, float]:
    found = {trial.seed: getattr(trial, rule) for trial in trials if (trial.arm, trial.name) == (arm, name)}
    return {seed: value for seed, value in found.items() if value is not None}


CosinesOf = Mapping[tuple[str, str], Mapping[int, Cosines]]
"""(arm, set) -> seed -> the cosine of every pair."""


def cosines_of_runs(trials: Sequence[Trial], run: Callable[[str, str, int], Path], sets: Path) -> CosinesOf:
    """Take the cosines of every run on the sets that are compared."""
    chosen = [pairs for pairs in find_sets(sets) if pairs.name in COMPARED]
    found: dict[tuple[str, str], dict[int, Cosines]] = {}
    for start, arm, seed in dict.fromkeys((trial.start, trial.arm, trial.seed) for trial in trials):
        vectors = load_embeddings(run(start, arm, seed))
        for pairs in chosen:
            found.setdefault((arm, pairs.name), {})[seed] = cosines_of(vectors, pairs)
    return found


def differences_table(trials: Sequence[Trial], cosines: CosinesOf) -> str:
    """Paired differences in points of rho x 100, over seeds and over word pairs."""
    rows = []
    for name in COMPARED:
        for rule in RULES:
            for first, second, what in PAIRS:
                result = paired(*(_by_seed(trials, arm, name, rule) for arm in (first, second)))
                if result is not None:
                    over = bootstrap(cosines[first, name], cosines[second, name], rule)
                    mean, interval, *others = result.cells(2)
                    rows.append(
                        [f"{name}, {rule}", f"{first} - {second} ({what})", mean, interval, over.cell(2), *others]
                    )
    interval, *others = STATISTICS
    return table(["set, rule", "difference", "points", interval, "95% bootstrap over word pairs", *others], rows)


def bootstrap(
    first: Mapping[int, Cosines], second: Mapping[int, Cosines], rule: str, resamples: int = RESAMPLES
) -> Interval:
    """Resample the word pairs, the same for both arms and all seeds, and take the difference of the mean rho x 100.

    It says how much of a difference hangs on these pairs; the interval over seeds says how much on these runs.
    """
    seeds = sorted(first.keys() & second.keys())
    arms = [[arm[seed] for seed in seeds] for arm in (first, second)]
    kept = arms[0][0].covered if rule == "drop" else np.ones(len(arms[0][0].pairs), dtype=bool)
    values = [np.array([cosines.values[kept] for cosines in arm]) for arm in arms]  # [seeds, pairs] each
    gold = arms[0][0].pairs.gold[kept]
    return over_examples(*values, gold, lambda cosines, labels: 100 * spearman(cosines, labels), resamples)

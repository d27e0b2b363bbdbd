"""The tables of docs/results/adapting.md, of whatever trials are there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.studies.resampling import spearman
from tests.studies.seeds import mean_and_sd, paired, spread
from tests.studies.support import table

START = "start"
TUNED = ("STS-B dev", "QNLI A")
"""The sets on which an arm is chosen, by the mean of their clean figures."""
_RESAMPLES = 1000

Trials = Mapping[str, Mapping[int, Mapping[str, Mapping[str, float]]]]
"""Arm -> seed -> set -> noise -> figure."""


def read_trials(out: Path) -> dict[str, dict[int, Any]]:
    """The figures of every trial in ``out``, arms in the order of their names."""
    trials: dict[str, dict[int, Any]] = {}
    for path in sorted((out / "trials").glob("*.json")):
        trial = json.loads(path.read_text())
        trials.setdefault(trial["arm"], {})[trial["seed"]] = trial["figures"]
    return trials


def write_tables(out: Path, planned: Sequence[tuple[str, int]]) -> None:
    """Write ``tables.md``: what was chosen, the figures, differences from the start, and which trials are missing."""
    trials = read_trials(out)
    arms = [arm for arm in ("tf-idf", "bm25", "start-fp32", START) if arm in trials]
    arms += [arm for arm in dict.fromkeys(arm for arm, _ in planned) if arm in trials and arm not in arms]
    missing = [f"{arm} seed {seed}" for arm, seed in planned if seed not in trials.get(arm, {})]
    parts = [
        _tuning(trials, arms),
        *(_figures(trials, arms, name) for name in _reported(trials)),
        _differences(out, trials, [arm for arm in arms if 0 not in trials[arm]]),
        f"Missing of {len(planned)} trials: {', '.join(missing) if missing else 'none'}.",
    ]
    (out / "tables.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def _reported(trials: Trials) -> list[str]:
    names = [name for seeds in trials.values() for figures in seeds.values() for name in figures]
    return [name for name in dict.fromkeys(names) if name not in TUNED]


def chosen_arm(trials: Trials) -> tuple[str, dict[str, float]]:
    """The arm with the best mean over seeds of its tuning figures, and this mean of every arm that was trained.

    Raises:
        ValueError: no arm was trained yet.
    """
    scores = {
        arm: float(np.mean([figures[name]["clean"] for figures in seeds.values() for name in TUNED]))
        for arm, seeds in trials.items()
        if 0 not in seeds
    }
    return max(scores, key=lambda arm: scores[arm]), scores


def _tuning(trials: Trials, arms: Sequence[str]) -> str:
    rows = [
        [arm, str(len(trials[arm])), *(_cell(trials[arm], name, "clean") for name in TUNED)]
        for arm in arms
        if any(name in figures for name in TUNED for figures in trials[arm].values())
    ]
    chosen = table(["arm", "seeds", *TUNED], rows)
    if all(0 in seeds for seeds in trials.values()):
        return chosen
    best, scores = chosen_arm(trials)
    return f"{chosen}\n\nBest of {len(scores)} arms by the mean of both: `{best}` ({scores[best]:.2f})."


def _figures(trials: Trials, arms: Sequence[str], name: str) -> str:
    noises = list(dict.fromkeys(n for arm in arms for figures in trials[arm].values() for n in figures.get(name, {})))
    rows = [
        [arm, str(len(trials[arm])), *(_cell(trials[arm], name, noise) for noise in noises)]
        for arm in arms
        if any(name in figures for figures in trials[arm].values())
    ]
    return table([name, "seeds", *noises], rows)


def _cell(seeds: Mapping[int, Mapping[str, Mapping[str, float]]], name: str, noise: str) -> str:
    values = [figures[name][noise] for figures in seeds.values() if noise in figures.get(name, {})]
    return spread(values, digits=2) if values else ""


def _differences(out: Path, trials: Trials, arms: Sequence[str]) -> str:
    """Each arm less the start: intervals over seeds, and over the pairs or queries of a set."""
    if START not in trials:
        return ""
    start = trials[START][0]
    gold = out / "gold.npz"
    scores = dict(np.load(gold)) if gold.exists() else {}
    rows = []
    for arm in arms:
        for name, noise in [(one, noise) for one in _reported(trials) for noise in start.get(one, {})]:
            values = {seed: figures[name][noise] for seed, figures in trials[arm].items()}
            found = paired(values, dict.fromkeys(values, start[name][noise]))
            assert found is not None
            mean, deviation = mean_and_sd([value - start[name][noise] for value in values.values()])
            over_items = _over_items(out, arm, list(values), f"{name}|{noise}", scores.get(name))
            rows.append(
                [arm, name, noise, f"{mean:+.2f}" + ("" if deviation is None else f" ± {deviation:.2f}"),
                 f"{found.low:+.2f} to {found.high:+.2f}", over_items, f"{found.wins} of {found.seeds}"]
            )  # fmt: skip
    heads = ["arm", "set", "words", "arm - start", "95% over seeds", "95% over items", "above the start"]
    return table(heads, rows)


def _over_items(out: Path, arm: str, seeds: Sequence[int], key: str, gold: np.ndarray | None) -> str:
    """The 95% bootstrap interval of the mean difference over the pairs or queries of a set, the same for all seeds."""
    files = [out / "items" / f"{arm}-seed{seed}.npz" for seed in seeds] + [out / "items" / f"{START}-seed0.npz"]
    if not all(path.exists() for path in files):
        return ""
    *mine, start = (np.load(path)[key] for path in files)
    rows, n = np.stack(mine), len(start)
    generator, draws = np.random.default_rng(0), []
    for _ in range(_RESAMPLES if gold is None else _RESAMPLES // 5):
        chosen = generator.integers(0, n, n)
        if gold is None:
            draws.append(100 * (rows[:, chosen].mean() - start[chosen].mean()))
        else:
            scores = spearman(np.vstack([rows, start])[:, chosen], gold[chosen])
            draws.append(100 * float(scores[:-1].mean() - scores[-1]))
    low, high = np.percentile(draws, [2.5, 97.5])
    return f"{low:+.2f} to {high:+.2f}"

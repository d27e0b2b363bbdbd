"""The tables of the study of pairs, of whatever trials there are: means, paired differences, what is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.studies.seeds import paired, spread

FIGURES = {
    "stsb": "STS-B test, Spearman",
    "qnli": "QNLI held out, MRR",
    "cranfield": "Cranfield, nDCG@10",
    "mrpc": "MRPC test, Spearman with the label",
}
Cell = tuple[str, str]
"""A start and an arm."""


class Trial(NamedTuple):
    """A run: its start, how it was trained, and what it reached; ``mrpc`` is None until it is measured."""

    start: str
    arm: str
    seed: int
    stsb: float
    qnli: float
    cranfield: float
    mrpc: float | None = None


def trial_of(folder: Path, start: str, arm: str, seed: int) -> Trial | None:
    """The trial of a run that has been measured; None of another one."""
    measured = [folder / name for name in ("held_out.json", "retrieval.json")]
    if not all(path.exists() for path in measured):
        return None
    held_out, retrieval = (json.loads(path.read_text())["sections"] for path in measured)
    scored, qnli = (section["metrics"] for section in held_out)
    (system, *_) = retrieval[0]["poolers"].values()
    kept_back = folder / "kept_back.json"
    mrpc = json.loads(kept_back.read_text())["sections"][0]["metrics"]["spearman"] if kept_back.exists() else None
    return Trial(start, arm, seed, scored["spearman"], qnli["mrr/to_document"], system["ndcg@10"], mrpc)


def write_tables(
    trials: Sequence[Trial], expected: Sequence[tuple[str, str, int]], compared: Sequence[tuple[Cell, Cell]], path: Path
) -> None:
    """Write the tables of ``trials``, the differences of the two cells of each pair, and the missing trials."""
    figures = {
        name: title for name, title in FIGURES.items() if any(getattr(each, name) is not None for each in trials)
    }
    cells = list(dict.fromkeys((each.start, each.arm) for each in trials))
    lines = [f"| start | arm | seeds | {' | '.join(figures.values())} |", f"|---|---|---:|{'---:|' * len(figures)}"]
    for cell in cells:
        seeds, values = len(_by_seed(trials, cell, "seed")), [_by_seed(trials, cell, name) for name in figures]
        shown = [spread(list(each.values()), 100) if each else "" for each in values]
        lines.append(f"| {' | '.join(cell)} | {seeds} | {' | '.join(shown)} |")
    lines += [
        "",
        "Differences by seed, in points: mean, 95% bootstrap interval, exact p, seeds for the first.",
        "",
    ]
    lines += [f"| first | second | {' | '.join(figures.values())} |", f"|---|---|{'---:|' * len(figures)}"]
    for first, second in compared:
        parts = []
        for name in figures:
            found = paired(_by_seed(trials, first, name), _by_seed(trials, second, name))
            parts.append(
                "missing" if found is None else
                f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}], p {found.p:.3f}, "
                f"{found.wins} of {found.seeds}"
            )  # fmt: skip
        lines.append(f"| {', '.join(first)} | {', '.join(second)} | {' | '.join(parts)} |")
    there = {(each.start, each.arm, each.seed) for each in trials}
    missing: dict[Cell, list[str]] = {}
    for start, arm, seed in expected:
        if (start, arm, seed) not in there:
            missing.setdefault((start, arm), []).append(str(seed))
    named = [f"{', '.join(cell)} (seeds {', '.join(seeds)})" for cell, seeds in missing.items()]
    lines += ["", f"Missing: {'; '.join(named) or 'nothing'}."]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _by_seed(trials: Sequence[Trial], cell: Cell, name: str) -> dict[int, float]:
    """A figure of a cell, by seed; without the trials that lack it."""
    values = {each.seed: getattr(each, name) for each in trials if (each.start, each.arm) == cell}
    return {seed: value for seed, value in values.items() if value is not None}

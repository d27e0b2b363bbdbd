"""The tables of the study of pairs, of whatever trials there are: means, paired differences, what is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.studies.seeds import paired, spread

FIGURES = {"stsb": "STS-B test, Spearman", "qnli": "QNLI held out, MRR", "cranfield": "Cranfield, nDCG@10"}


class Trial(NamedTuple):
    """One run: what it started from, how it was trained, and what it reached."""

    start: str
    arm: str
    seed: int
    stsb: float
    qnli: float
    cranfield: float


def trial_of(folder: Path, start: str, arm: str, seed: int) -> Trial | None:
    """The trial of a run that has been measured; None of another one."""
    measured = [folder / name for name in ("held_out.json", "retrieval.json")]
    if not all(path.exists() for path in measured):
        return None
    held_out, retrieval = (json.loads(path.read_text())["sections"] for path in measured)
    scored, qnli = (section["metrics"] for section in held_out)
    (system, *_) = retrieval[0]["poolers"].values()
    return Trial(start, arm, seed, scored["spearman"], qnli["mrr/to_document"], system["ndcg@10"])


def write_tables(
    trials: Sequence[Trial], expected: Sequence[tuple[str, str, int]], compared: Sequence[tuple[str, str, str]],
    path: Path,
) -> None:  # fmt: skip
    """Write the tables of ``trials``, the differences ``(arm, start, other start)``, and the missing trials."""
    cells = list(dict.fromkeys((each.start, each.arm) for each in trials))
    lines = ["| start | arm | seeds | " + " | ".join(FIGURES.values()) + " |", "|---|---|---:|---:|---:|---:|"]
    for start, arm in cells:
        mine = [each for each in trials if (each.start, each.arm) == (start, arm)]
        values = [spread([getattr(each, name) for each in mine], 100) for name in FIGURES]
        lines.append(f"| {start} | {arm} | {len(mine)} | {' | '.join(values)} |")
    lines += [
        "",
        "Differences of two starts with the same seeds, in points: mean, 95% bootstrap interval, exact p.",
        "",
    ]
    lines += ["| arm | first | second | " + " | ".join(FIGURES.values()) + " |", "|---|---|---|---:|---:|---:|"]
    for arm, first, second in compared:
        parts = []
        for name in FIGURES:
            a, b = ({t.seed: getattr(t, name) for t in trials if (t.start, t.arm) == (s, arm)} for s in (first, second))
            found = paired(a, b)
            parts.append(
                "missing" if found is None else
                f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}], p {found.p:.3f}, "
                f"{found.wins} of {found.seeds}"
            )  # fmt: skip
        lines.append(f"| {arm} | {first} | {second} | {' | '.join(parts)} |")
    there = {(each.start, each.arm, each.seed) for each in trials}
    missing = [f"{start} {arm} {seed}" for start, arm, seed in expected if (start, arm, seed) not in there]
    lines += ["", f"Missing trials (start, arm, seed): {', '.join(missing) or 'none'}."]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")

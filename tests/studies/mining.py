"""The study behind docs/results/mining.md: does a round of mined hard negatives help, and is it the mining that helps?

``python -m tests.studies.mining --beir BEIR_FOLDER --out runs/mining-study`` trains and measures five seeds, and writes
``trials.csv`` after each run and ``tables.md`` after each seed. Finished runs stay as they are, so the same command
continues after an interruption.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from capt.pretrain.base.files import write_text
from capt.pretrain.config.retrieval import METRICS
from examples.quickstart.own_structure import BEIR, PAIRS, TEXT, write_data
from tests.studies.seeds import paired, spread
from tests.studies.support import capt, finish, same_settings, table

FIRST, SECOND, PAIRS_A_STEP, NEGATIVES = 120, 60, 64, 2
TINY = (
    "data.query_length=24", "data.sequence_length=64", f"batch.global={PAIRS_A_STEP}", "batch.micro=32",
    "optimizer.lr=2.0e-3", "schedule.warmup_steps=12", "validate.every=0", "checkpoint.every=0",
    "run.tensorboard=false", "run.threads=1",
)  # fmt: skip
RULES: Mapping[str, tuple[str, ...]] = {
    "longer": (),
    "random-negatives": ("--choice", "random", "--last", "1000"),
    "mined": ("--last", "30", "--relative-margin", "0.05"),
}
"""Negatives of the second round: how those of a query were chosen; ``longer`` has none."""
ARMS = ("bm25", "random", "pairs", *RULES)
COMPARED = (
    ("mined", "pairs"), ("mined", "longer"), ("mined", "random-negatives"), ("longer", "pairs"), ("mined", "bm25"),
)  # fmt: skip


class Trial(NamedTuple):
    """The figures of one arm and seed on the test queries, in the order of `METRICS`."""

    arm: str
    seed: int
    figures: tuple[float, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--beir", type=Path, required=True, help="data set to train and measure on")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args(arguments)
    same_settings(given.out, {"beir": given.beir.name, "steps": [FIRST, SECOND], "keys": TINY, "rules": RULES})
    data = given.out / "data"
    if not data.exists():
        write_data(data, given.beir)
    for seed in range(1, given.seeds + 1):
        _one_seed(given.out, data, seed)
        trials = read_trials(given.out)
        write_text(given.out / "tables.md", f"{arms_table(trials)}\n\n{differences_table(trials)}\n")


def _one_seed(out: Path, data: Path, seed: int) -> None:
    home = out / f"seed-{seed}"
    named = (f"run.seed={seed}", *TINY)
    finish(
        home / "random", "pretrain", "mlm_tiny", f"data.files={data / TEXT}", f"run.seed={seed}",
        "schedule.max_steps=1", "schedule.warmup_steps=0", "optimizer.lr=1.0e-12", "batch.global=8", "batch.micro=8",
        "validate.samples=8", "run.tensorboard=false", "run.threads=1",
    )  # fmt: skip
    _measure(out, data, home, "random", seed)
    finish(
        home / "pairs", "pretrain", "pairs_tiny", f"model.init={home / 'random'}", f"data.files={data / PAIRS}",
        f"schedule.max_steps={FIRST}", *named,
    )  # fmt: skip
    _measure(out, data, home, "pairs", seed)
    for arm, rules in RULES.items():
        files, negatives = data / PAIRS, 0
        if rules:
            files, negatives = home / f"{arm}-negatives" / "pairs.jsonl", NEGATIVES
            if not files.parent.exists():
                capt(
                    "mine", "--pairs", data / PAIRS, "--model", home / "pairs", "--number", str(NEGATIVES),
                    "--short", "keep", "--seed", str(seed), *rules, "--store", out / "vectors", "--out", files.parent,
                )  # fmt: skip
        finish(
            home / arm, "pretrain", "pairs_tiny", f"model.init={home / 'pairs'}", f"data.files={files}",
            f"data.negatives={negatives}", f"schedule.max_steps={SECOND}", *named,
        )  # fmt: skip
        _measure(out, data, home, arm, seed)


def _measure(out: Path, data: Path, home: Path, arm: str, seed: int) -> None:
    result = home / f"{arm}.json"
    if not result.exists():
        capt(
            "evaluate", home / arm, "--retrieval", data / BEIR, "--bm25", "--store", out / "vectors", "--out", result
        )  # fmt: skip
    trials = {(each.arm, each.seed): each for each in read_trials(out)}
    for system, name in (("bm25", "bm25"), ("full", arm)):
        values = json.loads(result.read_text())["sections"][0]["poolers"][system]
        trials[name, seed] = Trial(name, seed, tuple(float(values[metric]) for metric in METRICS))
    rows = [[each.arm, str(each.seed), *(f"{value:.6f}" for value in each.figures)] for each in trials.values()]
    write_text(out / "trials.csv", "".join(",".join(row) + "\n" for row in [["arm", "seed", *METRICS], *rows]))


def read_trials(out: Path) -> list[Trial]:
    """The rows that are there so far."""
    path = out / "trials.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Trial(row["arm"], int(row["seed"]), tuple(float(row[metric]) for metric in METRICS))
            for row in csv.DictReader(file)
        ]


def arms_table(trials: Sequence[Trial]) -> str:
    """Mean and standard deviation over the seeds of each arm that has rows, times 100."""
    rows = []
    for arm in ARMS:
        figures = [each.figures for each in trials if each.arm == arm]
        if figures:
            cells = [spread(values, 100, 2) for values in map(list, zip(*figures, strict=True))]
            rows.append([f"`{arm}`", str(len(figures)), *cells])
    return table(["arm", "seeds", *(f"`{name}`" for name in METRICS)], rows)


def differences_table(trials: Sequence[Trial]) -> str:
    """Paired differences of nDCG@10 over the seeds that both arms have, times 100."""
    scores: dict[str, dict[int, float]] = {}
    for each in trials:
        scores.setdefault(each.arm, {})[each.seed] = each.figures[0]
    found = {
        f"`{first}` - `{second}`": paired(scores.get(first, {}), scores.get(second, {})) for first, second in COMPARED
    }
    rows = [
        [name, *result.cells(2, 100)[:-1], f"{result.p:.4f}"] for name, result in found.items() if result is not None
    ]
    return table(["difference", "mean", "95% interval over seeds", "wins", "p (sign flips)"], rows)


if __name__ == "__main__":
    main()

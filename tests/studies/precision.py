"""Loss curves of ``fp32``, ``bf16`` and ``bf16_pure`` on three seeds: whether they differ by more than the seeds do.

``CAPT_DATA=... python -m tests.studies.precision --out runs/precision`` trains ``capt_tiny`` on books at ZeRO 1, one
process, and prints the table of docs/guide/training.md; ``--job capt_small`` is for a GPU. Finished runs stay as they
are.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tests.realdata import real_data
from tests.runs import rows_of
from tests.studies.seeds import paired, spread
from tests.studies.support import finish, same_settings, together

ARMS = ("fp32", "bf16", "bf16_pure")
_TAIL = 5
"""Logged rows at the end of a run whose mean is its final training loss."""


def train(out: Path, text: Sequence[Path], given: argparse.Namespace, arm: str, seed: int) -> None:
    """Train an arm with a seed."""
    steps = given.steps
    finish(
        out / f"{arm}-seed{seed}", "pretrain", given.job, f"engine.precision={arm}", "engine.zero_stage=1",
        f"run.seed={seed}", "run.threads=1", "run.log_every=10", "run.tensorboard=false",
        f"data.files=[{','.join(map(str, text))}]", "tokenizer.type=bpe", "tokenizer.vocab_size=2048",
        "batch.global=32", "batch.micro=32", f"schedule.max_steps={steps}", f"schedule.warmup_steps={steps // 10}",
        "validate.every=0", "validate.samples=256", "checkpoint.every=0", "checkpoint.keep=1", *given.extra,
    )  # fmt: skip


def losses(folder: Path) -> tuple[list[float], float]:
    """The logged training losses of a run, and its last loss of masked tokens on held-out text."""
    rows = rows_of(folder)
    curve = [row["loss"] for row in rows if row.get("split") != "validation" and "loss" in row]
    return curve, [row["loss/mlm"] for row in rows if row.get("split") == "validation"][-1]


def table(runs: dict[str, dict[int, tuple[list[float], float]]]) -> list[str]:
    """A row for each arm: its losses, and how far its curves are from those in fp32 and the seeds from each other."""
    lines = ["| precision | last training loss | held-out MLM loss | minus fp32, by seed | curve minus fp32 |",
             "|---|---|---|---|---|"]  # fmt: skip
    final = {arm: {seed: value for seed, (_, value) in of.items()} for arm, of in runs.items()}
    for arm, of in runs.items():
        tails = [statistics.fmean(curve[-_TAIL:]) for curve, _ in of.values()]
        gap = np.mean([np.abs(np.subtract(of[seed][0], runs["fp32"][seed][0])).mean() for seed in of])
        against = paired(final[arm], final["fp32"])
        assert against is not None
        by_seed = " ".join(f"{final[arm][seed] - final['fp32'][seed]:+.4f}" for seed in sorted(of))
        lines.append(f"| `{arm}` | {spread(tails, digits=3)} | {spread(list(final[arm].values()), digits=3)} | "
                     f"{by_seed} | {gap:.4f} |")  # fmt: skip
    return lines


def main() -> int:
    """Train every arm with every seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--job", default="capt_tiny")
    parser.add_argument("--text", default="books.valid.txt.gz", help="files of the corpus, a pattern")
    parser.add_argument("--extra", nargs="*", default=[], help="a.b=c for every run")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each with one thread")
    given = parser.parse_args()
    data = real_data(parser, "corpus")
    same_settings(given.out, {name: getattr(given, name) for name in ("job", "text", "steps", "extra")})
    text = sorted((data / "corpus").glob(given.text))
    keys = [(arm, seed) for seed in range(1, given.seeds + 1) for arm in ARMS]

    def job(arm: str, seed: int) -> Callable[[], None]:
        return lambda: train(given.out, text, given, arm, seed)

    together((job(*key) for key in keys), given.parallel)
    runs: dict[str, dict[int, tuple[list[float], float]]] = {arm: {} for arm in ARMS}
    for arm, seed in keys:
        runs[arm][seed] = losses(given.out / f"{arm}-seed{seed}")
    print("\n".join(table(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

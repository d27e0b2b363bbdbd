"""The study behind docs/results/architecture.md: RoBERTa's architecture against ModernBERT's, at equal compute.

``CAPT_DATA=... python -m tests.studies.architecture --out runs/architecture-study`` trains `mlm_tiny` and
`modernbert_tiny` on books with the same masks, batches and schedule, and measures both on held-out books and
WikiText-2. ``trials.csv`` and ``tables.md`` are written after every run; finished runs stay as they are, so the same
command continues after an interruption.

``roberta-equal-compute`` takes as long as ``modernbert``: its steps are multiplied by the ratio of the seconds a step,
measured where both ran side by side. ``roberta-5e-4`` and ``roberta-2e-3`` are the same at half and twice the rate, for
the first seed alone: they show whether the rate, which both architectures share, is what holds one of them back.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import NamedTuple

from tests.realdata import real_data
from tests.runs import rows_of
from tests.studies.seeds import Paired, paired, spread
from tests.studies.support import capt, finish, same_settings, steps_of_equal_compute, together, write_trials

ARMS = {
    "modernbert": ["modernbert_tiny"],
    "roberta": ["mlm_tiny"],
    "roberta-equal-compute": ["mlm_tiny"],
    "roberta-5e-4": ["mlm_tiny", "optimizer.lr=5e-4"],
    "roberta-2e-3": ["mlm_tiny", "optimizer.lr=2e-3"],
}
RATES = ("roberta-5e-4", "roberta-2e-3")
"""Arms of the first seed alone."""
PAIRS = (("modernbert", "roberta"), ("modernbert", "roberta-equal-compute"))
MEASURES = {"books": "books, loss", "wiki": "WikiText-2, loss"}


class Trial(NamedTuple):
    """A run: masked-token losses in nats at 30% masks."""

    arm: str
    seed: int
    steps: int
    books: float
    wiki: float


def train_and_measure(out: Path, data: Path, arm: str, seed: int, steps: int) -> None:
    """Train an arm with a seed, and measure it on WikiText-2."""
    folder, corpus = out / f"{arm}-seed{seed}", data / "corpus"
    finish(
        folder, "pretrain", *ARMS[arm], "run.threads=1", "run.tensorboard=false", f"run.seed={seed}",
        f"data.files=[{','.join(map(str, sorted(corpus.glob('books.train.*'))))}]",
        f"data.validation_files=[{corpus / 'books.valid.txt.gz'}]", "data.cross_document_attention=false",
        f"data.cache={out / 'cache'}", "corruption.rate=0.3", "batch.micro=64", f"schedule.max_steps={steps}",
        f"schedule.warmup_steps={steps // 10}", "validate.every=100", "checkpoint.every=0", "checkpoint.keep=1",
    )  # fmt: skip
    if not (folder / "evaluation.json").exists():
        part = folder / "evaluation.json.part"
        capt("evaluate", folder, "--text", data / "lm/wikitext-2/wiki.valid.tokens", "--out", part)
        part.rename(folder / "evaluation.json")


def trial_of(out: Path, arm: str, seed: int) -> Trial:
    """The figures of a finished run."""
    folder = out / f"{arm}-seed{seed}"
    last = [row for row in rows_of(folder) if row.get("split") == "validation"][-1]
    sections = json.loads((folder / "evaluation.json").read_text())["sections"]
    (wiki,) = [section["metrics"]["loss/mlm"] for section in sections if section["name"].endswith("30% masked")]
    return Trial(arm, seed, last["step"], last["loss/mlm"], wiki)


def tables(trials: list[Trial]) -> str:
    """Means over the seeds, and paired differences with their intervals."""
    lines = [f"| arm | seeds | steps | {' | '.join(MEASURES.values())} |", "|---|---:|---:|" + "---:|" * len(MEASURES)]
    by_arm = {arm: [trial for trial in trials if trial.arm == arm] for arm in ARMS}
    for arm, own in by_arm.items():
        cells = [[getattr(trial, name) for trial in own] for name in MEASURES]
        if own:
            lines.append(f"| {arm} | {len(own)} | {own[0].steps} | {' | '.join(spread(c, digits=3) for c in cells)} |")
    lines += ["", "Differences by seed: mean, 95% bootstrap interval, exact p; below 0 the first is better.", ""]
    lines += ["| first | second | books, loss | WikiText-2, loss |", "|---|---|---:|---:|"]
    for first, second in PAIRS:
        told = []
        for name in ("books", "wiki"):
            one, other = ({trial.seed: getattr(trial, name) for trial in by_arm[arm]} for arm in (first, second))
            found = paired(one, other)
            told.append("-" if found is None else _difference(found))
        lines.append(f"| {first} | {second} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def _difference(found: Paired) -> str:
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}], p {found.p:.3f}"


def main() -> int:
    """Train, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3, help="the last seed")
    parser.add_argument("--steps", type=int, default=1000, help="of both architectures at equal tokens")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, each with one thread")
    options = parser.parse_args()
    data = real_data(parser, "corpus", "lm")
    out = options.out.resolve()
    same_settings(out, {"steps": options.steps})
    train = functools.partial(train_and_measure, out, data)
    beside = {arm: out / f"{arm}-seed1" for arm in ("modernbert", "roberta")}
    done: list[Trial] = []
    for seed in range(1, options.seeds + 1):
        together((functools.partial(train, arm, seed, options.steps) for arm in beside), options.parallel)
        longer = steps_of_equal_compute(out / "compute.json", options.steps, beside)
        arms = [arm for arm in ARMS if seed == 1 or arm not in RATES]
        together((functools.partial(train, arm, seed, longer) for arm in arms if arm not in beside), options.parallel)
        done += [trial_of(out, arm, seed) for arm in arms]
        write_trials(done, out / "trials.csv")
        (out / "tables.md").write_text(tables(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())

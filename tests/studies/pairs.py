"""The study behind docs/results/pairs.md: does a CAPT start beat an MLM start for pairs?

``CAPT_DATA=... python -m tests.studies.pairs --out runs/pairs-study`` trains the starts on books, trains each of them
on pairs, measures STS-B, held-out QNLI and Cranfield, and writes ``trials.csv`` and ``tables.md``. Finished runs stay
as they are, so the same command continues after an interruption; ``--tables`` writes both of what there is and trains
nothing. ``--minilm FOLDER`` adds a published encoder, which is no result of this project, as a further start.

The most telling runs come first: the arm ``pairs`` of every start, seed by seed. ``mlm-equal-compute`` takes as long as
``capt``: its steps are multiplied by the ratio of the seconds a step, measured where both ran side by side.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

from tests.realdata import real_data
from tests.studies.pairs_data import SOURCES, counting_words, write_files, write_kept_back
from tests.studies.pairs_tables import Trial, trial_of, write_tables
from tests.studies.support import capt, finish, same_settings, steps_of_equal_compute, together, write_trials

STARTS: dict[str, list[str]] = {
    "random": ["contrast.weight=0", "contrast.queue=0", "optimizer.lr=1e-12"],
    "mlm": ["contrast.weight=0", "contrast.queue=0"],
    "capt": [],
    "mlm-equal-compute": ["contrast.weight=0", "contrast.queue=0"],
}
"""Start -> what differs from ``capt_tiny``. ``random`` takes a step that moves no weight by more than 1e-12."""
MINILM = "all-MiniLM-L6-v2"
ARMS: dict[str, list[str]] = {
    "pairs": [],
    "none": ["optimizer.lr=1e-12", "schedule.max_steps=1"],
    "simcse": ["data.view=dropout"],
    "capt": ["data.view=corrupted"],
    "pairs-queue": ["contrast.queue=1024", "contrast.drift=moments", "contrast.queue_share=1"],
    "pairs-matryoshka": ["contrast.matryoshka=[128,64,32]"],
}
"""Arm -> what differs from the arm ``pairs``. ``simcse`` and ``capt`` see the texts of the pairs one by one."""
ALONE = ("simcse", "capt")
COMPARED_STARTS = (
    ("capt", "mlm"), ("capt", "mlm-equal-compute"), ("capt", "random"), ("mlm", "random"), ("mlm-equal-compute", "mlm"),
)  # fmt: skip
COMPARED_ARMS = (
    ("pairs", "none"), ("simcse", "none"), ("capt", "none"), ("capt", "simcse"), ("pairs", "simcse"), ("pairs", "capt"),
    ("pairs-queue", "pairs"), ("pairs-matryoshka", "pairs"),
)  # fmt: skip
START_STEPS, STEPS, BATCH = 250, 200, 64


@dataclasses.dataclass(frozen=True)
class Study:
    """Folders of the study, and how long it trains."""

    out: Path
    data: Path
    start_steps: int
    steps: int
    minilm: Path | None

    @property
    def starts(self) -> list[str]:
        """The names of all starts."""
        return [*STARTS, *([MINILM] if self.minilm else [])]

    def start(self, start: str, seed: int) -> Path:
        """The folder of a start."""
        return self.minilm if start == MINILM and self.minilm else self.out / f"start-{start}-seed{seed}"

    def run(self, start: str, arm: str, seed: int) -> Path:
        """The folder of a run on pairs."""
        return self.out / f"{start}-{arm}-seed{seed}"


def train_start(study: Study, start: str, seed: int, steps: int) -> None:
    """Train one start on books, as in the study of language."""
    corpus = study.data / "corpus"
    finish(
        study.start(start, seed), "pretrain", "capt_tiny", "run.threads=1", "run.log_every=10", "run.tensorboard=false",
        f"run.seed={seed}", f"data.files=[{','.join(map(str, sorted(corpus.glob('books.train.*'))))}]",
        f"data.validation_files=[{corpus / 'books.valid.txt.gz'}]", f"data.cache={study.out / 'cache'}",
        "data.sequence_length=64", "tokenizer.vocab_size=4096", "model.pooling=mean", "batch.global=64",
        "batch.micro=64", f"schedule.max_steps={steps}", f"schedule.warmup_steps={round(0.12 * steps)}",
        "optimizer.lr=1e-3", "validate.every=0", "checkpoint.every=0", "checkpoint.keep=1", *STARTS[start],
    )  # fmt: skip


def train_and_measure(study: Study, start: str, arm: str, seed: int) -> None:
    """Train an arm from a start, and measure it."""
    folder, files = study.run(start, arm, seed), study.out / "files"
    if arm in ALONE:
        data = [f"data.files={files / 'texts.jsonl'}"]
    else:
        sources = [{"name": name, "files": str(files / f"{name}.jsonl")} for name in SOURCES]
        sources[0]["negatives"] = 1  # type: ignore[assignment]
        data = [f"data.sources={json.dumps(sources)}"]
    own = dict(each.split("=", 1) for each in ARMS[arm])
    steps = int(own.get("schedule.max_steps", study.steps))
    rate = "5e-5" if start == MINILM else "1e-3"
    finish(
        folder, "pretrain", "capt_pairs", "run.threads=1", "run.log_every=10", "run.tensorboard=false",
        f"run.seed={seed}", f"model.init={study.start(start, seed)}", "model.pooling=mean",
        f"data.cache={study.out / 'cache'}", "data.sequence_length=64", "data.query_length=48",
        "data.validation_fraction=0", f"batch.global={BATCH}", f"batch.micro={BATCH}", f"schedule.max_steps={steps}",
        f"schedule.warmup_steps={steps // 10}", f"optimizer.lr={rate}", "checkpoint.every=0", "checkpoint.keep=1",
        *data, *ARMS[arm],
    )  # fmt: skip
    exported = folder / "exported"
    if not exported.exists():
        capt("convert", folder, exported, "--to", "sentence-transformers")
    held_out = ("--data", files / "stsb.jsonl", "--data", files / "qnli_held_out.jsonl", "--samples", "2000")
    _measure(folder, "held_out", folder, *held_out)
    _measure(folder, "retrieval", exported, "--retrieval", study.data / "retrieval" / "cranfield")


def _measure(folder: Path, name: str, *words: str | Path) -> None:
    """Let ``capt evaluate`` write ``FOLDER/NAME.json``, unless it is there."""
    if not (folder / f"{name}.json").exists():
        part = folder / f"{name}.json.part"
        part.unlink(missing_ok=True)
        capt("evaluate", *words, "--out", part)
        part.rename(folder / f"{name}.json")


def measure_kept_back(study: Study, seeds: range) -> None:
    """Measure what was kept back, for every run that is done."""
    path = study.out / "files" / "mrpc.jsonl"
    write_kept_back(study.data, path)
    for start, arm, seed in expected_trials(study, seeds):
        folder = study.run(start, arm, seed)
        if trial_of(folder, start, arm, seed) is not None:
            _measure(folder, "kept_back", folder, "--data", path, "--samples", "2000")


def expected_trials(study: Study, seeds: range) -> list[tuple[str, str, int]]:
    """Start, arm and seed of all runs of the study."""
    return [(start, arm, seed) for arm in ARMS for seed in seeds for start in study.starts]


def write_results(study: Study, seeds: range) -> None:
    """Write ``trials.csv`` and ``tables.md`` of the trials that there are."""
    expected = expected_trials(study, seeds)
    found = [trial_of(study.run(*each), *each) for each in expected]
    trials: list[Trial] = [trial for trial in found if trial is not None]
    if trials:
        write_trials(trials, study.out / "trials.csv")
    cells = {(each.start, each.arm) for each in trials}
    compared = [((a, arm), (b, arm)) for arm in ARMS for a, b in COMPARED_STARTS]
    compared += [((start, a), (start, b)) for start in study.starts for a, b in COMPARED_ARMS]
    write_tables(trials, expected, [each for each in compared if cells.issuperset(each)], study.out / "tables.md")


def main() -> int:
    """Train, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5, help="the last seed")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--starts", nargs="*", default=[*STARTS, MINILM], choices=[*STARTS, MINILM])
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each with one thread")
    parser.add_argument("--start-steps", type=int, default=START_STEPS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--minilm", type=Path, help="folder of the published encoder")
    parser.add_argument("--tables", action="store_true", help="write the tables of what there is")
    parser.add_argument("--kept-back", action="store_true", help="measure MRPC, once the other tables are final")
    parser.add_argument("--words", action="store_true", help="show what counting words gives, and train nothing")
    options = parser.parse_args()
    data = real_data(parser, "corpus", "glue", "retrieval", "vl")
    study = Study(options.out.resolve(), data, options.start_steps, options.steps, options.minilm)
    seeds = range(options.first_seed, options.seeds + 1)
    if options.kept_back:
        measure_kept_back(study, seeds)
    if options.tables or options.kept_back:
        write_results(study, seeds)
        return 0
    same_settings(study.out, {"start_steps": study.start_steps, "steps": study.steps})
    files = study.out / "files"
    if not (files / "counts.json").exists():
        (files / "counts.json").write_text(json.dumps(write_files(data, files)) + "\n")
    if options.words:
        write_kept_back(data, files / "mrpc.jsonl")
        sys.stdout.write(json.dumps(counting_words(files)) + "\n")
        return 0
    first = options.first_seed

    def start(name: str, seed: int, steps: int) -> Callable[[], None]:
        return lambda: train_start(study, name, seed, steps)

    lengths = {"random": 1, "mlm": study.start_steps, "capt": study.start_steps}
    if "mlm-equal-compute" in options.starts:
        together((start(name, first, study.start_steps) for name in ("capt", "mlm")), 2)
        beside = {name: study.start(name, first) for name in ("capt", "mlm")}
        lengths["mlm-equal-compute"] = steps_of_equal_compute(study.out / "compute.json", study.start_steps, beside)

    def run(name: str, arm: str, seed: int) -> Callable[[], None]:
        def both() -> None:
            if name in lengths:
                train_start(study, name, seed, lengths[name])
            train_and_measure(study, name, arm, seed)
            write_results(study, seeds)

        return both

    longest_first = ["capt", "mlm", "mlm-equal-compute", "random", *([MINILM] if study.minilm else [])]
    for arm in options.arms:
        for seed in seeds:
            together((run(name, arm, seed) for name in longest_first if name in options.starts), options.parallel)
    return 0


if __name__ == "__main__":
    sys.exit(main())

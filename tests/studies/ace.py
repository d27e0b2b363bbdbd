"""The study behind docs/results/ace.md: fixed noise, self-adversarial weights and ACE, five seeds each.

``CAPT_DATA=... python -m tests.studies.ace --out runs/ace-study`` makes the text, trains every arm from
scratch and from vectors that were trained here, and measures word similarity. It writes ``trials.csv``, ``tables.md``
and a report of each start. Finished runs stay as they are, so the same command continues after an interruption.

Arms: ``noise`` has fixed noise, in the paper NCE. ``self-adversarial`` weights the drawn noise by the discriminator's
own scores and needs no generator. In ``noise+ace`` half of the negatives come from the generator, in ``ace`` all of
them. All read the text as often. ``noise-equal-time`` and ``self-adversarial-equal-time`` take as long as
``noise+ace``: their epochs are multiplied by the ratio of the words a second, measured where both ran side by side.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tests.realdata import real_data
from tests.runs import rows_of
from tests.studies.ace_tables import Trial, write_tables
from tests.studies.support import capt, finish, together, usual, write_trials

GENERATOR = ["generator.lr=2e-2", "generator.precision=bf16"]
"""Twice the default rate: the text is short, and makes a hundred updates of the generator."""
ARMS: dict[str, list[str]] = {
    "noise": [],
    "self-adversarial": ["negatives.weights=self_adversarial"],
    "noise+ace": ["negatives.sampler=mixture", "negatives.mixture=0.5", *GENERATOR],
    "ace": ["negatives.sampler=generator", *GENERATOR],
}
EQUAL_TIME = {"noise-equal-time": "noise", "self-adversarial-equal-time": "self-adversarial"}
"""An arm that takes as long as ``REFERENCE`` -> the arm that it is otherwise."""
REFERENCE = "noise+ace"
STARTS = ("scratch", "fine-tuned")
COMMON = ["run.threads=1", "run.tensorboard=false", "checkpoint.every=0", "checkpoint.keep=1", "data.workers=1"]
DIMENSIONS, EPOCHS, BASE_EPOCHS = 100, 1, 1
"""Settings of every arm, and of the vectors that fine-tuning starts from."""
BASE_SEED = 1000
"""The vectors that fine-tuning starts from are the same for all arms and seeds."""
FINE_TUNING = ["model.context_init=zeros", "model.freeze_input=200"]
"""A file of vectors has no context table: it starts from zeros, and the vectors wait for it."""


@dataclasses.dataclass(frozen=True)
class Study:
    """Folders of the study, and what is run. ``extra`` are overrides of every run."""

    out: Path
    data: Path
    books: list[str]
    epochs: float
    extra: list[str]

    @property
    def text(self) -> Path:
        """The words of the books, in lower case, a paragraph a line."""
        return self.out / "text.txt"

    @property
    def base(self) -> Path:
        """The vectors that fine-tuning starts from."""
        return self.out / "base.txt"

    def run(self, start: str, arm: str, seed: int) -> Path:
        """The folder of a run."""
        return self.out / start / f"{arm}-seed{seed}"


def make_text(study: Study) -> None:
    """Write the words of the books: runs of letters, with an apostrophe inside; what is there stays."""
    if study.text.exists():
        return
    partial = study.text.with_suffix(".part")
    with partial.open("w", encoding="utf-8") as out:
        for name in study.books:
            with gzip.open(study.data / "corpus" / name, "rt", encoding="utf-8") as lines:
                for line in lines:
                    words = re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*", line.lower().replace("\u2019", "'"))
                    if words:
                        out.write(" ".join(words) + "\n")
    partial.rename(study.text)


def train(study: Study, folder: Path, seed: int, epochs: float, *overrides: str) -> None:
    """Finish a run."""
    finish(
        folder, "pretrain", "ace/skipgram", *COMMON, f"data.files={study.text}", f"data.cache={study.out / 'cache'}",
        f"model.dim={DIMENSIONS}", f"run.seed={seed}", f"schedule.epochs={epochs:g}", *overrides, *study.extra,
    )  # fmt: skip


def make_base(study: Study) -> None:
    """Train the vectors that fine-tuning starts from, and write them without their context table, as GloVe's are."""
    if not study.base.exists():
        train(study, study.out / "base", BASE_SEED, min(BASE_EPOCHS, study.epochs))
        capt("convert", study.out / "base", study.base, "--to", "glove")


def train_and_measure(study: Study, start: str, arm: str, seed: int, epochs: float) -> None:
    """Train an arm with a seed and measure it on every set of word pairs."""
    folder = study.run(start, arm, seed)
    init = [f"model.init={study.base}", *FINE_TUNING] if start == "fine-tuned" else []
    train(study, folder, seed, epochs, *init, *ARMS[EQUAL_TIME.get(arm, arm)])
    if not (folder / "similarity.json").exists():
        measure(study, folder, folder / "similarity.json")


def measure(study: Study, vectors: Path, out: Path) -> None:
    """Word similarity of a run or a file."""
    part = out.with_suffix(".part")
    capt("evaluate", vectors, "--word-similarity", study.data / "wordsim", "--out", part)
    part.rename(out)


def epochs_of_equal_time(study: Study, start: str, seed: int) -> dict[str, float]:
    """Epochs of every arm of `EQUAL_TIME` that take as long as `REFERENCE`, by the runs of ``seed``."""
    note = study.out / start / "compute.json"
    if not note.exists():
        speed = {arm: usual(study.run(start, arm, seed), "words_per_second") for arm in ARMS}
        epochs = {arm: round(study.epochs * speed[like] / speed[REFERENCE], 2) for arm, like in EQUAL_TIME.items()}
        note.write_text(json.dumps({"words_per_second": speed, "epochs": epochs}, indent=1) + "\n")
    return {arm: float(epochs) for arm, epochs in json.loads(note.read_text())["epochs"].items()}


def trials_of(study: Study, start: str, arm: str, seed: int) -> list[Trial]:
    """Results of a finished run: a trial for each set."""
    folder = study.run(start, arm, seed)
    rows = rows_of(folder)
    words = max(row.get("tokens", 0) for row in rows)
    sets = json.loads((folder / "similarity.json").read_text())["word_similarity"]
    return [
        Trial(
            start, arm, seed, name, each["pairs"], each["covered"], each["drop"], each["zero"], words,
            round(usual(folder, "words_per_second")),
        )
        for name, each in sets.items()
    ]  # fmt: skip


def main() -> int:
    """Make the text, train, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5, help="the last seed")
    parser.add_argument("--first-seed", type=int, default=1, help="share the seeds out over machines or evenings")
    parser.add_argument("--starts", nargs="*", default=list(STARTS), choices=STARTS)
    parser.add_argument("--arms", nargs="*", default=[*ARMS, *EQUAL_TIME], choices=[*ARMS, *EQUAL_TIME])
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--epochs", type=float, default=EPOCHS, help="passes over the text, of arms of equal words")
    parser.add_argument("--books", nargs="*", default=[f"books.train.0{i}.txt.gz" for i in range(3)])
    parser.add_argument("--extra", nargs="*", default=[], help="a.b=c for every run")
    options = parser.parse_args()
    data = real_data(parser, "corpus", "wordsim")
    out = options.out.resolve()
    study = Study(out, data, options.books, options.epochs, options.extra)
    study.out.mkdir(parents=True, exist_ok=True)
    make_text(study)
    seeds = range(options.first_seed, options.seeds + 1)

    def job(start: str, arm: str, seed: int, epochs: float) -> Callable[[], None]:
        return lambda: train_and_measure(study, start, arm, seed, epochs)

    if "fine-tuned" in options.starts:
        make_base(study)
        if not (study.out / "base.json").exists():
            measure(study, study.base, study.out / "base.json")
    equal_words, equal_time = ([arm for arm in options.arms if arm in of] for of in (ARMS, EQUAL_TIME))
    for start in options.starts:  # arms run side by side: the runs of the first seed measure the time
        together((job(start, arm, seed, study.epochs) for seed in seeds for arm in equal_words), options.parallel)
        if equal_time:
            epochs = epochs_of_equal_time(study, start, options.first_seed)
            together((job(start, arm, seed, epochs[arm]) for seed in seeds for arm in equal_time), options.parallel)
    arms = options.arms
    trials = [
        trial
        for start in options.starts for arm in arms for seed in seeds for trial in trials_of(study, start, arm, seed)
    ]  # fmt: skip
    write_trials(trials, study.out / "trials.csv")
    write_tables(trials, lambda start, arm, seed: study.run(start, arm, seed), study.data / "wordsim", study.out)
    for start in options.starts:
        runs = [study.run(start, arm, seed) for arm in arms for seed in seeds]
        capt("report", *runs, "--out", study.out / f"report-{start}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

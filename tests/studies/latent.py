"""The study behind docs/results/latent.md: every row of Table 1 by the tightest valid bound.

``CAPT_DATA=... python -m tests.studies.latent --out runs/latent-study`` trains the rows and the language model
of the same size, and evaluates the checkpoint that validation chose on the test text: exact KL, four proposals, the
tightest with its standard error, and annealed importance sampling of some sentences. It writes ``trials.csv``,
``tables.md``, ``sentences.csv`` and a report. Finished runs and evaluations stay as they are, so the same command
continues after an interruption; one of other epochs, draws or sentences is refused and needs an ``--out`` of its own.

``--data ptb`` is the whole PTB (``lm/ptb`` of CAPT_DATA). ``yahoo`` and ``yelp`` are stand-ins, since their training
texts are not public in one place: Yahoo is trained on nine tenths of its validation text, validated on the rest and
evaluated on every fifth document of its test text; Yelp likewise on the short sentences of Shen et al. (2017). All
models are of PTB's size (``ptb/ROW``), and no published figure belongs to the stand-ins. Schedules are squeezed as
docs/results/latent.md says: a quarter of the epochs replaces the 10 of 40 in which beta grows and cycles.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tests.realdata import real_data
from tests.studies.latent_tables import Trial, trial_of, write_sentences, write_tables
from tests.studies.support import capt, finish, same_settings, together, write_trials

ROWS = {
    "VAE": "vae", "beta_0.5 VAE": "beta_vae", "CycVAE": "cyc_vae", "AE": "ae", "iVAE": "ivae", "iVAE_MI": "ivae_mi",
    "clVAE": "clvae", "clVAE_MI": "clvae_mi", "clVAE+": "clvae_plus", "clVAE+_MI": "clvae_plus_mi", "LM": "lstm_lm",
}  # fmt: skip
COMMON = ["run.threads=1", "run.tensorboard=false", "checkpoint.keep=1"]
STANDINS: dict[str, tuple[list[str], list[str], int]] = {
    "yahoo": (["vae/yahoo/yahoo.valid.txt.gz"], ["vae/yahoo/yahoo.test.txt.gz"], 5),
    "yelp": (
        [f"vae/yelp_short/valid.{label}.txt.gz" for label in (0, 1)],
        [f"vae/yelp_short/test.{label}.txt.gz" for label in (0, 1)],
        32,
    ),
}
"""Data set -> texts to train on, texts to evaluate on, and which of these lines are taken: every n-th."""


@dataclasses.dataclass(frozen=True)
class Study:
    """Folders of the study, and how much is trained and drawn. ``extra`` are overrides of every run."""

    out: Path
    data: Path
    epochs: float
    measure: list[str]
    extra: list[str]

    def run(self, name: str, row: str, seed: int) -> Path:
        """The folder of a run."""
        return self.out / name / f"{ROWS[row]}-seed{seed}"

    def text(self, name: str) -> list[str]:
        """The overrides that name the text; a stand-in is written first."""
        if name == "ptb":
            return [f"data.path={self.data / 'lm' / 'ptb'}"]
        folder = self.out / f"{name}like"  # no name of a data set whose published figures would be beside ours
        if not folder.exists():
            write_standin(self.data, name, folder)
        return [f"data.path={folder}", "data.unknown=_UNK"]


def write_standin(data: Path, name: str, folder: Path) -> None:
    """Write the splits of a stand-in: of the source's validation text, every tenth line is the validation text."""
    training, test, every = STANDINS[name]
    partial = folder.with_name(f"{folder.name}.part")
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / "train.txt").open("w") as train, (partial / "valid.txt").open("w") as validation:
        for number, line in enumerate(lines_of(data, training)):
            (train if number % 10 else validation).write(line)
    (partial / "test.txt").write_text("".join(islice(lines_of(data, test), 0, None, every)), encoding="utf-8")
    partial.rename(folder)


def lines_of(data: Path, names: list[str]) -> Iterator[str]:
    """The lines of gzipped texts, one text after the other."""
    for name in names:
        with gzip.open(data / name, "rt", encoding="utf-8") as lines:
            yield from lines


def train_and_measure(study: Study, name: str, row: str, seed: int) -> None:
    """Train a row with a seed, and evaluate the checkpoint that validation chose."""
    folder = study.run(name, row, seed)
    quarter = study.epochs / 4
    finish(
        folder, "pretrain", f"ptb/{ROWS[row]}", *COMMON, *study.text(name), f"run.seed={seed}",
        f"schedule.epochs={study.epochs:g}", f"objective.anneal_epochs={quarter:g}",
        f"objective.cycle_epochs={quarter:g}", *study.extra,
    )  # fmt: skip
    done = folder / "study.json"
    if not done.exists():
        part = folder / "study.part"
        sentences = f"sentences_out={folder / 'sentences.csv'}"
        capt("evaluate", folder, "--generated", "none", "--out", part, "-o", sentences, *study.measure)
        part.rename(done)


def trials_of(study: Study, names: list[str], rows: list[str], seeds: range) -> list[Trial]:
    """Results of the finished runs."""
    return [
        trial_of(name, row, seed, study.epochs, json.loads((study.run(name, row, seed) / "study.json").read_text()))
        for name in names for row in rows for seed in seeds
    ]  # fmt: skip


def main() -> int:
    """Train, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", nargs="*", default=["ptb"], choices=["ptb", *STANDINS])
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--seeds", type=int, default=1, help="the last seed")
    parser.add_argument("--first-seed", type=int, default=1, help="share the seeds out over machines or evenings")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--draws", type=int, default=16, help="draws of reconstruction, exact bound and dual")
    parser.add_argument("--weighted", type=int, default=100, help="draws of each proposal")
    parser.add_argument("--sentences", type=int, help="sentences that are weighted, at most; default all")
    parser.add_argument("--bridge", type=int, default=20, help="sentences of annealed importance sampling")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--extra", nargs="*", default=[], help="a.b=c for every run")
    options = parser.parse_args()
    data = real_data(parser, "lm/ptb", "vae")
    measure = ["--draws", options.draws, "--weighted", options.weighted, "--bridge", options.bridge]
    if options.sentences is not None:
        measure += ["--weighted-sentences", options.sentences]
    out = options.out.resolve()
    study = Study(out, data, options.epochs, [str(word) for word in measure], options.extra)
    same = ("epochs", "draws", "weighted", "sentences", "extra")  # the bridge's sentences are beside each trial
    same_settings(out, {name: getattr(options, name) for name in same})
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of an evaluation, which has no run.threads
    for name in options.data:
        study.text(name)
    seeds = range(options.first_seed, options.seeds + 1)
    jobs = [(name, row, seed) for name in options.data for seed in seeds for row in options.rows]
    together((lambda job=job: train_and_measure(study, *job) for job in jobs), options.parallel)  # type: ignore[misc]
    trials = trials_of(study, options.data, options.rows, seeds)
    write_trials(trials, out / "trials.csv")

    def sentences(name: str, row: str, seed: int) -> Path:
        return study.run(name, row, seed) / "sentences.csv"

    write_tables(trials, sentences, out / "tables.md")
    write_sentences(trials, sentences, out / "sentences.csv")
    capt("report", *(study.run(*job) for job in jobs), "--out", out / "report")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The study behind docs/results/corruption.md: does masking or shuffling make the better view for the contrast?

``CAPT_DATA=... python -m tests.studies.corruption --out runs/corruption-study`` pretrains every arm on books, measures
STS-B without fine-tuning, fine-tunes each run on STS-B and MRPC, and measures the best epoch on dev on the labelled
test sets. After each seed it writes ``trials.csv``, ``pretraining.csv``, ``predictions.npz`` and ``tables.md``. What is
finished is kept, so the same command continues after an interruption.

``mask`` and ``shuffle`` have the contrast, and differ in ``corruption.type`` alone; ``mlm`` has none. ``none`` has
random weights: its run takes one step at a rate of 1e-12, which moves no weight by more than that.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from capt.finetune.glue.evaluate import predict
from capt.finetune.glue.tasks import GLUE
from capt.finetune.metrics import compute_metrics
from tests.realdata import real_data
from tests.runs import validations
from tests.studies.glue_tables import write_tables
from tests.studies.glue_trials import Trial, load, pretraining_of, quoted_examples, save_predictions
from tests.studies.support import capt, finish, same_settings, write_trials

MLM = ("contrast.weight=0", "contrast.queue=0", "contrast.drift=none", "contrast.queue_share=null")
ARMS: Mapping[str, tuple[str, ...]] = {
    "mask": ("corruption.type=mask_tokens",),
    "shuffle": ("corruption.type=shuffle",),
    "mlm": MLM,
    "none": (*MLM, "optimizer.lr=1e-12"),
}
PAIRS = (
    ("mask", "shuffle", "the corruption"),
    ("mask", "mlm", "equal tokens"),
    ("shuffle", "mlm", "equal tokens"),
    ("mask", "none", ""),
    ("mlm", "none", ""),
)
TASKS = ("stsb", "mrpc")
STEPS, EPOCHS, RATE = 250, 2, 2e-4
ONCE = ("run.threads=1", "run.tensorboard=false", "engine.precision=bf16")


@dataclasses.dataclass(frozen=True)
class Study:
    """Folders of the study, and how long the arms are trained."""

    out: Path
    data: Path
    steps: int
    epochs: int

    def run(self, arm: str, seed: int) -> Path:
        """The folder of a pretraining run."""
        return self.out / "pretraining" / f"{arm}-seed{seed}"

    def fine_tuned(self, arm: str, seed: int, task: str) -> Path:
        """The folder of a fine-tuning run."""
        return self.out / "fine-tuning" / f"{task}-{arm}-seed{seed}"


def pretrain(study: Study, arm: str, seed: int) -> None:
    """Pretrain, and measure STS-B by every pooler without fine-tuning."""
    folder, corpus = study.run(arm, seed), study.data / "corpus"
    steps, warmup = (1, 0) if arm == "none" else (study.steps, round(0.12 * study.steps))
    finish(
        folder, "pretrain", "capt_tiny", *ONCE, "run.log_every=10", f"run.seed={seed}",
        f"data.files=[{','.join(map(str, sorted(corpus.glob('books.train.*'))))}]",
        f"data.validation_files=[{corpus / 'books.valid.txt.gz'}]",
        "data.sequence_length=64", "batch.global=64", "batch.micro=64", f"schedule.max_steps={steps}",
        f"schedule.warmup_steps={warmup}", f"validate.every={max(1, steps // 5)}", "validate.samples=512",
        "checkpoint.every=0", "checkpoint.keep=1", *ARMS[arm],
    )  # fmt: skip
    if not (folder / "sts.json").exists():
        part = folder / "sts.json.part"
        capt("evaluate", folder, "--sts", study.data / "glue", "--out", part)
        part.rename(folder / "sts.json")


def fine_tune(study: Study, arm: str, seed: int, task: str) -> None:
    """Fine-tune, and keep the predictions of the best epoch on dev for the test set."""
    folder, glue = study.fine_tuned(arm, seed, task), study.data / "glue"
    finish(
        folder, "finetune", task, *ONCE, f"run.seed={seed}", f"data.path={glue}",
        f"model.init={study.run(arm, seed)}", "batch.global=32", "batch.micro=32", f"schedule.epochs={study.epochs}",
        f"optimizer.lr={RATE}",
    )  # fmt: skip
    if not (folder / "test.npz").exists():
        save_predictions(folder / "test.npz", {task: predict(folder, quoted_examples(task, glue))})


def trial_of(study: Study, arm: str, seed: int, task: str) -> Trial:
    """Results of a measured fine-tuning run."""
    folder, metrics = study.fine_tuned(arm, seed, task), GLUE[task].metrics
    examples = quoted_examples(task, study.data / "glue")
    assert examples.labels is not None, "quoted_examples reads labelled sets"
    scores = compute_metrics(metrics, load(folder / "test.npz")[task].astype(examples.labels.dtype), examples.labels)
    dev = [row[metrics[0]] for row in validations(folder)]
    return Trial(
        task, arm, seed, seed, metrics[0], "test", len(examples), scores[metrics[0]], scores[metrics[1]], max(dev),
        dev[-1], scores["baseline"], int(scores["degenerate"]),
    )  # fmt: skip


def write_results(study: Study, seeds: Sequence[int]) -> None:
    """The files that the page is written from, of the seeds that are finished."""
    pairs = [(arm, seed) for arm in ARMS for seed in seeds]
    trials = [trial_of(study, *pair, task) for pair in pairs for task in TASKS]
    before = [pretraining_of(study.run(*pair), *pair) for pair in pairs]
    predictions = {
        f"{arm}/{task}": np.stack([load(study.fine_tuned(arm, seed, task) / "test.npz")[task][None] for seed in seeds])
        for arm in ARMS
        for task in TASKS
    }
    write_trials(before, study.out / "pretraining.csv")
    write_trials(trials, study.out / "trials.csv")
    save_predictions(study.out / "predictions.npz", predictions)
    write_tables(before, trials, predictions, study.data / "glue", study.out, PAIRS)


def main() -> int:
    """Run what is missing, seed by seed, and write the tables after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5, help="the last seed")
    parser.add_argument("--steps", type=int, default=STEPS, help="of pretraining")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of fine-tuning")
    options = parser.parse_args()
    study = Study(options.out.resolve(), real_data(parser, "corpus", "glue"), options.steps, options.epochs)
    same_settings(study.out, {"steps": study.steps, "epochs": study.epochs})
    for seed in range(1, options.seeds + 1):
        for arm in ARMS:
            pretrain(study, arm, seed)
            for task in TASKS:
                fine_tune(study, arm, seed, task)
        write_results(study, range(1, seed + 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

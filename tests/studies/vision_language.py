"""The study behind docs/results/vision_language.md: CAPT, LXMERT's objectives and no pretraining, five seeds each.

``python -m tests.studies.vision_language --out runs/vision-language`` makes a synthetic
microworld, pretrains every arm on it, fine-tunes each on two tasks, and measures held-out data. It writes
``trials.csv``, ``tables.md`` and a report with the curves of fine-tuning. Finished runs stay as they are,
so the same command continues after an interruption.

Arms: ``none`` starts fine-tuning from random weights. In ``lxmert`` the contrast has weight 0, in ``capt`` weight 1.
Their steps are equal. ``lxmert-equal-compute`` takes as long as ``capt``: its steps are multiplied by the ratio of the
seconds a step, measured where both ran side by side.

The microworld is synthetic from end to end. The page has a second world, of NLVR v1, which release 0.1.0 measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.studies.seeds import clustered_error
from tests.studies.support import (
    capt,
    finish,
    newest_checkpoint,
    rows_of,
    steps_of_equal_compute,
    together,
    usual,
    write_trials,
)  # fmt: skip
from tests.studies.vision_language_tables import Trial, write_tables

ARMS = ("none", "lxmert", "lxmert-equal-compute", "capt")
SCENES = ["--pictures", "8000", "--seed", "1"]
"""Options of ``capt regions microworld``."""
COMMON = ["run.threads=1", "run.tensorboard=false", "run.log_every=10", "checkpoint.keep=1"]
STEPS, WARMUP = 1500, 200
"""Steps of pretraining, for ``lxmert`` and ``capt``."""
SIZES = ["size=micro", "initializer_range=0.12", "dropout=0", "attention_dropout=0"]
"""Overrides of the model in every arm."""
EXACT = ["model.dropout=0", "model.attention_dropout=0"]
"""Overrides of fine-tuning on the microworld, whose labels are exact and whose pictures are many."""
CAPT = ["contrast.weight=1", "contrast.queue=512", "contrast.queue_start=500"]
LXMERT = ["contrast.weight=0", "contrast.queue=0"]
FINE_TUNING: dict[str, list[str]] = {
    "vqa": ["optimizer.lr=5e-4", "schedule.epochs=2", "data.sequence_length=24", *EXACT],
    "nlvr2": ["optimizer.lr=5e-4", "schedule.epochs=3", "data.sequence_length=24", *EXACT],
}
WORLD = "microworld"
"""The name of the world in tables and folders."""


@dataclasses.dataclass(frozen=True)
class Study:
    """Folders of the study, and what is run. ``extra`` are overrides of every pretraining job."""

    out: Path
    steps: int
    warmup: int
    scenes: list[str]
    pretraining: list[str]
    fine_tuning: list[str]

    @property
    def world(self) -> Path:
        """The files of the microworld."""
        return self.out / "world"

    @property
    def store(self) -> Path:
        """The region store."""
        return self.out / f"store-{WORLD}"

    def run(self, arm: str, seed: int, task: str = "pretraining") -> Path:
        """The folder of a run."""
        return self.out / WORLD / f"{task}-{arm}-seed{seed}"

    def files(self, task: str, split: str) -> list[Path]:
        """The data files of a split of a task; ``pretraining`` is a task."""
        if task == "vqa":
            return [self.world / f"vqa/{split}_{part}.json" for part in ("questions", "annotations")]
        return [self.world / f"{task}/{split}.json"]


def listed(paths: Iterable[Path]) -> str:
    """Paths as a list of the command line."""
    return f"[{','.join(map(str, paths))}]"


def make_world(study: Study) -> None:
    """Make the microworld and its store; what is there stays."""
    if not study.world.exists():
        capt("regions", "microworld", "--out", study.world, *study.scenes)
    if not study.store.exists():
        tables = sorted(study.world.glob("pictures/*.tsv")) + sorted(study.world.glob("nlvr2/*.tsv"))
        capt("regions", "import", *tables, "--out", study.store)


def pretrain(study: Study, arm: str, seed: int, steps: int) -> None:
    """Pretrain an arm."""
    warmup = round(study.warmup * steps / study.steps)
    finish(
        study.run(arm, seed), "pretrain", "capt_vl_microworld", *COMMON, "batch.micro=256", f"run.seed={seed}",
        *(f"model.{size}" for size in SIZES),
        f"data.regions={study.store}", f"data.train={listed(study.files('pretraining', 'train'))}",
        f"data.validation={listed(study.files('pretraining', 'validation'))}",
        f"schedule.max_steps={steps}", f"schedule.warmup_steps={warmup}", f"validate.every={steps}",
        "checkpoint.every=0", *(CAPT if arm == "capt" else LXMERT), *study.pretraining,
    )  # fmt: skip


def fine_tune(study: Study, arm: str, seed: int, task: str) -> None:
    """Fine-tune an arm on a task and measure its best checkpoint on held-out data."""
    folder = study.run(arm, seed, task)
    tokenizer = newest_checkpoint(study.run("capt", seed)) / "tokenizer"
    init = [f"model.init={study.run(arm, seed)}"]
    if arm == "none":  # the same tokenizer and sizes as the other arms
        init = [
            "model.init=scratch",
            *(f"model.encoder.{size}" for size in SIZES),
            "model.encoder.max_positions=64",
            f"tokenizer.path={tokenizer}",
        ]
    validation = f"data.validation={listed(study.files(task, 'validation'))}"
    finish(
        folder, "finetune", task, *COMMON, *FINE_TUNING[task], *init, f"run.seed={seed}",
        f"data.regions={study.store}", f"data.train={listed(study.files(task, 'train'))}", validation,
        *study.fine_tuning,
    )  # fmt: skip
    if not (folder / "test.json").exists():
        data = [word for path in study.files(task, "test") for word in ("--data", path)]
        predictions = folder / f"predictions.{'json' if task == 'vqa' else 'csv'}"
        capt("evaluate", folder, *data, "--predictions", predictions, "--out", folder / "test.json.part")
        (folder / "test.json.part").rename(folder / "test.json")


def trial(study: Study, arm: str, seed: int, task: str) -> Trial:
    """Results of a finished trial."""
    folder = study.run(arm, seed, task)
    measured: dict[str, Any] = json.loads((folder / "test.json").read_text())
    before = study.run(arm, seed)
    rows = [] if arm == "none" else rows_of(before)
    steps = max((row["step"] for row in rows), default=0)
    seconds = usual(before, "seconds_per_step") * steps if rows else 0.0
    own = rows_of(folder)
    validation = max(row["accuracy"] for row in own if row.get("split") == "validation")
    metrics = measured["metrics"]
    return Trial(
        WORLD, task, arm, seed, steps, round(seconds, 1), validation, metrics["accuracy"],
        error_over_sentences(study, task, folder), metrics.get("consistency"),
        metrics["baseline"], sum(measured["rows"].values()),
    )  # fmt: skip


def error_over_sentences(study: Study, task: str, run: Path) -> float | None:
    """The standard error of the test accuracy, the rows of a sentence being one group; None for VQA."""
    if task == "vqa":
        return None
    (file,) = study.files(task, "test")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    truth = {str(row["identifier"]): str(row["label"]).lower() for row in rows}
    correct: dict[str, list[float]] = {}
    for line in (run / "predictions.csv").read_text().splitlines():
        identifier, answer = line.split(",")
        group = "-".join(identifier.split("-")[:2])
        correct.setdefault(group, []).append(float(answer.lower() == truth[identifier]))
    return clustered_error(correct)


def main() -> int:
    """Make the worlds, train, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5, help="the last seed")
    parser.add_argument("--first-seed", type=int, default=1, help="share the seeds out over machines or evenings")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    parser.add_argument("--tasks", nargs="*", default=list(FINE_TUNING), choices=FINE_TUNING)
    parser.add_argument("--steps", type=int, default=STEPS, help="of pretraining")
    parser.add_argument(
        "--equal-compute", type=int, help="steps of lxmert-equal-compute (by the seconds a step of the first seed)"
    )
    parser.add_argument("--warmup", type=int, default=WARMUP)
    parser.add_argument("--scenes", default=" ".join(SCENES), help="options of capt regions microworld")
    parser.add_argument("--pretraining", nargs="*", default=[], help="a.b=c for every pretraining run")
    parser.add_argument("--fine-tuning", nargs="*", default=[], help="a.b=c for every fine-tuning run")
    options = parser.parse_args()
    study = Study(
        options.out.resolve(), options.steps, options.warmup, options.scenes.split(), options.pretraining,
        options.fine_tuning,
    )  # fmt: skip
    study.out.mkdir(parents=True, exist_ok=True)
    make_world(study)
    seeds = range(options.first_seed, options.seeds + 1)

    def pretraining(arm: str, seed: int, steps: int) -> Callable[[], None]:
        return lambda: pretrain(study, arm, seed, steps)

    def fine_tuning(arm: str, seed: int, task: str) -> Callable[[], None]:
        return lambda: fine_tune(study, arm, seed, task)

    # The first two runs are side by side: they measure the compute.
    first = [arm for arm in ("capt", "lxmert") if arm in options.arms]
    together((pretraining(arm, seed, study.steps) for seed in seeds for arm in first), options.parallel)
    if "lxmert-equal-compute" in options.arms:
        steps = options.equal_compute or steps_of_equal_compute(
            study.out / WORLD / "compute.json", study.steps,
            {arm: study.run(arm, options.first_seed) for arm in ("capt", "lxmert")},
        )  # fmt: skip
        together((pretraining("lxmert-equal-compute", seed, steps) for seed in seeds), options.parallel)
    each = [(arm, seed, task) for task in options.tasks for seed in seeds for arm in options.arms]
    together((fine_tuning(*which) for which in each), options.parallel)
    trials = [trial(study, arm, seed, task) for task in options.tasks for arm in options.arms for seed in seeds]
    write_trials(trials, study.out / "trials.csv")
    write_tables(trials, study.out / "tables.md")
    capt("report", *(study.run(*which) for which in each), "--out", study.out / f"report-{WORLD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The study behind docs/results/vision_language.md: CAPT, LXMERT's objectives and no pretraining, five seeds each.

``CAPT_DATA=... python -m tests.benchmarks.study_vision_language --out runs/vision-language`` makes a synthetic
microworld, pretrains every arm on it, fine-tunes each on three tasks, and measures held-out data. It writes
``trials.csv``, ``tables.md`` and a report of each world with the curves of fine-tuning. Finished runs stay as they are,
so the same command goes on after an interruption.

Arms: ``none`` starts fine-tuning from random weights. In ``lxmert`` the contrast has weight 0, in ``capt`` weight 1.
Both do as many steps. ``lxmert-equal-compute`` takes as long as ``capt``: its steps are multiplied by the ratio of the
seconds a step, measured where both ran side by side.

Worlds: ``microworld`` is synthetic from end to end. In ``nlvr1`` pretraining is on synthetic scenes, and the task is
NLVR v1: sentences that people wrote, fine-tuned on dev.json (a tenth of it, by stem, held back for selection), measured
on hidden.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.benchmarks.seeds import clustered_error
from tests.benchmarks.studies import (
    capt,
    finish,
    newest_checkpoint,
    rows_of,
    steps_of_equal_compute,
    together,
    usual,
    write_trials,
)  # fmt: skip
from tests.benchmarks.study_vision_language_tables import Trial, write_tables

ARMS = ("none", "lxmert", "lxmert-equal-compute", "capt")
SCENES = ["--pictures", "8000", "--nlvr1", "16000", "--seed", "1"]
"""Of the microworld: pictures of all splits, and statements of NLVR v1's kind for training (four scenes each)."""
COMMON = ["run.threads=1", "run.tensorboard=false", "run.log_every=10", "checkpoint.keep=1"]
STEPS, WARMUP = {"microworld": 1500, "nlvr1": 5000}, 200
"""Of pretraining, for ``lxmert`` and ``capt``; ``--steps`` replaces the first in both worlds."""
SIZES = ["size=micro", "initializer_range=0.12", "dropout=0", "attention_dropout=0"]
"""Of the model in every arm."""
EXACT = ["model.dropout=0", "model.attention_dropout=0"]
"""Of fine-tuning on the microworld, whose labels are exact and whose pictures are many."""
PRETRAINING: dict[str, list[str]] = {
    "microworld": ["capt_vl_microworld", "batch.micro=256"],
    "nlvr1": ["capt_vl_nlvr1", "batch.micro=64"],
}
CAPT = ["contrast.weight=1", "contrast.queue=512", "contrast.queue_start=500"]
LXMERT = ["contrast.weight=0", "contrast.queue=0"]
FINE_TUNING: dict[str, list[str]] = {
    "vqa": ["optimizer.lr=5e-4", "schedule.epochs=2", "data.sequence_length=24", *EXACT],
    "nlvr2": ["optimizer.lr=5e-4", "schedule.epochs=3", "data.sequence_length=24", *EXACT],
    "nlvr1": [],
}
TASKS = {"microworld": ("vqa", "nlvr2"), "nlvr1": ("nlvr1",)}


@dataclasses.dataclass(frozen=True)
class Study:
    """Where everything is, and what is run. ``extra`` are overrides of every pretraining job."""

    out: Path
    data: Path
    steps: dict[str, int]
    warmup: int
    scenes: list[str]
    pretraining: list[str]
    fine_tuning: list[str]

    @property
    def world(self) -> Path:
        """The files of the microworld."""
        return self.out / "world"

    def store(self, world: str) -> Path:
        """The region store of a world."""
        return self.out / f"store-{world}"

    def run(self, world: str, arm: str, seed: int, task: str = "pretraining") -> Path:
        """The folder of a run."""
        return self.out / world / f"{task}-{arm}-seed{seed}"

    def files(self, world: str, task: str, split: str) -> list[Path]:
        """The data files of a split of a task; ``pretraining`` is a task."""
        if world == "nlvr1":
            real = {"train": "dev.json", "test": "hidden.json"}
            return [self.world / f"nlvr1/{split}.json" if task == "pretraining" else self.nlvr1 / real[split]]
        if task == "vqa":
            return [self.world / f"vqa/{split}_{part}.json" for part in ("questions", "annotations")]
        return [self.world / f"{task}/{split}.json"]

    @property
    def nlvr1(self) -> Path:
        """The folder with the sentences that people wrote."""
        return self.data / "vl/nlvr1"


def listed(paths: Iterable[Path]) -> str:
    """Paths as a list of the command line."""
    return f"[{','.join(map(str, paths))}]"


def make_worlds(study: Study) -> None:
    """The microworld and both stores; what is there stays."""
    if not study.world.exists():
        capt("regions", "microworld", "--out", study.world, *study.scenes)
    if not study.store("microworld").exists():
        tables = sorted(study.world.glob("pictures/*.tsv")) + sorted(study.world.glob("nlvr2/*.tsv"))
        capt("regions", "import", *tables, "--out", study.store("microworld"))
    if not study.store("nlvr1").exists():
        scenes = [*sorted(study.world.glob("nlvr1/*.json")), study.nlvr1 / "dev.json", study.nlvr1 / "hidden.json"]
        capt("regions", "import", *scenes, "--format", "nlvr1", "--out", study.store("nlvr1"))


def pretrain(study: Study, world: str, arm: str, seed: int, steps: int) -> None:
    """One pretraining run."""
    preset, *overrides = PRETRAINING[world]
    warmup = round(study.warmup * steps / study.steps[world])
    finish(
        study.run(world, arm, seed), "pretrain", preset, *COMMON, *overrides, f"run.seed={seed}",
        *(f"model.{size}" for size in SIZES),
        f"data.regions={study.store(world)}", f"data.train={listed(study.files(world, 'pretraining', 'train'))}",
        f"data.validation={listed(study.files(world, 'pretraining', 'validation'))}",
        f"schedule.max_steps={steps}", f"schedule.warmup_steps={warmup}", f"validate.every={steps}",
        "checkpoint.every=0", *(CAPT if arm == "capt" else LXMERT), *study.pretraining,
    )  # fmt: skip


def fine_tune(study: Study, world: str, arm: str, seed: int, task: str) -> None:
    """Fine-tune an arm on a task and measure its best checkpoint on held-out data."""
    folder = study.run(world, arm, seed, task)
    tokenizer = newest_checkpoint(study.run(world, "capt", seed)) / "tokenizer"
    init = [f"model.init={study.run(world, arm, seed)}"]
    if arm == "none":  # the same tokenizer and sizes as the other arms
        init = [
            "model.init=scratch",
            *(f"model.encoder.{size}" for size in SIZES),
            "model.encoder.max_positions=64",
            f"tokenizer.path={tokenizer}",
        ]
    if world == "nlvr1":
        validation = "data.validation_share=0.1"
    else:
        validation = f"data.validation={listed(study.files(world, task, 'validation'))}"
    finish(
        folder, "finetune", task, *COMMON, *FINE_TUNING[task], *init, f"run.seed={seed}",
        f"data.regions={study.store(world)}", f"data.train={listed(study.files(world, task, 'train'))}", validation,
        *study.fine_tuning,
    )  # fmt: skip
    if not (folder / "test.json").exists():
        data = [word for path in study.files(world, task, "test") for word in ("--data", path)]
        predictions = folder / f"predictions.{'json' if task == 'vqa' else 'csv'}"
        capt("evaluate", folder, *data, "--predictions", predictions, "--out", folder / "test.json.part")
        (folder / "test.json.part").rename(folder / "test.json")


def trial(study: Study, world: str, arm: str, seed: int, task: str) -> Trial:
    """What is known of a finished trial."""
    folder = study.run(world, arm, seed, task)
    measured: dict[str, Any] = json.loads((folder / "test.json").read_text())
    before = study.run(world, arm, seed)
    rows = [] if arm == "none" else rows_of(before)
    steps = max((row["step"] for row in rows), default=0)
    seconds = usual(before, "seconds_per_step") * steps if rows else 0.0
    own = rows_of(folder)
    validation = max(row["accuracy"] for row in own if row.get("split") == "validation")
    metrics = measured["metrics"]
    return Trial(
        world, task, arm, seed, steps, round(seconds, 1), validation, metrics["accuracy"],
        error_over_sentences(study, world, task, folder), metrics.get("consistency"),
        metrics["baseline"], sum(measured["rows"].values()),
    )  # fmt: skip


def error_over_sentences(study: Study, world: str, task: str, run: Path) -> float | None:
    """The standard error of the test accuracy, the rows of a sentence being one group; None for VQA."""
    if task == "vqa":
        return None
    (file,) = study.files(world, task, "test")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    truth = {str(row["identifier"]): str(row["label"]).lower() for row in rows}
    correct: dict[str, list[float]] = {}
    for line in (run / "predictions.csv").read_text().splitlines():
        identifier, answer = line.split(",")
        group = "-".join(identifier.split("-")[: 1 if task == "nlvr1" else 2])
        correct.setdefault(group, []).append(float(answer.lower() == truth[identifier]))
    return clustered_error(correct)


def main() -> int:
    """Make the worlds, train, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5, help="the last seed")
    parser.add_argument("--first-seed", type=int, default=1, help="share the seeds out over machines or evenings")
    parser.add_argument("--worlds", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--steps", type=int, help="of pretraining (default: as in the study)")
    parser.add_argument("--warmup", type=int, default=WARMUP)
    parser.add_argument("--scenes", default=" ".join(SCENES), help="options of capt regions microworld")
    parser.add_argument("--pretraining", nargs="*", default=[], help="a.b=c for every pretraining run")
    parser.add_argument("--fine-tuning", nargs="*", default=[], help="a.b=c for every fine-tuning run")
    options = parser.parse_args()
    if "CAPT_DATA" not in os.environ:
        parser.error("CAPT_DATA must name the folder with vl/nlvr1")
    study = Study(
        options.out.resolve(), Path(os.environ["CAPT_DATA"]),
        {world: options.steps or steps for world, steps in STEPS.items()}, options.warmup, options.scenes.split(),
        options.pretraining, options.fine_tuning,
    )  # fmt: skip
    study.out.mkdir(parents=True, exist_ok=True)
    make_worlds(study)
    seeds = range(options.first_seed, options.seeds + 1)

    def pretraining(world: str, arm: str, seed: int, steps: int) -> Callable[[], None]:
        return lambda: pretrain(study, world, arm, seed, steps)

    def fine_tuning(world: str, arm: str, seed: int, task: str) -> Callable[[], None]:
        return lambda: fine_tune(study, world, arm, seed, task)

    for world in options.worlds:  # the first two runs stand side by side: they measure the compute
        together(
            (pretraining(world, arm, seed, study.steps[world]) for seed in seeds for arm in ("capt", "lxmert")),
            options.parallel,
        )
        steps = steps_of_equal_compute(
            study.out / world / "compute.json", study.steps[world],
            {arm: study.run(world, arm, options.first_seed) for arm in ("capt", "lxmert")},
        )  # fmt: skip
        together((pretraining(world, "lxmert-equal-compute", seed, steps) for seed in seeds), options.parallel)
        together(
            (fine_tuning(world, arm, seed, task) for task in TASKS[world] for seed in seeds for arm in ARMS),
            options.parallel,
        )
    trials = [
        trial(study, world, arm, seed, task)
        for world in options.worlds for task in TASKS[world] for arm in ARMS for seed in seeds
    ]  # fmt: skip
    write_trials(trials, study.out / "trials.csv")
    write_tables(trials, study.out / "tables.md")
    for world in options.worlds:
        runs = [study.run(world, arm, seed, task) for task in TASKS[world] for arm in ARMS for seed in seeds]
        capt("report", *runs, "--out", study.out / f"report-{world}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

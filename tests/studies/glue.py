"""The study behind docs/results/glue.md: CAPT, MLM alone and random weights under GLUE, three pretraining seeds each.

``CAPT_DATA=... python -m tests.studies.glue --out runs/glue-study`` pretrains every arm on books, fine-tunes
each run by ``capt sweep`` with three seeds a task, measures the quoted checkpoint of each trial, and measures STS-B
without fine-tuning. It writes ``trials.csv``, ``pretraining.csv``, ``curves.csv``, ``predictions.npz``, ``tables.md``
and two plots. Finished runs stay as they are, so the same command continues after an interruption; more seeds or tasks
may be asked for later.

Arms: in ``capt`` the contrast has weight 1, in ``mlm`` weight 0. Both read the same tokens; CAPT encodes each twice, as
it is and corrupted. ``mlm-equal-compute`` takes as long as ``capt``: its steps are multiplied by the ratio of the
seconds a step, measured where both ran side by side. ``none`` has random weights: its run takes one step at a rate of
1e-12, which moves no weight by more than that. ``capt-cls`` (not run unless asked for) is ``capt`` with a contrast of
``<s>``, which fine-tuning reads, in place of the mean of all tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from capt.pretrain.base.files import write_json
from tests.realdata import real_data
from tests.studies.glue_plots import plot_curves, plot_differences
from tests.studies.glue_tables import write_tables
from tests.studies.glue_trials import (
    Sweep,
    collect_predictions,
    curves_of,
    has_predictions,
    predict_trials,
    pretraining_of,
    save_predictions,
    trials_of,
)  # fmt: skip
from tests.studies.support import capt, finish, same_settings, steps_of_equal_compute, together, write_trials

ARMS = ("capt", "mlm", "mlm-equal-compute", "none")
STEPS = 6000
PLAIN = ["contrast.drift=none", "contrast.queue_share=null"]
"""The queue of the paper: neither guard of ``capt_tiny``."""
MLM = ["contrast.weight=0", "contrast.queue=0", *PLAIN]
SHAPE = ["data.sequence_length=128", "batch.global=32", "batch.micro=32", "engine.precision=bf16"]
COMMON = [
    "run.threads=1", "run.tensorboard=false", "run.log_every=20", "checkpoint.every=1000", "checkpoint.keep=1",
    "optimizer.lr=1e-3", "model.pooling=mean",
]  # fmt: skip
RATE = 2e-4
"""The learning rate of fine-tuning, fixed before the runs, the same for all tasks and arms."""
EPOCHS = 5
TASKS = {"cola": "matthews", "mrpc": "accuracy", "stsb": "pearson", "rte": "accuracy", "sst2": "accuracy"}
"""Task -> the metric that is quoted. SST-2 is passed once, with five validations."""


@dataclasses.dataclass(frozen=True)
class Study:
    """Folders of the study, and what is run. The extras are overrides of every pretraining and fine-tuning job."""

    out: Path
    data: Path
    steps: int
    seeds: range
    fine_tuning_seeds: int
    tasks: tuple[str, ...]
    parallel: int
    pretraining: list[str]
    fine_tuning: list[str]

    def run(self, arm: str, seed: int) -> Path:
        """The folder of a pretraining run."""
        return self.out / "pretraining" / f"{arm}-seed{seed}"

    def sweep(self, arm: str, seed: int) -> Sweep:
        """The fine-tuning of a pretraining run."""
        return Sweep(
            self.out / "fine-tuning" / f"{arm}-seed{seed}", arm, seed, self.tasks, self.fine_tuning_seeds,
            self.data / "glue",
        )  # fmt: skip


def pretrain(study: Study, arm: str, seed: int, steps: int) -> None:
    """Pretrain, and measure STS-B by every pooler without fine-tuning."""
    corpus, folder = study.data / "corpus", study.run(arm, seed)
    books = ",".join(str(corpus / f"books.train.0{i}.txt.gz") for i in range(3))
    own = {
        "capt": ["contrast.weight=1", "contrast.queue=256", f"contrast.queue_start={study.steps // 6}", *PLAIN],
        "mlm": MLM,
        "mlm-equal-compute": MLM,
        "none": [*MLM, "optimizer.lr=1e-12"],
    }
    own["capt-cls"] = [*own["capt"], "model.pooling=cls"]
    warmup = 0 if arm == "none" else round(steps / 30)
    finish(
        folder, "pretrain", "capt_tiny", *COMMON, *SHAPE, f"run.seed={seed}", f"data.files=[{books}]",
        f"data.validation_files=[{corpus / 'books.valid.txt.gz'}]", f"schedule.max_steps={steps}",
        f"schedule.warmup_steps={warmup}", f"validate.every={min(500, steps)}", *own[arm], *study.pretraining,
    )  # fmt: skip
    if not (folder / "sts.json").exists():
        part = folder / "sts.json.part"
        capt("evaluate", folder, "--sts", study.data / "glue", "--out", part)
        part.rename(folder / "sts.json")


def fine_tune(study: Study, arm: str, seed: int) -> None:
    """Fine-tune a pretraining run on every task with every seed, and keep the predictions of the quoted checkpoints."""
    sweep = study.sweep(arm, seed)
    if has_predictions(sweep):
        return
    sweep.folder.mkdir(parents=True, exist_ok=True)
    config = sweep.folder / "study.yaml"  # JSON is YAML
    write_json(config, sweep_config(study, arm, seed))
    resume = ["--resume"] if (sweep.folder / "sweep.yaml").exists() or (sweep.folder / "trials").exists() else []
    capt("sweep", config, *study.fine_tuning, *resume)
    predict_trials(sweep)


def sweep_config(study: Study, arm: str, seed: int) -> dict[str, object]:
    """The sweep over all tasks and fine-tuning seeds of one pretraining run."""
    once = {"overrides": {"schedule.epochs": 1, "validate.per_epoch": 5}}
    return {
        "sweep": {
            "dir": str(study.sweep(arm, seed).folder),
            "seeds": list(range(1, study.fine_tuning_seeds + 1)),
        },
        "studies": {
            task: {"base": task, "metric": TASKS[task], **(once if task == "sst2" else {})} for task in study.tasks
        },
        "overrides": {
            "data.path": str(study.data / "glue"),
            "model.init": str(study.run(arm, seed)),
            "batch.global": 32,
            "batch.micro": 32,
            "schedule.epochs": EPOCHS,
            "optimizer.lr": RATE,
            "engine.precision": "bf16",
            "run.threads": 1,
            "run.tensorboard": False,
        },
        "trial": {"concurrent": study.parallel},
        "keep_checkpoints": study.fine_tuning_seeds,
    }


def write_results(study: Study, arms: Sequence[str]) -> None:
    """The files that docs/results/glue.md is written from."""
    pairs = [(arm, seed) for arm in arms for seed in study.seeds]
    before = [pretraining_of(study.run(*pair), *pair) for pair in pairs]
    trials = [trial for pair in pairs for trial in trials_of(study.sweep(*pair))]
    predictions = collect_predictions([study.sweep(*pair) for pair in pairs])
    curves = [point for pair in pairs for point in curves_of(study.sweep(*pair))]
    write_trials(before, study.out / "pretraining.csv")
    write_trials(trials, study.out / "trials.csv")
    write_trials(curves, study.out / "curves.csv")
    save_predictions(study.out / "predictions.npz", predictions)
    differences = write_tables(before, trials, predictions, study.data / "glue", study.out)
    plot_curves(curves, study.out / "curves.png")
    plot_differences(differences, study.out / "differences.png")


def main() -> int:
    """Pretrain, fine-tune, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3, help="the last pretraining seed")
    parser.add_argument("--first-seed", type=int, default=1, help="share the seeds out over machines or evenings")
    parser.add_argument("--fine-tuning-seeds", type=int, default=3, help="for each pretraining run and task")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=[*ARMS, "capt-cls"])
    parser.add_argument("--tasks", nargs="*", default=[task for task in TASKS if task != "sst2"], choices=list(TASKS))
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--steps", type=int, default=STEPS, help="of pretraining, for capt and mlm")
    parser.add_argument("--pretraining", nargs="*", default=[], help="a.b=c for every pretraining run")
    parser.add_argument("--fine-tuning", nargs="*", default=[], help="a.b=c for every fine-tuning run")
    options = parser.parse_args()
    data = real_data(parser, "corpus", "glue")
    if "mlm-equal-compute" in options.arms and not {"capt", "mlm"} <= set(options.arms):
        parser.error("--arms: mlm-equal-compute is measured by capt and mlm; name them too")
    study = Study(
        options.out.resolve(), data, options.steps,
        range(options.first_seed, options.seeds + 1), options.fine_tuning_seeds, tuple(options.tasks),
        options.parallel, options.pretraining, options.fine_tuning,
    )  # fmt: skip
    same_settings(study.out, {"steps": study.steps, "pretraining": study.pretraining, "fine_tuning": study.fine_tuning})

    def pretraining(arm: str, seed: int, steps: int) -> Callable[[], None]:
        return lambda: pretrain(study, arm, seed, steps)

    # capt and mlm run side by side: the runs of the first seed measure the compute
    equal = [arm for arm in ("capt", "mlm", "capt-cls") if arm in options.arms]
    together((pretraining(arm, seed, study.steps) for seed in study.seeds for arm in equal), study.parallel)
    last = {"none": 1}
    if "mlm-equal-compute" in options.arms:
        beside = {arm: study.run(arm, options.first_seed) for arm in ("capt", "mlm")}
        last["mlm-equal-compute"] = steps_of_equal_compute(study.out / "compute.json", study.steps, beside)
    rest = [arm for arm in options.arms if arm in last]
    together((pretraining(arm, seed, last[arm]) for seed in study.seeds for arm in rest), study.parallel)
    for seed in study.seeds:
        for arm in options.arms:
            fine_tune(study, arm, seed)
    write_results(study, options.arms)
    return 0


if __name__ == "__main__":
    sys.exit(main())

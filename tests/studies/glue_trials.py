"""Records of the fine-tuning of the GLUE study: predictions of the quoted checkpoint, trials, curves.

One rule says which figure is quoted: **no figure is quoted on data that selected anything.** MRPC and STS-B have
labelled test sets, so there the checkpoint of the best epoch on dev is measured on test. The other tasks have none: the
checkpoint of the last epoch is measured on dev, which has then selected nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from capt.finetune.glue.files import Examples, read_split
from capt.finetune.glue.tasks import GLUE
from capt.finetune.metrics import compute_metrics
from capt.launcher.sweep.trial_log import remove_checkpoints
from capt.pretrain.data.sts_files import find_sets
from capt.pretrain.report.sweeps import TRIALS, TrialRecord, read_trials
from tests.runs import rows_of
from tests.studies.support import newest_checkpoint, usual

ON_TEST = ("mrpc", "stsb")
"""Tasks that are quoted on test."""
PREDICTIONS = "predictions.npz"
Predictions = dict[str, np.ndarray]
"""``arm/task`` -> [pretraining seeds, fine-tuning seeds, examples]: classes, or scores to three decimals."""


class Sweep(NamedTuple):
    """The fine-tuning of one pretraining run: ``folder`` is that of ``capt sweep``, ``glue`` that of the data."""

    folder: Path
    arm: str
    seed: int
    tasks: tuple[str, ...]
    fine_tuning_seeds: int
    glue: Path

    @property
    def keys(self) -> list[tuple[str, int]]:
        """The task and the fine-tuning seed of every trial."""
        return [(task, seed) for task in self.tasks for seed in range(1, self.fine_tuning_seeds + 1)]


class Pretraining(NamedTuple):
    """A pretraining run. ``sts_*`` are Spearman's rho x 100 on STS-B without fine-tuning; MLM alone has no head."""

    arm: str
    seed: int
    steps: int
    million_tokens: float
    seconds: float
    loss_mlm: float
    sts_dev_cls: float
    sts_dev_mean: float
    sts_dev_head: float | None
    sts_test_cls: float
    sts_test_mean: float
    sts_test_head: float | None


class Trial(NamedTuple):
    """A fine-tuning run. ``score`` is the quoted figure, ``second`` the task's other metric by the same checkpoint.

    ``dev_best`` and ``dev_last`` are the best and the last epoch on dev. ``constant`` is the score of the best constant
    prediction; ``degenerate`` is 1 where the predictions are constant.
    """

    task: str
    arm: str
    seed: int
    fine_tuning_seed: int
    metric: str
    split: str
    rows: int
    score: float
    second: float | None
    dev_best: float
    dev_last: float
    constant: float
    degenerate: int


class Point(NamedTuple):
    """A validation of a fine-tuning run."""

    task: str
    arm: str
    seed: int
    fine_tuning_seed: int
    step: int
    value: float


def quoted_examples(task: str, glue: Path) -> Examples:
    """The labelled examples that a task is quoted on.

    Raises:
        DataError: the files are missing or malformed.
    """
    if task == "stsb":
        (pairs,) = find_sets(glue, ["test"])
        labels = pairs.gold.astype(np.float32)
        return Examples(pairs.first, pairs.second, labels, list(range(len(labels))), "STS-B sts-test")
    if task == "mrpc":
        return mrpc_test(glue / "MRPC/msr_paraphrase_test.txt")
    return read_split(glue, GLUE[task], "dev")


def mrpc_test(path: Path) -> Examples:
    """The original test file with labels: a header, then quality, two numbers and two texts; quotes are just text."""
    header, *lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
    if header.rstrip("\r").split("\t") != ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]:
        raise SystemExit(f"{path}: not the original MRPC test file; its first line is {header[:80]!r}")
    cells = [line.rstrip("\r").split("\t") for line in lines]
    labels = np.array([int(row[0]) for row in cells])
    return Examples([row[3] for row in cells], [row[4] for row in cells], labels, list(range(len(cells))), str(path))


def records_of(sweep: Sweep) -> dict[tuple[str, int], TrialRecord]:
    """The finished trials by task and fine-tuning seed."""
    records = read_trials(sweep.folder / TRIALS)[0].values()
    return {(record.study, record.seed): record for record in records if record.state == "done"}


def has_predictions(sweep: Sweep) -> bool:
    """Return whether every trial of a sweep has been measured."""
    path = sweep.folder / PREDICTIONS
    return path.exists() and {name(*key) for key in sweep.keys} <= load(path).keys()


def predict_trials(sweep: Sweep) -> None:
    """Predict the quoted examples with the quoted checkpoint of every trial; its checkpoints are removed then."""
    from capt.finetune.glue.evaluate import predict

    path, records = sweep.folder / PREDICTIONS, records_of(sweep)
    found = load(path) if path.exists() else {}
    for task in sweep.tasks:
        examples = quoted_examples(task, sweep.glue)
        for seed in range(1, sweep.fine_tuning_seeds + 1):
            if name(task, seed) not in found:
                run = sweep.folder / records[task, seed].run
                predicted = predict(run if task in ON_TEST else newest_checkpoint(run), examples)
                found[name(task, seed)] = predicted.round(3) if task == "stsb" else predicted.astype(np.uint8)
    save_predictions(path, found)
    for key in sweep.keys:
        remove_checkpoints(sweep.folder / records[key].run)


def name(task: str, seed: int) -> str:
    """The key of a trial's predictions."""
    return f"{task}-{seed}"


def load(path: Path) -> Predictions:
    """Read a file of predictions."""
    with np.load(path) as stored:
        return dict(stored)


def save_predictions(path: Path, predictions: Mapping[str, np.ndarray]) -> None:
    """Write a file of predictions, whole or not at all."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **predictions)
    part.rename(path)


def collect_predictions(sweeps: Sequence[Sweep]) -> Predictions:
    """The predictions of all sweeps, by arm and task."""
    by_arm: dict[str, list[np.ndarray]] = {}
    for sweep in sweeps:
        own = load(sweep.folder / PREDICTIONS)
        for task in sweep.tasks:
            seeds = [own[name(task, seed)] for seed in range(1, sweep.fine_tuning_seeds + 1)]
            by_arm.setdefault(f"{sweep.arm}/{task}", []).append(np.stack(seeds))
    return {key: np.stack(runs) for key, runs in by_arm.items()}


def trials_of(sweep: Sweep) -> list[Trial]:
    """The trials of a measured sweep."""
    predictions, trials = load(sweep.folder / PREDICTIONS), []
    for task in sweep.tasks:
        examples, metrics = quoted_examples(task, sweep.glue), GLUE[task].metrics
        assert examples.labels is not None, "quoted_examples reads labelled sets"
        for seed in range(1, sweep.fine_tuning_seeds + 1):
            predicted = predictions[name(task, seed)].astype(examples.labels.dtype)
            scores = compute_metrics(metrics, predicted, examples.labels)
            dev = [point.value for point in _points(sweep, task, seed)]
            trials.append(
                Trial(
                    task, sweep.arm, sweep.seed, seed, metrics[0], "test" if task in ON_TEST else "dev", len(examples),
                    scores[metrics[0]], scores[metrics[1]] if len(metrics) > 1 else None, max(dev), dev[-1],
                    scores["baseline"], int(scores["degenerate"]),
                )
            )  # fmt: skip
    return trials


def curves_of(sweep: Sweep) -> list[Point]:
    """Every validation of every trial."""
    return [point for key in sweep.keys for point in _points(sweep, *key)]


def _points(sweep: Sweep, task: str, seed: int) -> list[Point]:
    record = records_of(sweep)[task, seed]
    rows = [row for row in rows_of(sweep.folder / record.run) if row.get("split") == "validation"]
    return [Point(task, sweep.arm, sweep.seed, seed, row["step"], row[GLUE[task].metric]) for row in rows]


def pretraining_of(run: Path, arm: str, seed: int) -> Pretraining:
    """Results of a finished pretraining run; random weights count as no step."""
    rows = rows_of(run)
    steps = 0 if arm == "none" else max(row["step"] for row in rows)
    tokens = 0 if arm == "none" else max(row.get("tokens", 0) for row in rows)
    loss = [row["loss/mlm"] for row in rows if row.get("split") == "validation"][-1]
    rho: dict[tuple[str, str], float] = {}
    for section in json.loads((run / "sts.json").read_text())["sections"]:
        for pooler, figures in section["poolers"].items():
            rho[section["name"].split()[-1], pooler] = 100 * figures["spearman"]
    by_split = [
        rho[split, pooler] if pooler != "head" else rho.get((split, pooler))
        for split in ("dev", "test")
        for pooler in ("cls", "mean", "head")
    ]
    seconds = round(steps * usual(run, "seconds_per_step"), 1) if steps else 0.0
    return Pretraining(arm, seed, steps, tokens / 1e6, seconds, loss, *by_split)

"""The GLUE study: which checkpoint and which data are quoted, and the tables of made-up trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.finetune.glue.files import Examples
from capt.pretrain.report.sweeps import TrialRecord
from tests.studies.glue_plots import plot_curves, plot_differences
from tests.studies.glue_tables import PAIRS, differences_of, differences_table, scores_table, seeds_table
from tests.studies.glue_trials import (
    Point,
    Sweep,
    Trial,
    collect_predictions,
    has_predictions,
    mrpc_test,
    predict_trials,
    pretraining_of,
    quoted_examples,
    trials_of,
)

MRPC_HEADER = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
TASKS = ("mrpc", "rte")


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    folder = tmp_path / "glue"
    for task in ("RTE", "MRPC"):
        (folder / task).mkdir(parents=True)
    rows = [f"{i}\tone {i}\ttwo\t{'entailment' if i % 2 else 'not_entailment'}" for i in range(6)]
    (folder / "RTE/dev.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + "\n".join(rows) + "\n")
    test = MRPC_HEADER + '1\t7\t8\tHe said "yes.\tYes\r\n0\t9\t10\tNo\tMaybe" \r\n1\t1\t2\tA\tB\r\n'
    (folder / "MRPC/msr_paraphrase_test.txt").write_text(test, newline="")
    return folder


def test_the_original_test_file_is_read_without_quoting(glue: Path) -> None:
    examples = quoted_examples("mrpc", glue)
    assert examples.labels is not None
    assert examples.labels.tolist() == [1, 0, 1]
    assert examples.first[0] == 'He said "yes.'
    assert len(quoted_examples("rte", glue)) == 6
    (glue / "other.txt").write_text("index\tsentence\n0\ta\n")
    with pytest.raises(SystemExit, match="not the original MRPC test file"):
        mrpc_test(glue / "other.txt")


@pytest.fixture
def sweep(tmp_path: Path, glue: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """A finished sweep of two tasks and two seeds; every trial's best epoch is its first."""
    sweep = Sweep(tmp_path / "sweep", "capt", 1, TASKS, 2, glue)
    lines = []
    for task, seed in sweep.keys:
        run = sweep.folder / "trials" / task / f"seed={seed}"
        for step in ("step-10", "step-20"):
            (run / "checkpoints" / step).mkdir(parents=True)
        (run / "checkpoints/best").symlink_to("step-10")
        rows = [
            {"step": 10 * i, "split": "validation", "accuracy": value} for i, value in ((1, 0.75), (2, 0.5 + seed / 10))
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        record = TrialRecord(
            study=task, params={}, seed=seed, state="done", score=0.75, run=str(run.relative_to(sweep.folder))
        )
        lines.append(record.to_json())
    (sweep.folder / "trials.jsonl").write_text("\n".join(lines) + "\n")

    def fake(checkpoint: Path, examples: Examples, **_: Any) -> np.ndarray:
        asked.append(checkpoint)
        return np.ones(len(examples), dtype=np.int64)

    asked: list[Path] = []
    monkeypatch.setattr("capt.finetune.glue.evaluate.predict", fake)
    predict_trials(sweep)
    assert [path.relative_to(sweep.folder / "trials").as_posix() for path in asked] == [
        "mrpc/seed=1", "mrpc/seed=2",  # a run means its best checkpoint on dev: test is quoted
        "rte/seed=1/checkpoints/step-20", "rte/seed=2/checkpoints/step-20",  # dev is quoted: the last one
    ]  # fmt: skip
    return sweep


def test_nothing_is_quoted_on_data_that_selected(sweep: Sweep) -> None:
    assert has_predictions(sweep)
    assert not has_predictions(sweep._replace(fine_tuning_seeds=3)), "more seeds may be asked for later"
    assert not list(sweep.folder.glob("trials/*/*/checkpoints/step-*")), "predictions are kept, checkpoints are not"
    predict_trials(sweep)  # nothing is left to predict: no checkpoint is needed
    trials = {(trial.task, trial.fine_tuning_seed): trial for trial in trials_of(sweep)}
    assert trials["mrpc", 1].split == "test"
    assert trials["mrpc", 1].score == pytest.approx(2 / 3)
    rte = trials["rte", 2]
    assert (rte.split, rte.score, rte.dev_best, rte.dev_last, rte.degenerate) == ("dev", 0.5, 0.75, 0.7, 1)
    assert collect_predictions([sweep, sweep])["capt/rte"].shape == (2, 2, 6)


def trial(arm: str, seed: int, fine_tuning_seed: int, score: float) -> Trial:
    return Trial(
        "rte", arm, seed, fine_tuning_seed, "accuracy", "dev", 6, score, None, 0.9, 0.6, 0.5, int(score == 0.5)
    )


def test_tables(glue: Path, tmp_path: Path) -> None:
    labels = quoted_examples("rte", glue).labels
    assert labels is not None
    correct = {"capt": ((6, 5), (5, 4)), "mlm": ((4, 4), (3, 4))}
    trials, predictions = [], {}
    for arm, runs in correct.items():
        rows = [[np.where(np.arange(6) < hits, labels, 1 - labels) for hits in run] for run in runs]
        predictions[f"{arm}/rte"] = np.array(rows)
        trials += [trial(arm, i + 1, j + 1, hits / 6) for i, run in enumerate(runs) for j, hits in enumerate(run)]
    assert scores_table(trials).splitlines()[-2:] == [
        "| capt | 83.3 ± 11.8 | 83.3 ± 11.8 |",
        "| mlm | 62.5 ± 5.9 (1 constant) | 62.5 ± 5.9 |",
    ]
    assert seeds_table(trials).splitlines()[2] == "| rte | capt | 91.7, 75.0 | 11.8 | 90.0 | 60.0 |"
    one, mean = differences_of(trials, predictions, glue)
    assert (one.first, one.second, mean.task, mean.whole) == ("capt", "mlm", "mean", None)
    assert one.seeds.mean == pytest.approx(100 * (1.5 / 6 + 1 / 6) / 2)
    assert one.whole is not None
    assert one.whole.difference == pytest.approx(one.seeds.mean), "predictions and trials say the same"
    row = differences_table([one]).splitlines()[-1]
    assert row.startswith("| rte | capt - mlm (equal tokens) | +20.8 | ")
    assert row.endswith(" | 2 of 2 | 0.500 |")
    plot_differences([one, mean], tmp_path / "differences.png")
    plot_curves([Point("rte", "capt", 1, 1, step, 0.5) for step in (1, 2)], tmp_path / "curves.png")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("differences.png", "curves.png"))


def test_every_pretraining_is_compared_with_none() -> None:
    assert {(arm, "none") for arm in ("capt", "mlm", "mlm-equal-compute")} <= {pair[:2] for pair in PAIRS}


def test_random_weights_count_as_no_step(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "tokens": 4096, "seconds_per_step": 0.5},
        {"step": 1, "split": "validation", "tokens": 4096, "loss/mlm": 8.3},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    poolers = {"cls": {"spearman": 0.2}, "mean": {"spearman": 0.4}}
    sections = [{"name": f"STS-B {split}", "poolers": poolers} for split in ("dev", "test")]
    (tmp_path / "sts.json").write_text(json.dumps({"sections": sections}))
    none = pretraining_of(tmp_path, "none", 3)
    assert (none.steps, none.million_tokens, none.seconds, none.loss_mlm) == (0, 0, 0, 8.3)
    assert (none.sts_test_mean, none.sts_test_head) == (40, None)
    assert pretraining_of(tmp_path, "mlm", 3).steps == 1

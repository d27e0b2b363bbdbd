"""A figure that is not finite never names the best checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from capt.pretrain.config.load import load_job
from capt.pretrain.engine.callbacks.checkpointer import BestCheckpoint
from capt.pretrain.engine.loop import Run
from capt.pretrain.engine.task import Progress


@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_not_finite_is_never_the_best(mode: str, tmp_path: Path) -> None:
    run = object.__new__(Run)
    run.job = load_job("ptb/vae", ["data.path=ptb", f"checkpoint.best_mode={mode}"])
    run.dir, run.progress = tmp_path, Progress()
    best = BestCheckpoint(run)
    kept = []
    for step, value in enumerate((math.nan, -math.inf, 5.0, math.inf, -math.inf, math.nan, 4.0, 6.0), 1):
        run.progress.step = run.validated_at = step
        run.validation = {"nelbo_iw": value}
        if best.is_improved(run):
            (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
            best.record(run)
            kept.append(value)
    assert kept == ([5.0, 4.0] if mode == "min" else [5.0, 6.0])
    assert json.loads((tmp_path / "best.json").read_text())["value"] == kept[-1]


@pytest.mark.parametrize(
    ("best", "mode", "is_said"), [("nelbo_iw", "max", True), ("nelbo_iw", "min", False), ("au", "max", False)]
)
def test_a_loss_of_which_more_would_be_the_best_is_said(
    best: str, mode: str, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = object.__new__(Run)
    run.job = load_job("ptb/vae", ["data.path=ptb", f"checkpoint.best={best}", f"checkpoint.best_mode={mode}"])
    run.dir, run.progress = tmp_path, Progress()
    BestCheckpoint(run)
    assert (
        f"checkpoint.best={best} keeps the worst checkpoint: set checkpoint.best_mode=min" in caplog.text
    ) == is_said

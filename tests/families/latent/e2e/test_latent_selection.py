"""The best checkpoint where the critics learn too fast, through the command line on a few sentences."""

from __future__ import annotations

import json
import os
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NoReturn

import pytest

from tests.latent import write_text
from tests.runs import validations
from tests.support import run_capt

STEPS, EVERY = 120, 20


def _refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def _json(path: Path) -> Any:
    return json.loads(path.read_text(), parse_constant=_refuse)


def _train(folder: Path, lr: str) -> CompletedProcess[str]:
    """``capt pretrain ptb/clvae`` in small with this ``critic.lr``; every JSON file of the run is read strictly."""
    write_text(folder)
    small = [
        f"data.path={folder}", f"run.dir={folder / 'run'}", "model.embedding=12", "model.hidden=16", "model.latent=4",
        "model.noise=4", "critic.hidden=32", "run.tensorboard=false", "run.log_every=1", "schedule.epochs=null",
        f"schedule.max_steps={STEPS}", "validate.per_epoch=null", f"validate.every={EVERY}", "engine.precision=fp32",
        "batch.global=8", "batch.micro=8", "run.threads=1", "optimizer.lr=0.01", f"critic.lr={lr}",
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_capt("pretrain", "ptb/clvae", *small, cwd=folder, env=env)
    for path in (folder / "run").glob("*.json"):
        _json(path)
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=_refuse)
    return done


def test_a_broken_estimate_chooses_nothing(tmp_path: Path) -> None:
    """At 1e-3 the dual estimate falls far below any entropy of this text; the bound chooses another step."""
    done = _train(tmp_path, "1e-3")
    assert done.returncode == 0, done.stderr
    rows, best = validations(tmp_path / "run"), _json(tmp_path / "run" / "best.json")
    chosen = min(rows, key=lambda row: row["nelbo_iw"])
    assert (best["metric"], best["step"], best["value"]) == ("nelbo_iw", chosen["step"], chosen["nelbo_iw"])
    assert min(rows, key=lambda row: row["nelbo_dual"])["step"] != best["step"]
    assert _json(tmp_path / "run" / "status.json")["state"] == "done"


@pytest.mark.parametrize(("lr", "cause"), [("3e-1", "critic.clamp=20"), ("1e30", "gradient is no longer a number")])
def test_a_critic_that_diverges_ends_the_run_and_says_so(lr: str, cause: str, tmp_path: Path) -> None:
    done = _train(tmp_path, lr)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    said = done.stderr.splitlines()[-1]  # of all lines the one that matters
    assert "the critics have diverged" in said
    for part in (cause, f"critic.lr={float(lr):g}", "start again with a lower one"):
        assert part in said
    status = _json(tmp_path / "run" / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert "the critics have diverged" in status["reason"]
    assert status["step"] < STEPS
    for row in validations(tmp_path / "run"):
        assert row["nelbo_dual"] is not None

"""Sweeps on a Ray cluster of their own: grid and seeds, death of the driver, resumption, signals, refusals."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.sweep.support import Folder, wait_for

pytestmark = pytest.mark.timeout(240)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_driver_that_is_killed_and_one_that_is_asked_to_stop(folder: Folder) -> None:
    folder.sweep()
    driver = folder.start("pace=0.4")
    wait_for(lambda: len(folder.lines()) >= 2 and in_the_middle(folder))
    driver.kill()
    driver.communicate()
    over = {line["run"] for line in folder.lines()}
    pids = [start["pid"] for starts in folder.starts().values() for start in starts]
    wait_for(lambda: not any(map(alive, pids)), 20)
    assert "already holds a sweep; continue it with --resume" in folder.run("pace=0.4", code=2)
    # as if the driver had died between the end of a trial and its record, in the middle of a line
    text = (folder.out / "trials.jsonl").read_text()
    (folder.out / "trials.jsonl").write_text(text[:-20])

    driver = folder.start("pace=0.4", "--resume")
    wait_for(lambda: any(len(starts) == 2 for starts in folder.starts().values()))
    time.sleep(1)
    driver.send_signal(signal.SIGTERM)
    said = driver.communicate(timeout=60)[1]
    assert driver.returncode == 75, said
    assert "continue with: capt sweep" in said
    assert "4 trials, 0 failed" in folder.run("pace=0.4", "--resume")

    whole = [line for line in (folder.out / "trials.jsonl").read_text().splitlines() if line.endswith("}")]
    lines = {line["run"]: line for line in map(json.loads, whole)}
    scores = {(line["params"]["optimizer.lr"], line["seed"]): line["score"] for line in lines.values()}
    assert scores.keys() == {(lr, seed) for lr in (0.1, 0.01) for seed in (1, 2)}
    assert max(scores, key=scores.__getitem__) == (0.1, 2)
    assert all(line["state"] == "done" and line["best_step"] == 20 for line in lines.values())
    starts = folder.starts()
    assert [len(starts[Path(run).name]) for run in over] == [1] * len(over), "what was over ran again"
    again = [start for found in starts.values() for start in found[1:]]
    assert len(again) >= 2
    assert all(start["resume"][:1] == ["--resume"] for start in again)
    kept = [run for run in lines if list((folder.out / run / "checkpoints").glob("step-*"))]
    assert [lines[run]["score"] for run in kept] == [max(scores.values())], "only the best keeps its checkpoints"
    assert yaml.safe_load((folder.out / "sweep.yaml").read_text())["overrides"] == {"pace": 0.4}


def in_the_middle(folder: Folder) -> bool:
    """A trial has saved a first checkpoint and goes on."""
    return any(
        [path.name for path in f.glob("step-*")] == ["step-00000005"] for f in folder.out.glob("*/*/*/checkpoints")
    )


def test_real_jobs_run_through_the_engine(folder: Folder) -> None:
    """Trials of ``python -m pretrain``, two ranks each, with the command as users start it."""
    job = {
        "task": {"type": "toy"},
        "run": {"tensorboard": False},
        "batch": {"global": 8, "micro": 2},
        "schedule": {"max_steps": 4},
        "validate": {"every": 2},
        "checkpoint": {"every": 2, "keep": 2},
    }
    (folder.path / "job.yaml").write_text(yaml.safe_dump(job))
    studies = {"toy": {"base": "job.yaml", "metric": "loss", "mode": "min"}}
    sweep = {"dir": str(folder.out), "seeds": [1]}
    folder.sweep(studies=studies, sweep=sweep, space={}, trial={"gpus": 0, "workers": 2})
    folder.run(capt=(sys.executable, "-m", "launcher.cli"))
    (line,) = folder.lines()
    assert (line["state"], line["score"], line["attempts"]) == ("done", 1.0, 1)
    run = folder.out / line["run"]
    assert {"rank-0.log", "rank-1.log", "trial.log"} <= {path.name for path in (run / "log").iterdir()}
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    assert (run / "checkpoints" / "best").exists()


@pytest.mark.parametrize(
    ("parts", "arguments", "said"),
    [
        ({"space": {"optimizer.lrr": {"grid": [1]}}}, [], "optimizer.lrr: unknown key; did you mean 'lr'"),
        ({"trial": {"cpus": 10_000, "gpus": 0}}, [], "1 ranks of 10000 cores each do not fit this machine"),
        (
            {"trial": {"workers": 500, "gpus": 0}, "overrides": {"batch.global": 1000, "batch.micro": 2}},
            [],
            "500 ranks",
        ),
        ({}, ["--address", "127.0.0.1:1"], "--address 127.0.0.1:1: cannot be reached"),
        ({}, ["--address", "nonsense"], "give HOST:PORT"),
        ({}, ["overrides_are=wrong"], "overrides_are: unknown key"),
        ({"search": {"type": "gird"}}, [], "search.type: 'gird': input should be 'grid', 'random' or 'optuna'"),
        ({"scheduler": {"type": "hyper"}}, [], "'none', 'asha', 'pbt'"),
    ],
)
def test_refused_within_five_seconds(folder: Folder, parts: dict[str, object], arguments: list[str], said: str) -> None:
    folder.sweep(**parts)
    begin = os.times()
    assert said in folder.run(*arguments, code=2)
    end = os.times()
    used = end.children_user + end.children_system - begin.children_user - begin.children_system
    assert used < 5
    assert not folder.out.exists()

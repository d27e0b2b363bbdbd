"""Searches and schedulers, failures, and several workers, on a cluster that was there before."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support import free_port
from tests.sweep.support import Folder, wait_for

pytestmark = pytest.mark.timeout(240)
RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[dict[str, str], str]]:
    """A head node with two cores and token authentication: environment and address."""
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # sockets have short names only
        token = Path(short) / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "HOME": short,
        }
        address = f"127.0.0.1:{free_port()}"
        head = Folder(Path(tempfile.mkdtemp(dir=short)), env)
        argv = [RAY, "start", "--head", "--block", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=false"]
        argv += [
            "--resources",
            '{"licence": 1}',
            "--node-ip-address=127.0.0.1",
            f"--port={address.rpartition(':')[2]}",
            f"--temp-dir={short}/ray",
        ]
        log = Path(short) / "log"
        with log.open("w") as f:
            process = subprocess.Popen(argv, env=head.env, stdout=f, stderr=f)
        try:
            wait_for(lambda: "Ray runtime started" in log.read_text())
            yield env, address
        finally:
            process.terminate()
            process.wait(timeout=30)


@pytest.fixture
def folder(tmp_path: Path, cluster: tuple[dict[str, str], str]) -> Folder:
    return Folder(tmp_path, *cluster)


@pytest.mark.parametrize("samples", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_random_search_with_failing_trials(folder: Folder, samples: int) -> None:
    space = {"optimizer.lr": {"loguniform": [1e-3, 1.0]}}
    seeds = {"dir": str(folder.out), "seeds": [1, 2, 3]}
    folder.sweep(space=space, sweep=seeds, search={"type": "random", "samples": samples, "seed": 5})
    said = folder.run("fail_seed=2", "flaky_seed=3", "pace=0.01", code=1)
    lines = folder.lines()
    ends = sorted((line["seed"], line["state"], line["attempts"]) for line in lines)
    assert ends == [*[(1, "done", 1)] * samples, *[(2, "failed", 2)] * samples, *[(3, "done", 2)] * samples]
    rates = {line["params"]["optimizer.lr"] for line in lines}
    assert len(rates) == samples
    assert all(1e-3 <= rate <= 1 for rate in rates)
    assert all("the toy breaks" in line["error"] for line in lines if line["state"] == "failed")
    assert f"{samples} failed" in said


@pytest.mark.slow
def test_asha_ends_the_worst_early(folder: Folder) -> None:
    grid = {"optimizer.lr": {"grid": [0.1, 0.09, 1e-4, 1e-5]}}
    folder.sweep(
        space=grid, sweep={"dir": str(folder.out), "seeds": [1, 2]}, scheduler={"type": "asha", "reduction": 2}
    )
    folder.run("pace=0.01", "schedule.max_steps=40")
    states = {line["params"]["optimizer.lr"]: line["state"] for line in folder.lines() if line["seed"] == 1}
    assert len(states) == 4
    assert "done" in (states[0.1], states[0.09])
    assert "pruned" in (states[1e-4], states[1e-5])
    assert all(line["score"] is not None for line in folder.lines())
    others = [(line["params"]["optimizer.lr"], line["state"]) for line in folder.lines() if line["seed"] != 1]
    whole = [rate for rate, state in states.items() if state == "done"]
    assert sorted(others) == sorted([(rate, "done") for rate in whole]), "seeds of a setting share its fate"
    before = folder.starts()
    text = (folder.out / "trials.jsonl").read_text().splitlines()
    (folder.out / "trials.jsonl").write_text("\n".join(text[:-1]) + "\n")  # the last one is missing
    folder.run("pace=0.01", "schedule.max_steps=40", "--resume")
    assert len({line["run"] for line in folder.lines()}) == len(text)
    missing = Path(json.loads(text[-1])["run"]).name
    assert {name: len(s) for name, s in folder.starts().items() if name != missing} == {
        name: len(s) for name, s in before.items() if name != missing
    }


@pytest.mark.slow
def test_optuna_and_resume(folder: Folder) -> None:
    parts = {"space": {"optimizer.lr": {"loguniform": [1e-3, 1.0]}}, "search": {"type": "optuna", "samples": 2}}
    parts["trial"] = {"gpus": 0, "concurrent": 1}
    folder.sweep(**parts)
    folder.run("pace=0.01")
    lines = folder.lines()
    rates = {line["params"]["optimizer.lr"] for line in lines}
    assert (len(lines), len(rates)) == (4, 2)
    folder.sweep(**{**parts, "search": {"type": "optuna", "samples": 3}})
    folder.run("pace=0.01", "--resume")
    assert len(folder.lines()) == 6
    assert rates < {line["params"]["optimizer.lr"] for line in folder.lines()}
    assert all(len(starts) == 1 for starts in folder.starts().values())


@pytest.mark.slow
def test_population_copies_the_best_and_goes_on_without_the_lost(folder: Folder) -> None:
    folder.sweep(
        space={"optimizer.lr": {"loguniform": [1e-4, 1.0]}},
        search={"type": "random", "samples": 3, "seed": 3},
        scheduler={"type": "pbt", "interval": 1, "quantile": 0.34},
    )
    folder.run("pace=0.01", "schedule.max_steps=15", "fail_seed=2", code=1)
    assert [line["state"] for line in folder.lines() if line["seed"] == 2] == ["failed"] * 3
    lines = [line for line in folder.lines() if line["seed"] == 1]
    assert [line["state"] for line in lines] == ["done"] * 3
    began = [json.loads((folder.out / line["run"] / "point.json").read_text())["params"] for line in lines]
    assert [line["params"] for line in lines] != began, "nobody took over from a better member"
    for line in lines:
        job = yaml.safe_load((folder.out / line["run"] / "job.yaml").read_text())
        assert line["params"] == {"optimizer.lr": job["optimizer"]["lr"]}
        assert 1e-4 <= line["params"]["optimizer.lr"] <= 1
        rows = (folder.out / line["run"] / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [5, 10, 15]
    assert len(list(folder.out.glob("trials/toy/*/checkpoints/step-00000015"))) == 1


def test_two_workers_share_a_placement_group(folder: Folder) -> None:
    folder.sweep(
        space={}, trial={"workers": 2, "gpus": 0, "cpus": 0.5, "concurrent": 1, "resources": {"licence": 0.25}}
    )
    folder.env |= {"CAPT_TRAVELLED": "here", "HF_TOKEN": "secret", "RAY_ADDRESS": folder.address[1]}
    folder.address = []
    folder.run("pace=0.01")
    first, second = folder.starts(0), folder.starts(1)
    assert first.keys() == second.keys()
    assert len(first) == 2
    for name in first:
        (a,), (b,) = first[name], second[name]
        assert [a["RANK"], b["RANK"], a["LOCAL_RANK"], b["LOCAL_RANK"], a["WORLD_SIZE"]] == ["0", "1", "0", "1", "2"]
        assert a["MASTER_PORT"] == b["MASTER_PORT"]
        assert [(rank["travelled"], rank["secrets"]) for rank in (a, b)] == [("here", False)] * 2


def test_a_metric_that_nobody_reports(folder: Folder) -> None:
    folder.sweep(trial={"gpus": 0, "concurrent": 1})
    said = folder.run("reports=f1", code=2)
    assert "error: studies.toy.metric: validation reports no 'accuracy'; it reports f1, loss" in said
    assert folder.lines() == []


def test_pretrain_with_the_ray_launcher(folder: Folder) -> None:
    job = {
        "task": {"type": "toy"},
        "run": {"tensorboard": False, "dir": "run"},
        "batch": {"global": 8, "micro": 2},
        "schedule": {"max_steps": 100_000},
        "checkpoint": {"every": 0},
    }
    (folder.path / "job.yaml").write_text(yaml.safe_dump(job))
    argv = [
        sys.executable,
        "-P",
        "-m",
        "capt.launcher.cli",
        "pretrain",
        "job.yaml",
        "--launcher",
        "ray",
        "--nproc",
        "2",
    ]
    env = {**folder.env, "RAY_ADDRESS": folder.address[1]}
    with (folder.path / "log").open("w") as f:
        process = subprocess.Popen(argv, cwd=folder.path, env=env, stdout=f, stderr=f)
    status = folder.path / "run" / "status.json"
    try:
        rows = folder.path / "run" / "metrics.jsonl"  # the first step is made: from here on a stop leaves a checkpoint
        wait_for(lambda: rows.exists() and rows.stat().st_size > 0 and process.poll() is None)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75, (folder.path / "log").read_text()
    finally:
        process.kill()
    assert json.loads(status.read_text())["state"] == "stopped"
    (manifest,) = folder.path.glob("run/checkpoints/step-*/manifest.json")
    assert json.loads(manifest.read_text())["world_size"] == 2


def test_what_no_node_can_hold(folder: Folder) -> None:
    folder.sweep(trial={"workers": 3, "gpus": 0}, overrides={"batch": {"global": 6, "micro": 2}})
    assert "3 ranks of 1 core each do not fit the cluster's nodes (2 cores, 1 licence)" in folder.run(code=2)

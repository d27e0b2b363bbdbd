"""Sweeps on a Ray cluster of their own: grid and seeds, death of the driver, resumption, signals, refusals."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from capt.pretrain.registry import TASKS
from tests.support import Capt
from tests.sweep.support import Folder, wait_for

pytestmark = pytest.mark.timeout(240)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


SECRETS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN", "HF_TOKEN", "HF_COOKIE",
    "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "COMET_API_KEY", "NEPTUNE_API_TOKEN", "MLFLOW_TRACKING_PASSWORD",
    "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GITHUB_TOKEN", "GH_PAT", "GITLAB_TOKEN", "CI_JOB_TOKEN", "NPM_TOKEN",
    "PYPI_PASSWORD", "TWINE_PASSWORD", "DOCKER_AUTH_CONFIG", "REGISTRY_CREDS", "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS", "GOOGLE_CREDENTIALS", "GCP_PRIVATE_KEY", "KUBE_TOKEN", "VAULT_TOKEN",
    "DB_PASS", "DB_PASSWORD", "PGPASSWORD", "MYSQL_PWD", "REDIS_AUTH", "SMTP_PASSWORD", "SLACK_WEBHOOK", "SLACK_BEARER",
    "SSH_PASSPHRASE", "SESSION_COOKIE", "S3_SECRET",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def places_of(canary: bytes, folder: Folder, since: float) -> list[str]:
    """Command lines, and files of Ray's sessions and of the sweep, that hold a secret."""
    private = Path(tempfile.gettempdir()).glob("capt-ray-*/s/session_2*")
    sessions = [path for path in private if path.stat().st_mtime >= since]
    assert all(path.parents[1].stat().st_mode & 0o777 == 0o700 for path in sessions)
    files = [path for top in (*sessions, folder.out) for path in top.rglob("*")]
    found = []
    for path in (*Path("/proc").glob("[0-9]*/cmdline"), *files):
        try:
            if path.is_file() and not path.is_symlink() and canary in path.read_bytes():
                found.append(str(path))
        except OSError:  # a process that has ended
            continue
    assert any(path.name.startswith("raylet") for path in files), "this is not the session"
    return found


def refused(folder: Folder, monkeypatch: pytest.MonkeyPatch, capt: Capt, *arguments: str) -> str:
    """Error of ``capt sweep sweep.yaml ...``, which is refused in this process."""
    monkeypatch.chdir(folder.path)
    monkeypatch.setitem(TASKS, "sweep_toy", "tests.sweep.toy")
    code, _, err = capt("sweep", "sweep.yaml", *arguments)
    assert code == 2
    return err


@pytest.mark.slow
def test_a_driver_that_is_killed_and_one_that_is_asked_to_stop(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capt: Capt
) -> None:
    """The two runs of the worse rate are at step 5 when the driver is killed, and when it is asked to stop."""
    canary, began = secrets.token_hex(12), time.time()
    folder.env |= dict.fromkeys(SECRETS, canary)
    folder.sweep(trial={"gpus": 0, "concurrent": 2})
    more = ("pace=0.01", folder.hold(0.01))
    driver = folder.start(*more)
    wait_for(lambda: len(folder.lines()) == 2 and len(folder.held()) == 2, 120)
    assert places_of(canary.encode(), folder, began) == []
    assert all(start["secrets"] for start in folder.starts()[Path(folder.lines()[0]["run"]).name]), "of this machine"
    driver.kill()
    driver.communicate()
    over = {line["run"] for line in folder.lines()}
    pids = [start["pid"] for starts in folder.starts().values() for start in starts]
    wait_for(lambda: not any(map(alive, pids)), 20)
    killed = saved(folder)
    assert len(killed) >= 2
    said = refused(folder, monkeypatch, capt, *more)
    assert "already holds a sweep; continue it with --resume" in said
    # as if the driver had died between the end of a trial and its record, in the middle of a line
    text = (folder.out / "trials.jsonl").read_text()
    (folder.out / "trials.jsonl").write_text(text[:-20])

    driver = folder.start(*more, "--resume")
    wait_for(lambda: sum(len(folder.starts()[run.name]) == 2 for run in folder.held()) == 2)
    driver.send_signal(signal.SIGTERM)
    said = driver.communicate(timeout=60)[1]
    assert driver.returncode == 75, said
    assert "continue with: capt sweep" in said
    stopped = saved(folder)
    folder.let_go()
    assert "4 trials, 0 failed" in folder.run(*more, "--resume", "auto")
    assert "is finished: all trials are over" in folder.run(*more, "--resume", "auto")

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
    continued = [start for known in (killed, stopped) for name, n in known.items() for start in starts[name][n:]]
    assert len(continued) >= 2
    assert all(start["resume"][:1] == ["--resume"] for start in continued)
    kept = [run for run in lines if list((folder.out / run / "checkpoints").glob("step-*"))]
    median = min(scores[0.1, seed] for seed in (1, 2))  # of two seeds the worse counts for the setting
    assert [lines[run]["score"] for run in kept] == [median], (
        "only the median of the best setting keeps its checkpoints"
    )
    assert yaml.safe_load((folder.out / "sweep.yaml").read_text())["overrides"]["pace"] == 0.01


def saved(folder: Folder) -> dict[str, int]:
    """The trials that have a whole checkpoint, and how often each was started up to now."""
    manifests = folder.out.glob("trials/*/*/checkpoints/step-*/manifest.json")
    starts = folder.starts()
    return {name: len(starts[name]) for name in {path.parents[2].name for path in manifests}}


def rays_sockets(driver: int) -> set[tuple[str, str]]:
    """Names and addresses of the listening processes of Ray below a driver."""
    found = set()
    with suppress(psutil.Error):
        for process in psutil.Process(driver).children(recursive=True):
            with suppress(psutil.Error):
                name = process.name()
                if name in ("gcs_server", "raylet") or name.startswith("ray::"):
                    sockets = process.net_connections("tcp")
                    found |= {(name, each.laddr.ip) for each in sockets if each.status == psutil.CONN_LISTEN}
    return found


def test_real_jobs_run_through_the_engine(folder: Folder) -> None:
    """Trials of ``python -m capt.pretrain``, two ranks each, with the command as users start it.

    Ray, in which others could have code run, listens on the loopback interface alone.
    """
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
    driver = folder.start(capt=(sys.executable, "-P", "-m", "capt.launcher.cli"))
    heard = set[tuple[str, str]]()
    while driver.poll() is None:
        heard |= rays_sockets(driver.pid)
        time.sleep(0.2)
    said = driver.communicate()
    assert driver.returncode == 0, said
    assert {"gcs_server", "raylet"} <= {name for name, _ in heard}
    assert {address for _, address in heard} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    (line,) = folder.lines()
    run = folder.out / line["run"]
    logs = "".join(path.read_text(errors="replace") for path in sorted((run / "log").iterdir()))
    assert (line["state"], line["score"], line["attempts"]) == ("done", 1.0, 1), logs
    assert {"rank-0.log", "rank-1.log", "trial.log"} <= {path.name for path in (run / "log").iterdir()}
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    assert (run / "checkpoints" / "best").exists()


@pytest.mark.parametrize(
    ("parts", "arguments", "said"),
    [
        ({"space": {"optimizer.lrr": {"grid": [1]}}}, [], "optimizer.lrr: unknown key; did you mean 'lr'"),
        ({"trial": {"cpus": 4_000, "gpus": 0}}, [], "1 rank of 4000 cores each do not fit this machine"),
        (
            {"trial": {"workers": 500, "gpus": 0}, "overrides": {"batch.global": 1000, "batch.micro": 2}},
            [],
            "500 ranks",
        ),
        ({}, ["--address", "127.0.0.1:1"], "'127.0.0.1:1': cannot be reached"),
        ({}, ["--address", "nonsense"], "give HOST:PORT"),
        ({}, ["overrides_are=wrong"], "overrides_are: unknown key"),
        ({"search": {"type": "gird"}}, [], "search.type: 'gird': input should be 'grid', 'random' or 'optuna'"),
        ({"scheduler": {"type": "hyper"}}, [], "'none', 'asha', 'pbt'"),
    ],
)
def test_refused_within_five_seconds(
    folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    capt: Capt,
    parts: dict[str, object],
    arguments: list[str],
    said: str,
) -> None:
    folder.sweep(**parts)
    begin = time.process_time()
    assert said in refused(folder, monkeypatch, capt, *arguments)
    assert time.process_time() - begin < 5
    assert not folder.out.exists()


def test_a_process_of_its_own_refuses_within_five_seconds(folder: Folder) -> None:
    folder.sweep(trial={"cpus": 4_000, "gpus": 0})
    begin = os.times()
    assert "1 rank of 4000 cores each do not fit this machine" in folder.run(code=2)
    end = os.times()
    used = end.children_user + end.children_system - begin.children_user - begin.children_system
    assert used < 5
    assert not folder.out.exists()


@pytest.mark.slow
def test_a_cluster_without_authentication_is_joined_with_a_warning(folder: Folder) -> None:
    """Start one with authentication disabled, and join it from a process of its own."""
    program = """if True:
        import subprocess, sys
        from capt.launcher import raycluster
        with raycluster.cluster(sys.argv[1] if sys.argv[1:] else None):
            import ray
            if not sys.argv[1:]:
                address = ray.get_runtime_context().gcs_address
                subprocess.run([sys.executable, "-P", *sys.orig_argv[2:], address], check=True)
    """
    env = {**folder.env, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has no authentication: all who reach it can run code") == 1

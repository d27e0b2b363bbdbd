"""Callbacks of the user: by entry point, W&B and MLflow; against fakes with the signatures of the real packages."""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain import registry
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.callbacks import user_callbacks
from capt.pretrain.engine.run import run_job
from capt.pretrain.registry import CALLBACKS, TASKS
from tests.runs import rows_of
from tests.support import run_ranks

TASKS["toy"] = "tests.toy"

_RECORD = """
import json, os
def record(name, /, **values):
    with open(os.environ["CAPT_CALLS"], "a") as file:
        file.write(json.dumps([name, values, int(os.environ["RANK"])]) + "\\n")
"""
# As in wandb 0.31.0 and mlflow-skinny 3.17.2, without the parameters that nobody passes.
_WANDB = (
    _RECORD
    + """
class Error(Exception): pass
class Settings:
    def __init__(self, *, console, disable_code, disable_git, x_disable_meta, silent):
        assert console == "off" and disable_code and disable_git and x_disable_meta and silent
class Run:
    def __init__(self, id): self.id = id
    def log(self, data, step=None, commit=None):
        record("log", data=data, step=step)
        if self.id == "fails": raise Error("the server is down")
    def finish(self, exit_code=None):
        record("finish", exit_code=exit_code)
        if self.id == "fails": raise OSError("the server is down")
def init(entity=None, project=None, dir=None, id=None, name=None, config=None, resume=None, settings=None):
    if project == "refused":
        raise Error("no login")
    record("init", entity=entity, project=project, id=id, name=name, config=config, resume=resume)
    return Run("fails" if project == "fails" else id or "w1")
"""
)
_MLFLOW = (
    _RECORD
    + """
from types import SimpleNamespace
class MlflowException(Exception): pass
def set_tracking_uri(uri): record("set_tracking_uri", uri=uri)
def set_experiment(experiment_name=None, experiment_id=None): record("set_experiment", name=experiment_name)
def start_run(run_id=None, experiment_id=None, run_name=None, log_system_metrics=None):
    record("start_run", run_id=run_id, run_name=run_name)
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "m1"))
def log_params(params, synchronous=None, run_id=None): record("log_params", params=params)
def log_metrics(metrics, step=None, synchronous=None): record("log_metrics", metrics=metrics, step=step)
def flush_async_logging(): record("flush")
def end_run(status="FINISHED"): record("end_run", status=status)
"""
)
_THEIRS = (
    _RECORD
    + """
from capt.pretrain.engine.loop import Callback
class Counter(Callback):
    def __init__(self, *, limit=100): self.limit, self.steps = limit, 0
    def after_step(self, run, report):
        self.steps += 1
        if self.steps == self.limit: run.stopping = "limit reached"
    def on_metrics(self, run, values, split): record("theirs", split=split, names=sorted(values))
    def close(self, run): record("closed", steps=self.steps)
"""
)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with the fakes and an installed distribution that brings a callback."""
    folder = tmp_path / "packages"
    (folder / "theirs-1.dist-info").mkdir(parents=True)
    for name, text in (("wandb", _WANDB), ("mlflow", _MLFLOW), ("their_callbacks", _THEIRS)):
        (folder / f"{name}.py").write_text(text)
    (folder / "theirs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    entry = "[capt.callbacks]\ncounter = their_callbacks:Counter\n"
    (folder / "theirs-1.dist-info" / "entry_points.txt").write_text(entry)
    return folder


def _run(folder: Path, packages: Path, callbacks: list[dict[str, Any]]) -> list[int | str]:
    """A run that stops after step 3 and, for each further item of ``callbacks``, is resumed."""
    quiet_libraries(debug=False)
    sys.path.insert(0, str(packages))
    os.environ["CAPT_CALLS"] = str(packages / "calls")
    ends: list[int | str] = []
    for number, settings in enumerate(callbacks):
        mapping = {
            "task": {"type": "toy"},
            "run": {"dir": str(folder / "first"), "log_every": 2, "tensorboard": False, "callbacks": settings},
            "batch": {"global": 8, "micro": 2},
            "schedule": {"max_steps": 6, **({} if number else {"stop_after": 3})},
            "validate": {"every": 0},
            "checkpoint": {"every": 0},
        }
        try:
            ends.append(run_job(job_from_mapping(mapping, "test"), resume=number > 0))
        except ConfigError as error:
            ends.append(str(error))
    return ends


def _calls(packages: Path) -> list[tuple[str, dict[str, Any], int]]:
    return [tuple(json.loads(line)) for line in (packages / "calls").read_text().splitlines()]


def test_trackers_see_every_row_from_rank_0_and_a_resumed_run_goes_on_there(tmp_path: Path, packages: Path) -> None:
    wandb, mlflow = {"project": "capt", "entity": "us"}, {"experiment": "e", "tracking_uri": "file:x", "name": "mine"}
    given = {"wandb": wandb, "mlflow": mlflow, "counter": {}}
    assert run_ranks(_run, 2, tmp_path, packages, [given, given]) == [[75, 0]] * 2
    calls = _calls(packages)
    ours = [(name, values) for name, values, rank in calls if name not in ("theirs", "closed")]
    assert all(rank == 0 for name, _, rank in calls if name not in ("theirs", "closed"))
    first, again = (values for name, values in ours if name == "init")
    assert (first["project"], first["entity"], first["name"]) == ("capt", "us", "first")
    assert (first["id"], first["resume"]) == (None, None)
    assert (again["id"], again["resume"]) == ("w1", "allow")
    assert first["config"]["optimizer.lr"] == 5e-4
    steps = [(values["step"], sorted(values["data"])) for name, values in ours if name == "log"]
    assert [step for step, _ in steps] == [2, 4, 6, 6]
    assert {"loss", "grad_norm", "lr"} <= set(steps[0][1])
    assert steps[-1][1] == ["validation/loss"]
    assert [values["exit_code"] for name, values in ours if name == "finish"] == [0, 0]
    begun = [values for name, values in ours if name == "start_run"]
    assert begun == [{"run_id": None, "run_name": "mine"}, {"run_id": "m1", "run_name": "mine"}]
    (params,) = (values["params"] for name, values in ours if name == "log_params")
    assert params["batch.global"] == 8
    metrics = [(values["step"], values["metrics"]) for name, values in ours if name == "log_metrics"]
    assert [step for step, _ in metrics] == [2, 4, 6, 6]
    rows = rows_of(tmp_path / "first")
    assert [values["loss"] for _, values in metrics[:3]] == [row["loss"] for row in rows[:3]]
    assert [values["status"] for name, values in ours if name == "end_run"] == ["KILLED", "FINISHED"]
    assert json.loads((tmp_path / "first" / "wandb.json").read_text()) == {"id": "w1"}
    theirs = [(values["split"], rank) for name, values, rank in calls if name == "theirs"]
    for rank in (0, 1):
        assert [split for split, r in theirs if r == rank] == [None, None, None, "validation"]
    assert sorted(values["steps"] for name, values, _ in calls if name == "closed") == [3, 3, 3, 3]


def test_a_callback_may_stop_the_run_and_one_refused_leaves_no_rank_waiting(tmp_path: Path, packages: Path) -> None:
    refused, stops = {"wandb": {"project": "refused"}}, {"counter": {"limit": 2}}
    ends = run_ranks(_run, 2, tmp_path, packages, [stops, refused, stops])
    assert ends[0] == ends[1]
    first, second, third = ends[0]
    assert (first, third) == (75, 75)
    assert "run.callbacks.wandb: no login" in str(second)


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path, packages: Path) -> None:
    failing = {"wandb": {"project": "fails"}}
    assert run_ranks(_run, 2, tmp_path, packages, [failing, failing]) == [[75, 0]] * 2
    names = [name for name, *_ in _calls(packages)]
    assert (names.count("log"), names.count("finish")) == (4, 2)
    log = (tmp_path / "first" / "log" / "rank-0.log").read_text()
    assert log.count("run.callbacks.wandb: not sent: Error: the server is down") == 4


@pytest.mark.parametrize(
    ("callbacks", "says"),
    [
        ({"wanbd": {}}, "unknown callback 'wanbd'; did you mean 'wandb'?"),
        ({"wandb": {"project": "p"}}, r"package wandb is not installed; pip install '\.\[track\]'"),
        ({"mlflow": {"experiment": "p"}}, "package mlflow is not installed"),
        ({"wandb": {}}, "missing a required argument: 'project'; it takes project, entity, name"),
        ({"mlflow": {"experiment": "e", "uri": "x"}}, "'uri'; it takes experiment, tracking_uri, name"),
        ({"mlflow": {"experiment": "e", "tracking_uri": "https://me:pw@host"}}, "tracking_uri looks like a secret"),
        ({"mlflow": {"experiment": "e", "api_key": "x:pw@y"}}, "api_key looks like a secret"),
        (
            {"broken": {}},
            "broken: the entry point 'no_such_module:Callback' of capt.callbacks cannot be imported: No module named",
        ),
        (
            {"absent": {}},
            "absent: the entry point 'json:Callback' of capt.callbacks cannot be imported: module 'json' has",
        ),
    ],
)
def test_what_cannot_be_built_is_one_sentence(
    callbacks: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CALLBACKS, "broken", "no_such_module:Callback")
    monkeypatch.setitem(CALLBACKS, "absent", "json:Callback")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    job = job_from_mapping({"task": {"type": "toy"}, "run": {"callbacks": callbacks}}, "test")
    with pytest.raises(ConfigError, match=says) as caught:
        user_callbacks(job)
    assert "\n" not in str(caught.value)
    assert ":pw@" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("their_callbacks:Nothing", "'their_callbacks:Nothing' of capt.callbacks cannot be imported: .*'Nothing'"),
        ("their_callbacks", "must be MODULE:CLASS"),
        ("no_such_module:Counter", "No module named 'no_such_module'"),
        ("their_callbacks:json", "is not a subclass of capt.pretrain.engine.loop.Callback"),
        ("pathlib:Path", "is not a subclass of capt.pretrain.engine.loop.Callback"),
    ],
)
def test_an_entry_point_that_leads_to_no_callback_is_named(
    path: str, says: str, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("CAPT_CALLS", str(packages / "calls"))
    monkeypatch.setitem(registry.CALLBACKS, "theirs", path)
    job = job_from_mapping({"task": {"type": "toy"}, "run": {"callbacks": {"theirs": {}}}}, "test")
    try:
        with pytest.raises(ConfigError, match=says) as caught:
            user_callbacks(job)
        assert "\n" not in str(caught.value)
    finally:
        sys.modules.pop("their_callbacks", None)


def test_the_real_packages_take_what_is_passed() -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed (pip install '.[track]')")
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed (pip install '.[track]')")
    wandb.Settings(console="off", disable_code=True, disable_git=True, x_disable_meta=True, silent=True)
    names = ("project", "entity", "name", "dir", "config", "id", "resume", "settings")
    inspect.signature(wandb.init).bind(**dict.fromkeys(names))
    inspect.signature(mlflow.start_run).bind(run_id=None, run_name="x", log_system_metrics=False)
    inspect.signature(mlflow.log_metrics).bind({}, step=1, synchronous=False)
    assert issubclass(wandb.Error, Exception)
    assert issubclass(mlflow.MlflowException, Exception)

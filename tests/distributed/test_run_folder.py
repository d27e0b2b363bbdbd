"""A job takes its folder before anything is loaded, and whatever ends it leaves a folder that says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain import __main__ as entry
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.locks import file_lock
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.engine import interruption
from capt.pretrain.engine.checkpoint.layout import put_back_replaced, put_in_place, remove_checkpoint, remove_leftovers
from capt.pretrain.engine.run_folder import BAD_INPUT, FAILED, LOCK, STOPPED, read_status
from capt.pretrain.engine.run_status import RunStatus
from tests.distributed.test_run import _mapping, _rows, _run
from tests.fuzz.harness import snapshot
from tests.support import run_ranks


def _fault(kind: str, rank: int = 0) -> dict[str, Any]:
    return {"fault": {"kind": kind, "step": 0, "rank": rank}}


def _run_in_own_folder(mappings: list[dict[str, Any]]) -> int | str:
    """Each rank is told another folder, as where a path is not shared; both are the first of their host."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = "0"
    return _run(mappings[rank])


def _run_installed(mapping: dict[str, Any], resume: bool = False) -> int | str:
    interruption.install(STOPPED)
    try:
        return _run(mapping, resume)
    except interruption.Interrupted as stop:
        return f"Interrupted: {stop}"


def _enter(paths: list[str]) -> int:
    """Each rank is told another path of the merged job, as where one does not see it."""
    entry._FILE_SECONDS = 0.1
    return entry.main([paths[int(os.environ["RANK"])], "--merged", "--resume=auto"])


@pytest.mark.parametrize("begun", [False, True])
def test_ranks_agree_whether_the_run_of_a_folder_that_one_does_not_see_has_begun(tmp_path: Path, begun: bool) -> None:
    """Else the rank that ends first would decide whether the job is tried again."""
    job = job_from_mapping(_mapping(tmp_path / "run"), "test")
    (tmp_path / "run").mkdir()
    (tmp_path / "job.yaml").write_text(job_to_yaml(job))
    if begun:
        (tmp_path / "run" / "config.yaml").write_text(job_to_yaml(job))
    assert run_ranks(_enter, 2, [str(tmp_path / "job.yaml"), "/gone/job.yaml"]) == [FAILED if begun else BAD_INPUT] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_refused_job_leaves_nothing_behind(tmp_path: Path, rank: int) -> None:
    outcomes = run_ranks(_run, 2, _mapping(tmp_path / "runs" / "run", **_fault("refuse", rank)))
    assert outcomes == [f"DataError: rank {rank}: data.files: no text"] * 2
    assert snapshot(tmp_path) == {}


def test_a_refused_job_of_a_launcher_leaves_its_verdict_to_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "launch.json").write_text("{}")
    assert "DataError" in str(run_ranks(_run, 1, _mapping(tmp_path / "run", **_fault("refuse"))))
    assert {"launch.json", "status.json"} <= snapshot(tmp_path / "run").keys()
    status = read_status(tmp_path / "run")
    assert status is not None
    assert (status.state, status.exit_code) == ("failed", BAD_INPUT)
    assert run_ranks(_run, 1, _mapping(tmp_path / "run", batch={"global": 8, "micro": 8})) == [0], "the folder is free"


def test_a_run_that_ended_before_its_first_checkpoint_resumes_at_step_0(tmp_path: Path) -> None:
    mapping = _mapping(tmp_path / "run", batch={"global": 8, "micro": 8})
    assert "a fault of the program" in str(run_ranks(_run, 1, mapping | _fault("crash")))
    status = read_status(tmp_path / "run")
    assert status is not None
    assert (status.state, status.step, status.exit_code) == ("failed", 0, 1)
    assert run_ranks(_run, 1, mapping, True) == [0]
    assert [row["step"] for row in _rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_second_job_is_refused_before_it_loads_anything(tmp_path: Path) -> None:
    """It would crash on loading."""
    with file_lock(tmp_path / "run" / LOCK):
        before = snapshot(tmp_path)
        for resume in (False, True):
            outcomes = run_ranks(_run, 1, _mapping(tmp_path / "run", **_fault("crash")), resume)
            assert "another process is training in this folder" in outcomes[0]
        assert snapshot(tmp_path) == before


def test_ranks_wait_for_each_other_beyond_the_time_limit_of_collectives(tmp_path: Path) -> None:
    """Rank 1 prepares for 1.5 s, the group's collectives wait 1 s."""
    assert run_ranks(_patient, 2, _mapping(tmp_path / "run", **_fault("wait", 1))) == [0, 0]


def _patient(mapping: dict[str, Any]) -> int | str:
    import datetime

    import torch.distributed as dist

    from capt.pretrain.base import distributed

    distributed._control_group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    try:
        return _run(mapping)
    finally:
        distributed._control_group = None


def test_a_folder_that_is_not_shared_is_noticed_before_the_first_step(tmp_path: Path) -> None:
    mappings = [_mapping(tmp_path / name) for name in ("a", "b")]
    (tmp_path / "b").mkdir()
    before = snapshot(tmp_path / "b")
    for outcome in run_ranks(_run_in_own_folder, 2, mappings):
        assert "not shared: what" in outcome
        assert "(rank 0) writes there is not seen on" in outcome
        assert "(rank 1); name a folder" in outcome
    assert not (tmp_path / "a").exists()
    assert snapshot(tmp_path / "b") == before
    assert run_ranks(_run_in_own_folder, 2, [mappings[0], mappings[0]]) == [0, 0]


def test_a_signal_before_the_first_step_ends_the_run_resumably(tmp_path: Path) -> None:
    mapping = _mapping(tmp_path / "run", batch={"global": 8, "micro": 8})
    outcomes = run_ranks(_run_installed, 1, mapping | _fault("term"))
    assert outcomes == ["Interrupted: SIGTERM or Ctrl-C received before the first step"]
    status = {
        "state": "stopped",
        "step": 0,
        "exit_code": 75,
        "reason": "SIGTERM or Ctrl-C received before the first step",
    }
    assert json.loads((tmp_path / "run" / "status.json").read_text()) == status
    assert run_ranks(_run_installed, 1, mapping, True) == [0]


_DEAF = """
import hashlib, pathlib, sys
from capt.pretrain.engine import interruption
interruption.GRACE = 0.3
interruption.install(75)
interruption.set_exit_action(lambda: pathlib.Path(sys.argv[1]).write_text(interruption.reason()))
print(flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
"""


def test_a_rank_that_hears_no_signal_ends_all_the_same(tmp_path: Path) -> None:
    """In C code (here a hash of many minutes) Python's handlers do not run: a thread ends the rank, truthfully."""
    command = [sys.executable, "-c", _DEAF, str(tmp_path / "words")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == STOPPED
    assert (tmp_path / "words").read_text() == "SIGTERM or Ctrl-C received before the first step"


def test_a_job_that_a_callback_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    """They have opened the metrics by then. A resumed run keeps what it had."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best.json").write_text("{}")
    before = snapshot(tmp_path)
    mapping = _mapping(tmp_path / "run", batch={"global": 8, "micro": 8}, checkpoint={"best": "loss"})
    mapping["run"]["tensorboard"] = True
    (outcome,) = run_ranks(_run, 1, mapping)
    assert "best.json: damaged or of another version: metric: Field required; remove the file" in outcome
    assert snapshot(tmp_path).keys() == before.keys()


@pytest.mark.parametrize("kind", ["move", "replace"])
def test_nothing_is_written_where_the_run_folder_was(kind: str, tmp_path: Path) -> None:
    """A folder that is moved while the job runs, and another in its place: the job ends before its next save."""
    fault = {"fault": {"kind": kind, "step": 5, "rank": 0}}
    outcomes = run_ranks(_run, 2, _mapping(tmp_path / "run", checkpoint={"every": 2}, **fault))
    assert all("moved, removed or replaced" in str(outcome) for outcome in outcomes), outcomes
    assert snapshot(tmp_path / "run").keys() == (set() if kind == "move" else {LOCK})
    steps = {path.name for path in (tmp_path / "moved" / "checkpoints").glob("step-*")}
    assert steps == {"step-00000002", "step-00000004"}
    status = read_status(tmp_path / "moved")
    assert status is not None
    assert status.state == "running"  # it could not say how it ended


def test_a_cache_that_is_pruned_costs_no_file_of_a_checkpoint(tmp_path: Path) -> None:
    """A task names files of the cache, one of which is gone when the second checkpoint is written."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in ("a", "b"):
        (cache / name).write_text(name)
    fault = {"exports": str(cache), "fault": {"kind": "prune", "step": 3, "rank": 0}}
    assert run_ranks(_run, 1, _mapping(tmp_path / "run", checkpoint={"every": 2}, **fault)) == [0]
    assert len(list(cache.iterdir())) == 1
    copies = tmp_path / "run" / "checkpoints" / "step-00000004" / "tokenizer"
    assert sorted(path.read_text() for path in copies.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("kind", ["link_checkpoints", "replace_checkpoints"])
def test_checkpoints_of_another_run_in_their_place_are_left_alone(kind: str, tmp_path: Path) -> None:
    """Anybody who may write in the run folder can have another run's checkpoints pruned, which he may not write."""
    others = tmp_path / "others" / "step-00000001"
    others.mkdir(parents=True)
    (others / "manifest.json").write_text("{}")
    before = snapshot(tmp_path / "others")
    fault = {"fault": {"kind": kind, "step": 5, "rank": 0}}
    outcomes = run_ranks(_run, 2, _mapping(tmp_path / "run", checkpoint={"every": 2, "keep": 1}, **fault))
    words = "a link is in the place of a folder" if kind == "link_checkpoints" else "was replaced while the job ran"
    assert all(words in str(outcome) for outcome in outcomes), outcomes
    there = tmp_path / ("others" if kind == "link_checkpoints" else "run/checkpoints")
    assert snapshot(there) == before
    assert [path.name for path in (tmp_path / "run" / "own").glob("step-*")] == ["step-00000004"]


def test_a_checkpoint_is_not_removed_through_a_link(tmp_path: Path) -> None:
    own = tmp_path / "own" / "step-00000001"
    own.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "own" / "step-00000002").symlink_to(own)
    for path in (tmp_path / "link" / "step-00000001", tmp_path / "own" / "step-00000002"):
        with pytest.raises(OSError, match=r"Not a directory|symbolic link"):
            remove_checkpoint(path)
    assert own.is_dir()


@pytest.mark.parametrize("calls", range(4))
def test_a_checkpoint_is_never_lost_while_a_later_save_of_its_step_replaces_it(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill after any number of renames leaves the old checkpoint or the new one, which the next start finds."""

    class Killed(BaseException):
        pass

    done: list[Path] = []

    def killed(path: Path, target: Path) -> Path:
        if len(done) == calls:
            raise Killed
        done.append(path)
        os.rename(path, target)
        return target

    target = tmp_path / "checkpoints" / "step-00000004"
    partial = target.with_name(".step-00000004.partial")
    for folder, text in ((target, "old"), (partial, "new")):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(text)
    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(Path, "rename", killed)
        put_in_place(partial, target)
    assert put_back_replaced(tmp_path) == ([target] if calls == 1 else [])
    remove_leftovers(tmp_path)
    assert (target / "manifest.json").read_text() == ("new" if calls > 1 else "old")
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("name", ["checkpoints", "crashes", "log", "tensorboard", "profile"])
def test_a_run_folder_with_a_link_in_it_is_refused(name: str, tmp_path: Path) -> None:
    """Logs would be appended to, and checkpoints pruned, in somebody's folder."""
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    (elsewhere / "rank-0.log").write_text("precious")
    before = snapshot(elsewhere)
    run.mkdir()
    (run / name).symlink_to(elsewhere)
    status = RunStatus(run)
    resumes = name == "checkpoints"  # a new run is refused for holding one
    with pytest.raises(ConfigError, match=f"{name}: a link is in the place of a folder of our own"):
        status.start(job_from_mapping(_mapping(run), "test"), resume=resumes)
    assert snapshot(elsewhere) == before


def test_a_refused_job_removes_no_log_that_was_there_before_it(tmp_path: Path) -> None:
    """TensorBoard's events of other runs, in a folder that holds no run of ours."""
    run = tmp_path / "run"
    events, log = run / "tensorboard" / "events.out.tfevents.1.host", run / "log" / "rank-0.log"
    for path in (events, log):
        path.parent.mkdir(parents=True)
        path.write_text("precious")
    outcomes = run_ranks(_run, 1, _mapping(run, **_fault("refuse")))
    assert outcomes == ["DataError: data.files: no text"]
    assert events.read_text() == "precious"
    assert log.read_text().startswith("precious")
    assert not (run / "config.yaml").exists()

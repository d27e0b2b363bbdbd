"""A run's life: start, log, checkpoint, stop by signal, resume, refuse, fail on all ranks together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from capt.pretrain.base.errors import CheckpointError, ConfigError, UserError
from capt.pretrain.base.locks import file_lock
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.checkpoint import find_checkpoint, read_weights
from capt.pretrain.engine.checkpoint.load import stored_weights
from capt.pretrain.engine.run import run_job
from capt.pretrain.engine.step_folders import checkpoints_of
from capt.pretrain.registry import TASKS
from capt.pretrain.reliability.ledger.check import check
from tests.runs import rows_of
from tests.support import free_port, run_ranks

TASKS["toy"] = "tests.toy"


def _mapping(run_dir: Path, **changes: Any) -> dict[str, Any]:
    mapping: dict[str, Any] = {
        "task": {"type": "toy"},
        "run": {"dir": str(run_dir), "log_every": 1, "tensorboard": False},
        "batch": {"global": 8, "micro": 2},
        "schedule": {"max_steps": 6, "warmup_steps": 2},
        "optimizer": {"lr": 1e-2},
        "validate": {"every": 3},
        "checkpoint": {"every": 2, "keep": 2},
    }
    for key, value in changes.items():
        mapping[key] = {**mapping.get(key, {}), **value} if isinstance(value, dict) else value
    return mapping


def _run(mapping: dict[str, Any], resume: bool = False, checkpoint: str | None = None) -> int | str:
    quiet_libraries(debug=False)
    job = job_from_mapping(mapping, "test")
    try:
        return run_job(job, resume=resume, checkpoint=checkpoint)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def _run_and_signal_again(mapping: dict[str, Any]) -> int | str:
    outcome = _run(mapping)
    os.kill(os.getpid(), signal.SIGTERM)  # e.g. from a launcher that signals twice; the default would end us with -15
    return outcome


def _rows(run_dir: Path, split: str | None = None) -> list[dict[str, Any]]:
    return [row for row in rows_of(run_dir) if row.get("split") == split]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps on 2 ranks, uninterrupted."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    assert run_ranks(_run, 2, _mapping(run_dir)) == [0, 0]
    return run_dir


def test_run_folder_holds_what_is_promised(finished: Path) -> None:
    rows = _rows(finished)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "lr", "grad_norm", "samples_per_second", "samples"} <= rows[0].keys()
    assert rows[-1]["samples"] == 48
    assert [row["step"] for row in _rows(finished, "validation")] == [3, 6]
    assert json.loads((finished / "status.json").read_text())["state"] == "done"
    assert [path.name for path in checkpoints_of(finished)] == ["step-00000004", "step-00000006"]
    assert (finished / "checkpoints" / "latest").resolve().name == "step-00000006"
    assert (finished / "log" / "rank-1.log").exists()
    manifest = json.loads((find_checkpoint(finished) / "manifest.json").read_text())
    assert manifest["world_size"] == 2
    assert manifest["provenance"]["torch"].startswith("2.")


def test_a_used_folder_is_refused(finished: Path) -> None:
    before = (finished / "metrics.jsonl").read_text()
    outcome = run_ranks(_run, 1, _mapping(finished))[0]
    assert outcome.startswith("ConfigError")
    assert "capt resume" in outcome
    assert (finished / "metrics.jsonl").read_text() == before


def test_a_folder_in_which_another_job_trains_is_left_alone(finished: Path) -> None:
    before = {name: (finished / name).read_bytes() for name in ("metrics.jsonl", "status.json", "config.yaml")}
    mapping = _mapping(finished, schedule={"max_steps": 8})
    with file_lock(finished / ".training"):
        outcomes = run_ranks(_run, 2, mapping, True)
    assert all("another process is training in this folder" in str(outcome) for outcome in outcomes), outcomes
    assert {name: (finished / name).read_bytes() for name in before} == before


def test_a_branch_decays_while_the_stable_run_goes_on(tmp_path: Path) -> None:
    """A decay from a checkpoint of a stable run is, to the last digit, the end of a run that decays then, although it
    is killed; the stable run is as it would be without; the ledger of the branch says where it begins."""

    def job(name: str, schedule: dict[str, Any], **changes: Any) -> dict[str, Any]:
        run = {"resume": "auto", **changes.pop("run", {})}
        wsd = {"type": "wsd", "max_steps": 8, "final": 0.1, **schedule}
        return _mapping(tmp_path / name, schedule=wsd, run=run, checkpoint={"every": 2, "keep": 9}, **changes)

    for mapping in (job("whole", {"decay_steps": 4}), job("steady", {})):
        assert run_ranks(_run, 2, mapping) == [0, 0]
    assert run_ranks(_run, 2, job("stable", {"stop_after": 4})) == [75, 75]
    kept = {path: path.read_bytes() for path in (tmp_path / "stable").rglob("*") if path.is_file()}
    fault = {"kind": "term", "step": 5, "rank": 1, "once": str(tmp_path / "struck")}
    branch = {"schedule": {"max_steps": 5, "decay_steps": 4}, "run": {"branch_from": str(tmp_path / "stable")}}
    assert run_ranks(_run_and_signal_again, 2, job("branch", **branch, fault=fault)) == [75, 75]
    assert {path: path.read_bytes() for path in (tmp_path / "stable").rglob("*") if path.is_file()} == kept
    assert run_ranks(_run, 2, job("stable", {}), True) == [0, 0]  # its newest checkpoint is another one now
    shutil.rmtree(tmp_path / "stable" / "checkpoints" / "step-00000004")
    branch = {"schedule": {"max_steps": 5, "decay_steps": 4}, "run": {"branch_from": str(tmp_path / "stable")}}
    assert run_ranks(_run, 2, job("branch", **branch, fault=fault)) == [0, 0]
    for name, like, first in (("branch", "whole", 4), ("stable", "steady", 0)):
        ours, theirs = (_rows(tmp_path / run) for run in (name, like))
        for key in ("step", "loss", "lr", "samples"):
            assert [row[key] for row in ours] == [row[key] for row in theirs[first:]], (name, key)
    config = (tmp_path / "branch" / "config.yaml").read_text()
    assert "stable/checkpoints/step-00000004" in config
    assert "max_steps: 8" in config
    report = check(tmp_path / "branch")
    assert not report.faults
    assert "branched from" in report.notes[0]


@pytest.mark.parametrize(
    ("source", "schedule", "message"),
    [
        ("nowhere", {}, "neither a run with a complete checkpoint nor a checkpoint"),
        ("", {"warmup_steps": 7, "max_steps": 8}, "step 6 is within the schedule.warmup_steps 7"),
        ("", {"max_steps": 6}, "step 6 is not before schedule.max_steps 6"),
    ],
)
def test_a_branch_that_cannot_be_is_refused(
    finished: Path, tmp_path: Path, source: str, schedule: dict[str, Any], message: str
) -> None:
    run = {"branch_from": str(finished / source)}
    assert message in run_ranks(_run, 1, _mapping(tmp_path / "branch", run=run, schedule=schedule))[0]
    assert not (tmp_path / "branch").exists()


@pytest.mark.parametrize("kind", ["average", "ema"])
def test_the_average_of_the_weights_is_that_of_an_uninterrupted_run(tmp_path: Path, kind: str) -> None:
    """The average of the last three regular checkpoints, though one more was written when the run was killed and only
    one is kept; or the moving average over all steps, in float64."""
    section = {"every": 2, "keep": 1, "average": 3} if kind == "average" else {"every": 2, "keep": 1, "ema": 0.8}
    engine = {"zero_stage": 1}
    whole = _mapping(
        tmp_path / "whole", checkpoint={**section, "every": 1 + (kind == "average"), "keep": 9}, engine=engine
    )
    assert run_ranks(_run, 2, whole) == [0, 0]
    fault = {"kind": "term", "step": 3, "rank": 1, "once": str(tmp_path / "struck")}
    killed = _mapping(tmp_path / "run", run={"resume": "auto"}, checkpoint=section, engine=engine, fault=fault)
    assert run_ranks(_run_and_signal_again, 2, killed) == [75, 75]
    assert run_ranks(_run, 2, killed) == [0, 0]
    weights = [read_weights(path) for path in checkpoints_of(tmp_path / "whole")]
    if kind == "average":
        expected = {name: sum(each[name].double() for each in weights) / 3 for name in weights[0]}
    else:
        first = checkpoints_of(tmp_path / "whole")[0]
        with stored_weights(first, "model", average=True) as (described, read):
            expected = {name: read(name).double() for name in described.shapes}
        for each in weights[1:]:
            expected = {name: 0.8 * value + 0.2 * each[name].double() for name, value in expected.items()}
    for run in ("whole", "run"):
        found = read_weights(find_checkpoint(tmp_path / run / "average"))
        for name, value in expected.items():
            torch.testing.assert_close(found[name].double(), value, rtol=1e-6, atol=1e-7, msg=f"{run} {name}")
            assert torch.equal(found[name], read_weights(find_checkpoint(tmp_path / "whole" / "average"))[name])


def test_the_same_job_is_begun_resumed_and_found_finished(finished: Path, tmp_path: Path) -> None:
    """run.resume=auto, as a scheduler runs the same command again; rank 0 decides for both ranks."""
    run_dir = tmp_path / "run"
    fault = {"kind": "term", "step": 3, "rank": 1, "once": str(tmp_path / "struck")}
    mapping = _mapping(run_dir, fault=fault, run={"resume": "auto"})
    assert run_ranks(_run_and_signal_again, 2, mapping) == [75, 75]
    assert run_ranks(_run, 2, mapping) == [0, 0]
    assert [row["loss"] for row in _rows(run_dir)] == [row["loss"] for row in _rows(finished)]
    assert run_ranks(_run, 2, mapping) == [0, 0]
    assert len(_rows(run_dir)) == 6, "a finished run is left as it is"
    assert run_ranks(
        _run, 1, _mapping(run_dir, fault=fault, run={"resume": "auto", "dir": os.path.relpath(run_dir)})
    ) == [0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": {"lr": 2e-2}}, "optimizer.lr 0.01 -> 0.02"),
        ({"schedule": {"max_steps": 8}, "seed": 2}, "schedule.max_steps 6 -> 8"),
        ({"checkpoint": None}, "checkpoint.every 2 -> 500, checkpoint.keep 2 -> 3"),  # known once the data are there
    ],
)
def test_another_job_does_not_resume_by_itself(finished: Path, changes: dict[str, Any], says: str) -> None:
    files = ("metrics.jsonl", "status.json", "config.yaml")
    before = {name: (finished / name).read_bytes() for name in files}
    seed = {"seed": changes.pop("seed")} if "seed" in changes else {}
    mapping = _mapping(finished, **{**changes, "run": {"resume": "auto", **seed}})
    outcomes = run_ranks(_run, 2, {key: value for key, value in mapping.items() if value is not None})
    assert all(
        f"holds a run of another job: {'run.seed 1 -> 2, ' * bool(seed)}{says}; name" in str(o) for o in outcomes
    ), outcomes
    assert {name: (finished / name).read_bytes() for name in files} == before


@pytest.mark.parametrize("marks", [["metrics.jsonl"], ["checkpoints"], ["config.yaml", "manifest.json"]])
def test_what_is_no_whole_run_does_not_resume_by_itself(tmp_path: Path, marks: list[str]) -> None:
    for mark in marks:
        (tmp_path / mark).write_text("schema_version: 1\ntask: {type: toy}\n")
    (outcome,) = run_ranks(_run, 1, _mapping(tmp_path, run={"resume": "auto"}))
    assert outcome.startswith("ConfigError"), outcome


@pytest.mark.slow
def test_torchrun_starts_ranks_again_after_one_was_killed(tmp_path: Path) -> None:
    fault = {"kind": "kill", "step": 5, "rank": 1, "once": str(tmp_path / "struck")}
    mapping = _mapping(tmp_path / "run", fault=fault, schedule={"max_steps": 8})
    (tmp_path / "job.yaml").write_text(json.dumps(mapping))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [Path(sys.executable).with_name("torchrun"), "--max-restarts", "1", "--nproc-per-node", "2",
         "--master-port", str(free_port()), "-m", "tests.toy", tmp_path / "job.yaml", "--resume", "auto"],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "done"
    assert [row["step"] for row in _rows(tmp_path / "run")] == [*range(1, 9)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sigterm_on_one_rank_stops_all_and_resume_repeats_nothing(
    finished: Path, tmp_path: Path, asynchronous: bool
) -> None:
    run_dir = tmp_path / "run"
    mapping = _mapping(run_dir, fault={"kind": "term", "step": 3, "rank": 1}, checkpoint={"async": asynchronous})
    assert run_ranks(_run_and_signal_again, 2, mapping) == [75, 75]
    status = json.loads((run_dir / "status.json").read_text())
    # the validation of step 3 reads what was to be read at step 5
    assert status == {"state": "stopped", "step": 3, "exit_code": 75, "reason": "SIGTERM or Ctrl-C received"}
    assert find_checkpoint(run_dir).name == "step-00000003"
    assert run_ranks(_run, 2, mapping, True) == [0, 0]
    assert [row["loss"] for row in _rows(run_dir)] == [row["loss"] for row in _rows(finished)]


def test_stop_after_is_resumable(finished: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_ranks(_run, 2, _mapping(run_dir, schedule={"max_steps": 6, "warmup_steps": 2, "stop_after": 5})) == [
        75,
        75,
    ]
    assert run_ranks(_run, 1, _mapping(run_dir, batch={"global": 8, "micro": 4}), True) == [0]
    losses = [row["loss"] for row in _rows(run_dir)]
    assert losses == pytest.approx([row["loss"] for row in _rows(finished)], rel=1e-5)


def test_failure_on_one_rank_fails_all(tmp_path: Path) -> None:
    mapping = _mapping(tmp_path / "run", fault={"kind": "nan", "step": 2, "rank": 1})
    outcomes = run_ranks(_run, 2, mapping)
    assert "another rank at step 2" in outcomes[0]
    assert "loss is nan at step 2" in outcomes[1]
    assert not checkpoints_of(tmp_path / "run"), "a diverged state must not be saved"


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_a_gradient_that_is_no_number_ends_the_run_at_every_stage(tmp_path: Path, stage: int) -> None:
    """DeepSpeed itself drops such an update and continues, in any precision. A save under way is finished first."""
    fault = {"kind": "nan_gradient", "step": 4, "rank": 1}
    checkpoint = {"every": 3, "async": True}
    mapping = _mapping(tmp_path / "run", fault=fault, engine={"zero_stage": stage}, checkpoint=checkpoint)
    for outcome in run_ranks(_run, 2, mapping):
        assert "grad_norm is" in outcome
        assert "at step 4" in outcome
    assert [path.name for path in checkpoints_of(tmp_path / "run")] == ["step-00000003"]


def test_resuming_from_an_older_checkpoint_sets_the_newer_ones_aside(finished: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir, symlinks=True)
    (run_dir / "checkpoints" / "latest").unlink()
    mapping = _mapping(run_dir, schedule={"max_steps": 6, "warmup_steps": 2, "stop_after": 5})
    assert run_ranks(_run, 2, mapping, True, "step-00000004") == [75, 75]
    assert [path.name for path in checkpoints_of(run_dir)] == ["step-00000004", "step-00000005"]
    assert len(list((run_dir / "checkpoints").glob("abandoned-step-00000006-*"))) == 1
    assert run_ranks(_run, 2, _mapping(run_dir), True) == [0, 0]
    assert [row["loss"] for row in _rows(run_dir)] == [row["loss"] for row in _rows(finished)]


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    mapping = _mapping(run_dir, validate={"every": 1}, checkpoint={"every": 0, "keep": 1, "best": "loss"})
    assert run_ranks(_run, 2, mapping) == [0, 0]
    values = {row["step"]: row["loss"] for row in _rows(run_dir, "validation")}
    highest = max(values, key=lambda step: values[step])
    assert highest != 6, "the last step proves nothing"
    record = {"metric": "loss", "mode": "max", "step": highest, "value": values[highest]}
    assert json.loads((run_dir / "best.json").read_text()) == record
    assert [path.name for path in checkpoints_of(run_dir)] == [f"step-{highest:08}", "step-00000006"]
    assert find_checkpoint(run_dir / "checkpoints" / "best").resolve().name == f"step-{highest:08}"
    longer = {**mapping, "schedule": {"max_steps": 8, "warmup_steps": 2}}
    assert run_ranks(_run, 2, longer, True) == [0, 0]
    remembered = [f"step-{highest:08}", "step-00000008"]
    assert [path.name for path in checkpoints_of(run_dir)] == remembered


def test_validations_after_steps_that_are_named(tmp_path: Path) -> None:
    """Beside those of ``every``, each step once; a step that is the last one, or behind it, adds none."""
    for every, also, steps in ((0, [1, 4, 6, 99], [1, 4, 6]), (2, [4, 3], [2, 3, 4, 6]), (0, [], [6])):
        mapping = _mapping(tmp_path / f"run-{every}-{len(also)}", validate={"every": every, "also": also})
        assert run_ranks(_run, 1, mapping) == [0]
        assert [row["step"] for row in _rows(Path(mapping["run"]["dir"]), "validation")] == steps


def test_a_best_metric_that_validation_does_not_report(tmp_path: Path) -> None:
    outcomes = run_ranks(_run, 2, _mapping(tmp_path / "run", checkpoint={"best": "accuracy"}))
    for outcome in outcomes:
        assert outcome.startswith("ConfigError: checkpoint.best: validation reports no 'accuracy'; it reports")
        assert "loss" in outcome


@pytest.mark.parametrize(
    ("kind", "every"), [("validation_refused", 0), ("validation_crash", 2), ("validation_crash", 6)]
)
def test_a_validation_that_fails_at_the_end_costs_no_step(tmp_path: Path, kind: str, every: int) -> None:
    run_dir = tmp_path / "run"
    mapping = _mapping(run_dir, fault={"kind": kind}, validate={"every": every}, checkpoint={"every": 0})
    outcomes = run_ranks(_run, 1, mapping)
    assert "nothing to compare" in outcomes[0] or "a fault of the validation" in outcomes[0]
    if every == 2:  # one on the way ends the run there
        assert not (run_dir / "checkpoints").exists()
        return
    assert find_checkpoint(run_dir).name == "step-00000006"
    assert run_ranks(_run, 1, {**mapping, "fault": {"kind": "none"}}, True) == [0]


@pytest.mark.parametrize("guided", [False, True])
def test_what_the_last_validation_decides_is_in_the_last_checkpoint(tmp_path: Path, guided: bool) -> None:
    run_dir = tmp_path / "run"
    assert run_ranks(_run, 2, _mapping(run_dir, guided=guided, checkpoint={"every": 0, "best": "loss"})) == [0, 0]
    state = json.loads((find_checkpoint(run_dir) / "state.json").read_text())
    assert state["task"]["validations"] == 1 + guided


@pytest.mark.parametrize("best", [None, "loss"])
def test_a_validation_that_cannot_work_is_known_before_the_first_step(
    tmp_path: Path, best: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    mapping = _mapping(tmp_path / "run", fault={"kind": "unfit_validation"}, checkpoint={"best": best})
    (outcome,) = run_ranks(_run, 1, mapping)
    if best is None:
        assert outcome == 0
        assert not _rows(tmp_path / "run", "validation")
        log = (tmp_path / "run" / "log" / "rank-0.log").read_text()
        assert "validation is off: one sample; raise data.samples" in log
    else:
        assert outcome == "ConfigError: checkpoint.best loss: nothing can be validated: one sample; raise data.samples"
        assert not (tmp_path / "run").exists(), "a job that is refused leaves nothing"


def _damage(checkpoint: Path, how: str) -> str:
    shard = sorted(checkpoint.glob("model-optimizer-*"))[1]
    content = bytearray(shard.read_bytes())
    if how == "flip":
        content[-3] ^= 1
        shard.write_bytes(content)
    elif how == "truncate":
        shard.write_bytes(content[:-7])
    elif how == "missing":
        shard.unlink()
    elif how == "manifest":
        (checkpoint / "manifest.json").write_text("{")
        return "manifest.json"
    return shard.name


@pytest.mark.parametrize(
    "how", ["flip", "manifest", *(pytest.param(how, marks=pytest.mark.slow) for how in ("truncate", "missing"))]
)
def test_damage_is_named_and_the_previous_checkpoint_offered(finished: Path, tmp_path: Path, how: str) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir, symlinks=True)
    name = _damage(find_checkpoint(run_dir), how)
    mapping = _mapping(run_dir, schedule={"max_steps": 8, "warmup_steps": 2})
    for outcome in run_ranks(_run, 2, mapping, True):
        assert outcome.startswith("CheckpointError")
        assert name in outcome
        assert "--checkpoint step-00000004" in outcome
    assert run_ranks(_run, 2, mapping, True, "step-00000004") == [0, 0]
    assert find_checkpoint(run_dir).name == "step-00000008"


def test_half_written_checkpoint_is_not_one(finished: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir, symlinks=True)
    newest = find_checkpoint(run_dir)
    (newest / "manifest.json").unlink()
    assert find_checkpoint(run_dir).name == "step-00000004"
    with pytest.raises(CheckpointError, match="half-written; the newest complete one is step-00000004"):
        find_checkpoint(newest)
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        find_checkpoint(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(CheckpointError, match=r"a run without a complete checkpoint; capt resume .* writes one every"):
        find_checkpoint(tmp_path)


def test_a_run_does_not_begin_in_a_checkpoint(finished: Path, tmp_path: Path) -> None:
    """``python -m capt.pretrain CONFIG --resume`` with a checkpoint for the run folder is refused."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir, symlinks=True)
    newest = find_checkpoint(run_dir)
    files = sorted(path.name for path in newest.iterdir())
    outcome = run_ranks(_run, 1, _mapping(newest), True)[0]
    assert f"is a checkpoint, not a run folder; capt resume {run_dir} --checkpoint {newest.name}" in outcome
    assert sorted(path.name for path in newest.iterdir()) == files


def test_another_architecture_is_refused(finished: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir, symlinks=True)
    outcome = run_ranks(_run, 1, {**_mapping(run_dir, batch={"global": 8, "micro": 4}), "width": 14}, True)[0]
    assert "another architecture: first.weight has shape (13, 7), the configured model (14, 7)" in outcome
    assert "set model.* and tokenizer.* as in its config.yaml" in outcome  # another vocabulary is another first size


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_on_the_way_costs_a_checkpoint_and_not_the_run(tmp_path: Path, asynchronous: bool) -> None:
    run_dir = tmp_path / "run"
    assert run_ranks(_run_on_full_disk, 2, _mapping(run_dir, checkpoint={"async": asynchronous}), 4) == [0, 0]
    assert [path.name for path in checkpoints_of(run_dir)] == ["step-00000002", "step-00000006"]
    assert not list((run_dir / "checkpoints").glob(".*"))
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["failed_saves"]) == ("done", 1)
    if not asynchronous:  # else the loss may be known only after the last row
        assert [row.get("failed_saves", 0) for row in _rows(run_dir)][-1] == 1
    assert "CHECKPOINT LOST (1 so far): rank 1: " in (run_dir / "log" / "rank-0.log").read_text()


def test_a_full_disk_at_the_end_is_waited_for(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_ranks(_run_on_full_disk, 2, _mapping(run_dir), 6, 3) == [0, 0]
    assert [path.name for path in checkpoints_of(run_dir)] == ["step-00000004", "step-00000006"]
    assert not list((run_dir / "checkpoints").glob(".*"))


def test_a_stop_signal_gives_up_the_last_state_and_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for outcome in run_ranks(_run_on_full_disk, 2, _mapping(run_dir), 6, 1 << 30):
        assert "step 6 is not saved" in outcome
        assert "no space left" in outcome
    assert [path.name for path in checkpoints_of(run_dir)] == ["step-00000002", "step-00000004"]
    assert not list((run_dir / "checkpoints").glob(".*"))
    assert run_ranks(_run, 2, _mapping(run_dir), True) == [0, 0]


def _run_on_full_disk(mapping: dict[str, Any], step: int, times: int = 1) -> int | str:
    """The disk is full for rank 1 when it writes the checkpoint of ``step``; a stop signal comes at the tenth time."""
    import errno

    from capt.pretrain.base import distributed
    from capt.pretrain.engine import durable
    from capt.pretrain.engine.callbacks import checkpointer

    checkpointer._PAUSE = 0.01
    full_times = 0

    real = durable.save_file

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        nonlocal full_times
        if f"step-{step:08d}" in str(path) and distributed.rank() == 1 and full_times < times:
            full_times += 1
            if full_times == 10:
                os.kill(os.getpid(), signal.SIGTERM)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, metadata)

    durable.save_file = full
    return _run(mapping)


def test_unknown_task_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="did you mean 'capt_language'"):
        job_from_mapping({"task": {"type": "capt_langage"}}, "test")

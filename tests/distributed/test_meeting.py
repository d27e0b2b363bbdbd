"""Meeting of ranks: who may take part, with what, and what they tell each other."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.launcher.backends.local import run_ranks as run_commands
from capt.launcher.plan import Command, End
from capt.pretrain.__main__ import _facts, parse
from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError, DataError, RunFailedError, UserError
from capt.pretrain.base.files import write_text
from capt.pretrain.config.load import job_from_mapping, load_job
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.registry import TASKS
from tests.support import free_port, run_head, run_ranks, start_forked
from tests.toy.config import ToyJob

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def _options() -> argparse.Namespace:
    return parse(["job.yaml"])


def _refusals(facts: dict[str, Any], changes: list[tuple[str, Any]]) -> list[str]:
    """Errors of each rank where rank 1 has one fact that rank 0 has not."""
    said = []
    for key, value in [("", None), *changes]:
        own = {**facts, key: value} if key and distributed.rank() == 1 else facts
        try:
            distributed.require_alike(own)
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_every_key_file_and_version_that_differs_is_named_with_its_host() -> None:
    """Ranks of several configurations train together, hang or crash, whatever key it is."""
    job = load_job("capt_tiny", ["data.files=text.txt", "run.dir=run"])
    facts = _facts(job, _options())
    assert {"optimizer.lr", "batch.micro", "run.seed", "torch", "deepspeed", "--resume", "--checkpoint"} <= set(facts)
    files = [key for key in facts if key.startswith("the file ")]
    assert {
        "the file capt/pretrain/engine/loop.py",
        "the file capt/tokenizer/train.py",
        "the file capt/finetune/task.py",
    } <= set(files)
    changes = [(key, "another") for key in [*list(facts)[::20], "optimizer.lr", "torch", "--resume", files[0]]]
    assert len(changes) > 25
    for said in run_ranks(_refusals, 2, facts, changes):
        assert said[0] == ""
        for (key, _), text in zip(changes, said[1:], strict=True):
            assert text.startswith(f"rank 1: on {os.uname().nodename} {key} is 'another', on rank 0 ("), text


def test_the_files_of_a_task_of_another_distribution_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "others_task"
    package.mkdir()
    for name in ("__init__", "config", "step"):
        (package / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ToyJob, "__module__", "others_task.config")
    job = ToyJob.model_validate({"task": {"type": "toy"}, "run": {"dir": "run"}})
    before = _facts(job, _options())
    (package / "step.py").write_text("x = 1")
    after = _facts(job, _options())
    assert [key for key in after if after[key] != before[key]] == ["the file others_task/step.py"]


def _meet_with(secrets: list[str]) -> str:
    distributed._secret = secrets[distributed.rank()].encode()
    try:
        distributed.require_alike({"same": 1})
    except RunFailedError as error:
        return str(error)
    return ""


def test_a_process_that_does_not_know_the_secret_is_no_rank() -> None:
    assert run_ranks(_meet_with, 2, ["a", "a"]) == ["", ""]
    of_rank_0, of_the_other = run_ranks(_meet_with, 2, ["a", ""])
    assert of_rank_0 == "a process that is none of this job's has taken the place of rank 1"
    assert of_the_other.endswith("rank 0")


VALUES = [
    *(None, True, -3, 2**70, 0.1, float("inf"), "a\nb\u2028\udcff", b"\x00\n\xff", Path("/a b/\udcff")),
    *([], [[1], []], {}, {"a": {"b": [None]}}, np.float32(0.5), np.int64(-7)),
]


def _gathered() -> list[list[Any]]:
    own = [[distributed.rank(), value] for value in VALUES]
    assert [distributed.gather_objects(each) for each in own] == [
        [[rank, value] for rank in range(distributed.world_size())] for value in VALUES
    ]
    assert distributed.broadcast_object(f"of {distributed.rank()}", src=1) == "of 1"
    for dtype in (np.float64, np.float32, np.int64, np.uint8, np.bool_):
        for shape in ((), (0,), (3, 2)):
            mine = (np.arange(np.prod(shape)) + distributed.rank()).reshape(shape).astype(dtype)
            for rank, theirs in enumerate(distributed.gather_objects(mine)):
                assert theirs.dtype == dtype
                assert np.array_equal(theirs, (np.arange(np.prod(shape)) + rank).reshape(shape).astype(dtype))
    with pytest.raises(TypeError, match="a module does not travel between ranks"):
        distributed.gather_objects(os)
    errors = []
    for kind in (ConfigError, DataError, UserError, KeyError):
        try:
            with distributed.synchronize_errors():
                if distributed.rank() == 1:
                    raise kind("no")
        except Exception as error:
            errors.append([type(error).__name__, str(error)])
    return errors


def _broadcast() -> tuple[bool, int]:
    """Send a long value from rank 1: whether it arrives, and the bytes that this rank gathers."""
    gathered, gather = [], distributed.all_gather

    def noted(x: Any, group: Any = None) -> Any:
        gathered.append(distributed.world_size() * x.nbytes)
        return gather(x, group)

    distributed.all_gather = noted  # type: ignore[assignment]
    value = {"files": ["\u2028" * 1000] * 100}
    arrived = distributed.broadcast_object(value if distributed.rank() == 1 else os, src=1)
    return arrived == value, sum(gathered)


def test_a_value_of_one_rank_is_not_as_long_on_each() -> None:
    """A list of the files of a large corpus, gathered, is a gigabyte on each of a thousand ranks."""
    assert run_ranks(_broadcast, 3) == [(True, 0)] * 3


def test_values_travel_between_ranks_as_they_are_and_no_code_does() -> None:
    expected = [[kind, "rank 1: no"] for kind in ("ConfigError", "DataError", "UserError")]
    assert run_ranks(_gathered, 2) == [[*expected, ["RuntimeError", "rank 1: KeyError: 'no'"]]] * 2
    source = Path(distributed.__file__).parents[1]
    pickling = [
        path
        for path in source.rglob("*.py")
        if "object_list(" in path.read_text() or "gather_object(" in path.read_text()
    ]
    assert pickling == []


def _run(path: Path, world: int, of_rank_1: list[str]) -> End:
    TASKS["toy"] = "tests.toy"
    commands = tuple(
        Command(
            (sys.executable, "-m", "tests.toy", str(path), "--merged", *(of_rank_1 if rank == 1 else [])),
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
             "MASTER_ADDR": "127.0.0.1"},
        )
        for rank in range(world)
    )  # fmt: skip
    return run_commands(commands)


def _job(folder: Path, **changes: Any) -> Path:
    mapping = {
        "task": {"type": "toy"},
        "run": {"dir": str(folder / "run"), "log_every": 1, "tensorboard": False, "threads": 1},
        "batch": {"global": 8, "micro": 2},
        "schedule": {"max_steps": 3, "warmup_steps": 1},
        **changes,
    }
    TASKS["toy"] = "tests.toy"
    write_text(folder / "job.yaml", job_to_yaml(job_from_mapping(mapping, "test")))
    return folder / "job.yaml"


def test_a_rank_with_another_configuration_ends_the_job_before_it_begins(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_head(_run, _job(tmp_path), 2, ["optimizer.lr=0.5"]).code == 2
    said = capfd.readouterr().err
    assert f"error: rank 1: on {os.uname().nodename} optimizer.lr is 0.5, on rank 0 (" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_too_few_open_files_name_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "allow_open_files", lambda _: 40)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"40 files open \(ulimit -n\), rank 0 of 1 needs 66 at least"):
        distributed.initialize(1.0)


def test_a_rank_without_a_whole_place_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"RANK is set and LOCAL_RANK, MASTER_PORT not: .* unset RANK"):
        distributed.initialize(1.0)


@pytest.mark.parametrize("world", [1, 2])
def test_a_job_on_one_host_is_open_to_this_host_alone(tmp_path: Path, world: int) -> None:
    fault = {"kind": "listens", "step": 2, "rank": 0, "once": str(tmp_path / "listens")}
    assert run_head(_run, _job(tmp_path, fault=fault), world, []).code == 0
    found = set((tmp_path / "listens").read_text().split())
    assert found <= LOOPBACK, found
    assert found or world == 1


def _join_as(rank: int, port: int, told: Path) -> None:
    """Be one of two ranks, of which the first has a GPU."""
    import torch

    os.environ.update(RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if rank == 0:
        torch.cuda.is_available = lambda: True
        torch.cuda.set_device = lambda device: None
        distributed.dist.init_process_group = lambda *_, **__: time.sleep(60)
    try:
        distributed.initialize(0.5)
    except RunFailedError as error:
        told.write_text(f"{error} {error.everywhere} {error.passing}")


def test_a_rank_whose_host_has_lost_its_gpus_says_so_and_waits_for_nobody(tmp_path: Path) -> None:
    """It would wait for the others in a group of its own kind, and they for it in theirs, for ten minutes."""
    port = free_port()
    ranks = [start_forked(_join_as, rank, port, tmp_path / "told") for rank in (0, 1)]
    ranks[1].join(20)
    ranks[0].kill()
    assert ranks[1].exitcode == 0
    host = os.uname().nodename
    told = (tmp_path / "told").read_text()
    assert told.startswith(f"rank 1 on {host} and rank 0 on {host} cannot train together: CUDA finds no GPU on {host}")
    assert told.endswith(" False True")

"""Checkpoints in memory: a job that lost a rank or a host continues from them, and nothing wrong is ever taken."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base.errors import CheckpointError, ConfigError, UserError
from capt.pretrain.base.locks import file_lock
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.callbacks import checkpointer as saving
from capt.pretrain.engine.run import run_job
from capt.pretrain.engine.step_folders import checkpoints_of
from capt.pretrain.registry import TASKS
from capt.pretrain.reliability.local import checkpointer, replicate, storage
from tests import runs
from tests.support import run_ranks
from tests.toy.task import ToyTask

TASKS["toy"] = "tests.toy"
LAST, CRASH = 9, 8


def _mapping(run_dir: Path, memory: Path, **section: Any) -> dict[str, Any]:
    return {
        "task": {"type": "toy"},
        "run": {"dir": str(run_dir), "log_every": 1, "tensorboard": False, "threads": 1},
        "batch": {"global": 12, "micro": 2},
        "schedule": {"max_steps": LAST, "warmup_steps": 2},
        "optimizer": {"lr": 1e-2},
        "validate": {"every": 0},
        "checkpoint": {"every": 4, "local": {"every": 3, "dir": str(memory), **section}},
    }


def _run(
    mapping: dict[str, Any], resume: bool = False, crash: int = 0, hosts_of: int = 0, fault: str = "", name: str = ""
) -> int | str:
    """Train on this rank; ``crash`` ends all ranks in that step, ``hosts_of`` ranks are a host with a memory each."""
    quiet_libraries(debug=False)
    logging.getLogger("capt.pretrain").setLevel(logging.INFO)
    rank = int(os.environ["RANK"])
    if hosts_of:
        host = f"host-{rank // hosts_of}"
        replicate._this_host = lambda: (host, "")
        section = mapping["checkpoint"]["local"]
        section["dir"] = str(Path(section["dir"]) / host)
    if crash:
        real_step = ToyTask.step

        def step(self: ToyTask, engines: Any, batch: Any, progress: Any) -> Any:
            if progress.step + 1 == crash:
                raise RuntimeError("crash")
            return real_step(self, engines, batch, progress)

        ToyTask.step = step  # type: ignore[method-assign]
    storage.free_bytes = lambda location: 1 << 40  # else a nearly full disk decides what is kept
    if fault:
        _break(fault, Path(mapping["checkpoint"]["local"]["dir"]))
    job = job_from_mapping(mapping, "test")
    try:
        return run_job(job, resume=resume, checkpoint=name or None)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    except RuntimeError as error:
        return str(error)


def _break(fault: str, first: Path) -> None:
    """No room, or the file system says so only when a file is written or removed."""
    from capt.pretrain.engine import durable

    if fault == "remove":

        def refuse(path: Path) -> None:
            raise OSError(errno.EIO, "Input/output error")

        checkpointer.remove_checkpoint = refuse  # type: ignore[assignment]
    if fault == "room":
        storage.free_bytes = lambda location: 1000
    if fault == "growing":
        ToyTask.state_bytes = lambda self: 1 << 41  # type: ignore[attr-defined]
    if fault == "soon":
        saving._FIRST = 3
    if fault == "write":
        real = durable.save_file

        def full(tensors: Any, path: Path, metadata: Any) -> None:
            if first in path.parents and os.environ["RANK"] == "1":
                raise OSError(errno.ENOSPC, "No space left on device")
            real(tensors, path, metadata)

        durable.save_file = full  # type: ignore[assignment]


def _log(run_dir: Path) -> str:
    return (run_dir / "log" / "rank-0.log").read_text()


def _resumed_at(run_dir: Path) -> int:
    """The step from which the last job of the run continued."""
    return int(re.findall(r"resuming from .* at step (\d+)", _log(run_dir))[-1])


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of three ranks, without a fault and without local checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_ranks(_run, 3, _mapping(folder / "run", folder / "memory", every=0)) == [0, 0, 0]
    assert not (folder / "memory").exists()
    return runs.losses(folder / "run")


def _crashed(tmp_path: Path, world: int = 3, hosts_of: int = 0, crash: int = CRASH) -> tuple[Path, Path]:
    """A run that ended by a fault in the step after 7, with checkpoints of step 4 on disk and 6 in memory."""
    run, memory = tmp_path / "run", tmp_path / "memory"
    assert run_ranks(_run, world, _mapping(run, memory), False, crash, hosts_of) == ["crash"] * world
    assert [path.name for path in checkpoints_of(run)] == ["step-00000004"]
    return run, memory


def _in_memory(memory: Path) -> list[str]:
    """The files of the checkpoints below a folder, by host."""
    return sorted(str(path.relative_to(memory)) for path in memory.rglob("step-*/*"))


def test_a_job_continues_from_memory_as_if_nothing_had_happened(tmp_path: Path, losses: dict[int, float]) -> None:
    run, memory = _crashed(tmp_path)
    (folder,) = memory.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in checkpoints_of(folder)] == ["step-00000006"]  # only the newest
    assert run_ranks(_run, 3, _mapping(run, memory), True) == [0, 0, 0]
    assert _resumed_at(run) == 6
    assert runs.losses(run) == losses
    assert list(memory.iterdir()) == []
    assert not (run / "incarnation.json").exists()
    assert [path.name for path in checkpoints_of(run)][-1] == "step-00000009"


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(6, marks=pytest.mark.slow)])
def test_another_number_of_ranks_continues_from_it(tmp_path: Path, losses: dict[int, float], world: int) -> None:
    run, memory = _crashed(tmp_path)
    assert run_ranks(_run, world, {**_mapping(run, memory), "batch": {"global": 12, "micro": 2}}, True) == [0] * world
    assert _resumed_at(run) == 6
    assert runs.losses(run) == pytest.approx(losses, rel=1e-5)


def test_a_lost_host_is_replaced_from_its_neighbour(tmp_path: Path, losses: dict[int, float]) -> None:
    run, memory = _crashed(tmp_path, hosts_of=1)
    shutil.rmtree(memory / "host-1")
    assert run_ranks(_run, 3, _mapping(run, memory), True, CRASH, 1) == ["crash"] * 3
    assert "of step 6 from other hosts" in _log(run)
    assert _resumed_at(run) == 6
    shutil.rmtree(memory / "host-0")  # what was given to the new host is as good
    shutil.rmtree(memory / "host-2")
    assert run_ranks(_run, 3, _mapping(run, memory), True, 0, 1) == [0, 0, 0]
    assert _resumed_at(run) == 6
    assert runs.losses(run) == losses
    assert [list(host.iterdir()) for host in memory.iterdir()] == [[], [], []]


@pytest.mark.slow
def test_two_ranks_a_host_share_the_work(tmp_path: Path) -> None:
    run, memory = _crashed(tmp_path, world=3, hosts_of=2)  # hosts of two ranks and of one
    files = [path for path in _in_memory(memory) if "seen-" in path]
    assert len(files) == 6  # three, each twice
    shutil.rmtree(memory / "host-0")
    assert run_ranks(_run, 3, _mapping(run, memory), True, 0, 2) == [0, 0, 0]
    assert _resumed_at(run) == 6


@pytest.mark.slow
def test_with_two_neighbours_lost_the_permanent_one_serves(tmp_path: Path, losses: dict[int, float]) -> None:
    run, memory = _crashed(tmp_path, hosts_of=1)
    shutil.rmtree(memory / "host-1")
    shutil.rmtree(memory / "host-2")
    assert run_ranks(_run, 3, _mapping(run, memory), True, 0, 1) == [0, 0, 0]
    assert "lost or damaged on every host" in _log(run)
    assert _resumed_at(run) == 4
    assert runs.losses(run) == losses


@pytest.mark.parametrize("hosts_of", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_damaged_file_is_found_and_comes_from_a_neighbour_if_there_is_one(
    tmp_path: Path, losses: dict[int, float], hosts_of: int
) -> None:
    run, memory = _crashed(tmp_path, hosts_of=hosts_of)
    (path, *_) = sorted(memory.rglob("model-optimizer-00001-*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert run_ranks(_run, 3, _mapping(run, memory), True, 0, hosts_of) == [0, 0, 0]
    assert _resumed_at(run) == (6 if hosts_of else 4)
    assert ("model-optimizer-00001" in _log(run)) == (not hosts_of)
    assert runs.losses(run) == losses


@pytest.mark.slow
def test_a_damaged_record_of_the_incarnation_is_said(tmp_path: Path) -> None:
    run, memory = _crashed(tmp_path, world=1)
    (run / "incarnation.json").write_text('{"incarnation": 3}')
    assert run_ranks(_run, 1, _mapping(run, memory), True) == [0]
    assert _resumed_at(run) == 4
    assert f"{run / 'incarnation.json'} cannot be read: the run's local checkpoints are not used" in _log(run)


@pytest.mark.slow
def test_a_run_that_was_moved_begins_from_its_permanent_checkpoint(tmp_path: Path, losses: dict[int, float]) -> None:
    run, memory = _crashed(tmp_path)
    moved = run.rename(tmp_path / "moved")
    assert run_ranks(_run, 3, _mapping(moved, memory), True) == [0, 0, 0]
    assert _resumed_at(moved) == 4
    assert runs.losses(moved) == losses
    assert list(memory.iterdir()) == []


def test_what_is_of_another_run_or_another_future_is_not_taken(tmp_path: Path, losses: dict[int, float]) -> None:
    run, memory = _crashed(tmp_path)
    kept = tmp_path / "kept"
    shutil.copytree(memory, kept)
    # from an older checkpoint, on a host that has none of it: another future begins, and ends by a fault immediately
    mapping = _mapping(run, tmp_path / "elsewhere")
    assert run_ranks(_run, 3, mapping, True, 6, 0, "", "step-00000004") == ["crash"] * 3
    assert run_ranks(_run, 3, _mapping(run, memory), True) == [0, 0, 0]
    assert "an earlier incarnation" in _log(run)
    assert _resumed_at(run) == 4
    assert runs.losses(run) == losses
    shutil.rmtree(run)  # a new run under the old name
    shutil.copytree(kept, memory, dirs_exist_ok=True)
    assert run_ranks(_run, 3, _mapping(run, memory), False, CRASH) == ["crash"] * 3
    assert runs.losses(run) == {step: loss for step, loss in losses.items() if step < CRASH}


@pytest.mark.slow
def test_a_permanent_one_that_is_newer_is_taken(tmp_path: Path) -> None:
    run, memory = tmp_path / "run", tmp_path / "memory"
    assert run_ranks(_run, 2, _mapping(run, memory), False, 9) == ["crash"] * 2  # 6 in memory, 8 on disk
    assert run_ranks(_run, 2, _mapping(run, memory), True) == [0, 0]
    assert "is not used: the run has a checkpoint of step 8" in _log(run)
    assert _resumed_at(run) == 8
    assert list(memory.iterdir()) == []


@pytest.mark.slow
def test_switched_off_for_the_resumed_job_it_is_used_still(tmp_path: Path) -> None:
    run, memory = _crashed(tmp_path, world=1)
    assert run_ranks(_run, 1, _mapping(run, memory, every=0), True) == [0]
    assert _resumed_at(run) == 6
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param("room", "has 1,000 bytes free", marks=pytest.mark.slow),
        pytest.param("growing", "they need", marks=pytest.mark.slow),
        ("write", "no space left on device"),
    ],
)
def test_full_memory_costs_no_training(tmp_path: Path, losses: dict[int, float], fault: str, said: str) -> None:
    run, memory = tmp_path / "run", tmp_path / "first"
    mapping = {**_mapping(run, memory, every=1)}
    assert run_ranks(_run, 3, mapping, False, CRASH, 0, fault) == ["crash"] * 3
    assert _log(run).count("training continues without local checkpoints") == 1
    assert said in _log(run)
    assert run_ranks(_run, 3, mapping, True, 0, 0, fault) == [0, 0, 0]
    assert _resumed_at(run) == 4
    assert not memory.exists() or list(memory.iterdir()) == []
    assert runs.losses(run) == losses


def test_stale_folders_of_other_runs_are_removed_and_others_stay(tmp_path: Path) -> None:
    run, memory = _crashed(tmp_path, world=1)
    (folder,) = memory.iterdir()
    stranger = memory / "somebody-elses"
    stranger.mkdir()
    assert list(storage.remove_stale(memory)) == []  # it is of use: 6 is newer than 4
    old = storage.newest_change(folder) - storage.KEPT - 1
    (manifest,) = folder.rglob("manifest.json")
    os.utime(manifest, (old, old))
    with file_lock(run / ".training"):
        assert list(storage.remove_stale(memory)) == []  # a process trains there
    ((removed, reason),) = storage.remove_stale(memory)
    assert (removed, "a day" in reason) == (folder, True)
    assert list(memory.iterdir()) == [stranger]


def test_capt_clean_gives_up_what_a_run_has_in_memory(tmp_path: Path) -> None:
    run, memory = _crashed(tmp_path, world=1)
    with file_lock(run / ".training"), pytest.raises(ConfigError, match="is training"):
        list(storage.clean([run]))
    assert [folder.parent for folder, _ in storage.clean([run])] == [memory]
    assert list(memory.iterdir()) == []
    with pytest.raises(ConfigError, match="holds no run"):
        list(storage.clean([memory]))
    assert run_ranks(_run, 1, _mapping(run, memory), True) == [0]
    assert _resumed_at(run) == 4


@pytest.mark.slow
def test_what_was_left_out_while_the_job_went_on_is_of_no_use(tmp_path: Path, losses: dict[int, float]) -> None:
    """It may be of a future that did not come, though the run continued from a copy of it."""
    run, memory = _crashed(tmp_path, hosts_of=1)
    shutil.copytree(memory, tmp_path / "left-out")
    assert run_ranks(_run, 3, _mapping(run, memory), True, CRASH, 1) == ["crash"] * 3
    assert _resumed_at(run) == 6
    shutil.rmtree(memory)
    shutil.copytree(tmp_path / "left-out", memory)
    assert run_ranks(_run, 3, _mapping(run, memory), True, 0, 1) == [0, 0, 0]
    assert _resumed_at(run) == 4
    assert runs.losses(run) == losses


@pytest.mark.slow
def test_until_all_hosts_have_the_new_incarnation_the_previous_counts(tmp_path: Path, losses: dict[int, float]) -> None:
    """The job may die while it starts, when some hosts have the new incarnation already, and others have not."""
    run, memory = _crashed(tmp_path, hosts_of=1)
    (before,) = storage.incarnations_of(run)
    new = "1" * 32
    storage.write_incarnations(run, new, before)
    storage.prepare(storage.storage_of(memory / "host-1", run), run, new, [before])
    assert run_ranks(_run, 3, _mapping(run, memory), True, 0, 1) == [0, 0, 0]
    assert _resumed_at(run) == 6
    assert runs.losses(run) == losses


def test_a_folder_of_another_incarnation_is_emptied_before_it_is_used(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "memory"
    old, middle, new = ("0" * 32, "1" * 32, "2" * 32)
    storage.prepare(folder, run, old)
    (folder / "checkpoints").mkdir()
    storage.prepare(folder, run, middle, [old])
    assert (folder / "checkpoints").exists()
    storage.prepare(folder, run, new)
    assert not (folder / "checkpoints").exists()
    owner = storage.owner_of(folder)
    assert owner is not None
    assert owner.incarnation == new


def test_a_folder_that_others_can_reach_is_neither_used_nor_removed(tmp_path: Path) -> None:
    folder = storage.storage_of(tmp_path, tmp_path / "run")
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    folder.symlink_to(target)
    with pytest.raises(CheckpointError, match="not a private folder"):
        storage.prepare(folder, tmp_path / "run", "0" * 32)
    folder.unlink()
    folder.mkdir(mode=0o755)
    with pytest.raises(CheckpointError, match="not a private folder"):
        storage.prepare(folder, tmp_path / "run", "0" * 32)
    assert list(storage.remove_stale(tmp_path)) == []
    assert folder.is_dir()


def test_a_run_below_a_folder_whose_name_is_no_utf8(tmp_path: Path) -> None:
    """JSON cannot hold the path: the job ended at its first local checkpoint, and at each restart."""
    run, memory = tmp_path / os.fsdecode(b"na\xefve") / "run", tmp_path / "memory"
    run.mkdir(parents=True)
    life = "1" * 32
    storage.write_incarnations(run, life)
    folder = storage.storage_of(memory, run)
    storage.prepare(folder, run, life)
    owner = storage.owner_of(folder)
    assert owner is not None
    assert (owner.folder, owner.incarnation) == (run, life)
    (folder / "checkpoints" / "step-00000003").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000003" / "manifest.json").touch()
    (run / "checkpoints" / "step-\u00b2").mkdir(parents=True)  # a digit that is not a number
    (run / "checkpoints" / "step-\u00b2" / "manifest.json").touch()
    assert list(storage.remove_stale(memory)) == []  # it is of use
    for forged in ("relative", "/nul\0", ""):
        (folder / storage.OWNER).write_text(json.dumps({"run": forged, "incarnation": life}))
        assert storage.owner_of(folder) is None


@pytest.mark.slow
def test_a_folder_that_stands_in_the_way_is_told_of_once(tmp_path: Path) -> None:
    run, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    storage.storage_of(memory, run).symlink_to(tmp_path)
    assert run_ranks(_run, 1, _mapping(run, memory, every=1)) == [0]
    assert _log(run).count("could not be removed") == 1


def test_an_older_one_that_cannot_be_removed_is_told_of_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_ranks(_run, 1, _mapping(run, tmp_path / "memory", every=1), False, 0, 0, "remove") == [0]
    assert _log(run).count("could not be removed: [Errno 5] Input/output error") == 1


def test_automatic_checkpoints_in_the_run_folder(tmp_path: Path, losses: dict[int, float]) -> None:
    mapping = _mapping(tmp_path / "run", tmp_path / "memory", every=0)
    mapping["checkpoint"]["every"] = "auto"
    assert run_ranks(_run, 3, mapping, False, CRASH, 0, "soon") == ["crash"] * 3
    (path,) = checkpoints_of(tmp_path / "run")  # the next one is further away: a step is short, a save is long
    assert path.name == "step-00000003"
    assert run_ranks(_run, 3, mapping, True) == [0, 0, 0]
    assert _resumed_at(tmp_path / "run") == 3
    assert runs.losses(tmp_path / "run") == losses


def test_automatic_distance_keeps_the_share() -> None:
    assert saving.distance(cost=0.1, step=0.1, before=1000) == 100  # one step's time in a hundred steps
    assert saving.distance(cost=0.001, step=10.0, before=10) == 1
    assert saving.distance(cost=60.0, step=0.1, before=10) == 40  # a single slow save is not a measure


def _send_many(folder: Path, count: int) -> list[int]:
    """Send ``count`` files round a ring of two, with few descriptors to spare; and how many were open at the end."""
    rank = int(os.environ["RANK"])
    mine = folder / str(rank)
    mine.mkdir()
    names = {r: [(f"{r}-{i}", 3 + i % 2) for i in range(count)] for r in (0, 1)}
    for name, size in names[rank]:
        (mine / name).write_bytes(bytes([rank + 1]) * size)
    moves = [replicate.Transfer(r, 1 - r, tuple(names[r])) for r in (0, 1)]
    replicate.copy_files(mine, moves[:1])  # connects
    before = len(os.listdir("/proc/self/fd"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, hard))
    replicate.BUFFERS = 4  # two streams of 2 bytes
    replicate.copy_files(mine, moves)
    for name, size in names[1 - rank]:
        assert (mine / name).read_bytes() == bytes([2 - rank]) * size
    return [before - len(os.listdir("/proc/self/fd")), replicate.chunk_size(moves)]


def test_hundreds_of_files_are_sent_with_few_descriptors(tmp_path: Path) -> None:
    assert run_ranks(_send_many, 2, tmp_path, 60) == [[0, 2], [0, 2]]


def test_buffers_of_a_rank_are_bounded_however_many_it_talks_with() -> None:
    """Each of 128 hosts of 8 ranks is given the files of all others."""
    moves = [replicate.Transfer(8 * source, 8 * target, ()) for source in range(128) for target in range(128)]
    assert 256 * replicate.chunk_size(moves) <= replicate.BUFFERS
    assert replicate.chunk_size(moves[1:2]) == replicate.CHUNK

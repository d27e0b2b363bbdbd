"""Bytes that saving and resuming write and read: which, by which rank, where, with which permissions."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base.locks import file_lock
from capt.pretrain.engine.checkpoint import find_checkpoint
from tests.distributed.test_run import _mapping, _run
from tests.fuzz.harness import snapshot
from tests.support import run_ranks

_TARGETS = (
    ".training", ".status.json.tmp", "status.json", "best.json", ".metrics.jsonl.tmp", "metrics.tmp", "config.yaml",
    "log/rank-0.log", "checkpoints/.latest.tmp", "checkpoints/.step-00000002.partial",
)  # fmt: skip


def _alone(run_dir: Path, **changes: Any) -> dict[str, Any]:
    return _mapping(run_dir, **{"batch": {"global": 8, "micro": 8}, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 steps of one process."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    assert run_ranks(_run, 1, _alone(run_dir, schedule={"max_steps": 2, "warmup_steps": 1})) == [0]
    return run_dir


def _run_with_links(folder: str, names: list[str]) -> dict[str, Any]:
    """Resume a run once for each planted link, all in this process; what became of the victims."""
    import shutil

    outcome = {}
    for number, name in enumerate(names):
        run = Path(folder) / f"run-{number}"
        shutil.copytree(Path(folder) / "run", run, symlinks=True)
        victim = Path(folder) / f"victim-{number}"
        victim.write_text("precious")
        content = (run / name).read_bytes() if (run / name).is_file() else b""
        (run / name).unlink(missing_ok=True)
        if name == "config.yaml":
            victim.write_bytes(content)
        before = victim.read_bytes()
        (run / name).symlink_to(victim)
        code = _run(_alone(run, schedule={"max_steps": 3, "warmup_steps": 1}, checkpoint={"every": 1}), True)
        outcome[name] = (code, victim.exists() and victim.read_bytes() == before)
    return outcome


def test_planted_links_destroy_nothing(finished: Path) -> None:
    (outcome,) = run_ranks(_run_with_links, 1, str(finished.parent), list(_TARGETS))
    for name, (code, intact) in outcome.items():
        assert intact, f"{name}: written through the link"
        assert code == 0 or "a link, FIFO or folder is in the place of a file of our own" in str(code), (name, code)


def test_all_files_of_a_checkpoint_have_the_permissions_of_the_umask(finished: Path) -> None:
    mask = os.umask(0o022)
    os.umask(mask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in find_checkpoint(finished).rglob("*") if path.is_file()}
    assert set(modes.values()) == {0o666 & ~mask}, modes


def test_what_a_killed_job_left_is_swept_by_the_next(finished: Path, tmp_path: Path) -> None:
    import shutil

    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir, symlinks=True)
    for name in (".step-00000009.partial", ".step-00000001.removed"):
        (run_dir / "checkpoints" / name / "tokenizer").mkdir(parents=True)
    before = snapshot(run_dir)
    mapping = _alone(run_dir, schedule={"max_steps": 3, "warmup_steps": 1})
    with file_lock(run_dir / ".training"):
        run_ranks(_run, 1, mapping, True)
    assert snapshot(run_dir) == before, "not while another job may be writing them"
    assert run_ranks(_run, 1, mapping, True) == [0]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "latest", "step-00000002", "step-00000003",
    ]  # fmt: skip


def _hashing(mapping: dict[str, Any]) -> tuple[Any, dict[str, list[str]]]:
    """Train on, and list the files that each thread of this rank hashed meanwhile."""
    from capt.pretrain.engine.checkpoint import save

    threads: dict[str, list[str]] = {}
    real = save.sha256

    def noted(path: Path) -> str:
        threads.setdefault(threading.current_thread().name, []).append(path.name)
        return real(path)

    save.sha256 = noted
    return _run(mapping), threads


def test_every_rank_hashes_what_it_wrote_in_its_writer(tmp_path: Path) -> None:
    mapping = _mapping(tmp_path / "run", checkpoint={"every": 6, "async": True})
    outcomes = run_ranks(_hashing, 2, mapping)
    for rank, (code, threads) in enumerate(outcomes):
        assert code == 0
        own = [f"model-weights-{rank:05d}-of-00002.safetensors", f"model-optimizer-{rank:05d}-of-00002.safetensors"]
        assert {*own, f"seen-{rank}.json"} <= set(threads["checkpoint"])
        assert ("state.json" in threads["checkpoint"]) == (rank == 0)
        assert "MainThread" not in threads
    files = json.loads((find_checkpoint(tmp_path / "run") / "manifest.json").read_text())["files"]
    hashed = Counter(name for _, threads in outcomes for names in threads.values() for name in names)
    assert hashed == Counter(Path(name).name for name in files), "each file once, over all ranks"


def _writing_for_long(mapping: dict[str, Any]) -> tuple[Any, list[int]]:
    """The save of step 5 is under way on rank 1 until step 7. In which steps the ranks gathered objects."""
    from capt.pretrain.base import distributed
    from capt.pretrain.engine.checkpoint import save
    from tests.toy.task import ToyTask

    gathered: list[int] = []
    now, go_on = 0, threading.Event()
    write, gather, step = save.write_tensors, distributed.gather_objects, ToyTask.step

    def slow(path: Path, *rest: Any) -> None:
        if distributed.rank() == 1 and "step-00000005" in str(path):
            assert go_on.wait(60)
        write(path, *rest)

    def noted_gather(value: Any) -> list[Any]:
        gathered.append(now)
        return gather(value)

    def noted_step(self: ToyTask, engines: Any, batch: Any, progress: Any) -> Any:
        nonlocal now
        now = progress.step + 1
        if now == 7:
            go_on.set()
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
        return step(self, engines, batch, progress)

    save.write_tensors, distributed.gather_objects = slow, noted_gather
    ToyTask.step = noted_step  # type: ignore[method-assign]
    return _run(mapping), gathered


def test_no_step_waits_to_ask_whether_a_save_is_done(tmp_path: Path) -> None:
    mapping = _mapping(tmp_path / "run", checkpoint={"every": 5, "async": True}, validate={"every": 0})
    mapping["schedule"] = {"max_steps": 12, "warmup_steps": 1}
    for code, gathered in run_ranks(_writing_for_long, 2, mapping):
        assert code == 0
        assert 5 in gathered
        assert not {6, 7, 8} & set(gathered), "what nobody is to wait for goes with the flags"
        assert 9 in gathered, "all have written after step 7, heard two steps later"


def _run_where_a_call_fails(mapping: dict[str, Any], call: str) -> Any:
    """On rank 1 a file system over the network says only now that it is full, in the save of step 4."""
    import errno

    from capt.pretrain.base import distributed
    from capt.pretrain.engine.checkpoint import save

    class Folder(type(Path())):  # type: ignore[misc]
        def mkdir(self, *args: Any, **options: Any) -> None:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    sync, own = save.sync, save._own_folder

    def failing_sync(path: Path) -> None:
        if call == "fsync" and "step-00000004" in str(path) and distributed.rank() == 1:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        sync(path)

    def failing_folder(unfinished: Any) -> Path:
        path = own(unfinished)
        return Folder(path) if "step-00000004" in str(path) and call == "mkdir" and distributed.rank() == 1 else path

    save.sync, save._own_folder = failing_sync, failing_folder
    return _run(mapping)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("call", ["fsync", "mkdir"])
def test_a_quota_met_late_costs_a_checkpoint_and_not_the_run(tmp_path: Path, call: str, asynchronous: bool) -> None:
    mapping = _mapping(tmp_path / "run", checkpoint={"async": asynchronous, "keep": 9})
    assert run_ranks(_run_where_a_call_fails, 2, mapping, call) == [0, 0]
    found = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("*step-*"))
    assert found == ["step-00000002", "step-00000006"]


def _reading(mapping: dict[str, Any]) -> tuple[Any, int, int]:
    """Resume; bytes of the checkpoint that this rank hashed, and bytes of tensors that it read."""
    import tempfile

    from capt.pretrain.base import verification
    from capt.pretrain.engine.checkpoint import load

    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    hashed = read = 0
    real_hash, real_open = verification.hash_file, load.safe_open

    def noted_hash(path: Path, *others: Any) -> str:
        nonlocal hashed
        hashed += path.stat().st_size
        return real_hash(path, *others)

    class Part:
        def __init__(self, part: Any) -> None:
            self._part = part
            self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

        def __getitem__(self, at: slice) -> Any:
            nonlocal read
            out = self._part[at]
            read += out.numel() * out.element_size()
            return out

    class Opened:
        def __init__(self, *args: Any, **options: Any) -> None:
            self._file = real_open(*args, **options)

        def __enter__(self) -> Opened:
            self._inner = self._file.__enter__()
            self.keys = self._inner.keys
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def get_slice(self, key: str) -> Part:
            return Part(self._inner.get_slice(key))

    verification.hash_file, load.safe_open = noted_hash, Opened
    return _run(mapping, True), hashed, read


@pytest.mark.parametrize(("stage", "weights_read"), [(0, 2), (1, 2)])
def test_on_resume_each_byte_is_read_once_over_all_ranks(tmp_path: Path, stage: int, weights_read: int) -> None:
    """Hashed once. The weights: once by rank 0 for the module, once for the master weights; the moments: once."""
    run_dir = tmp_path / "run"
    mapping = _mapping(run_dir, engine={"zero_stage": stage}, schedule={"max_steps": 2, "warmup_steps": 1})
    mapping["batch"] = {"global": 12, "micro": 2}
    assert run_ranks(_run, 3, mapping) == [0, 0, 0]
    files = json.loads((find_checkpoint(run_dir) / "manifest.json").read_text())["files"]
    mapping["schedule"] = {"max_steps": 3, "warmup_steps": 1}
    outcomes = run_ranks(_reading, 3, mapping)
    assert [code for code, *_ in outcomes] == [0, 0, 0]
    total = sum(file["size"] for file in files.values())
    config = files["config.yaml"]["size"]
    hashed = sum(hashed for _, hashed, _ in outcomes)
    # rank 0 compares the batch sizes; a configuration younger than a second is not remembered, and hashed for it again
    assert hashed in (total, total + config)
    parameters = 13 * 7 + 13 + 2 * 13 + 13 * 7 + 7 + 1
    assert sum(read for *_, read in outcomes) == 4 * parameters * (weights_read + 2)

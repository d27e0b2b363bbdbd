"""Cores that a process may use: affinity masks, quotas of both versions of cgroups, and what other processes take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from capt.pretrain.base import process
from capt.pretrain.engine import run


def _groups(root: Path, files: dict[str, str], own: str) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "own").write_text(own)
    return root / "fs", root / "own"


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/", {"cpu.max": "max 100000\n"}, None),
        ("0::/", {}, None),
        # The least on the way up: a pod's quota holds for its containers.
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000", "pod/box/cpu.max": "400000 100000"}, 2.0),
        # In the container the path is the host's, and only the root is there.
        ("0::/docker/0a1b", {"cpu.max": "300000 100000"}, 3.0),
        ("4:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 0.5),
        ("1:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
        ("2:memory:/\n1:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "800000", "cpu/a/cpu.cfs_period_us": "100000"}, 8.0),
    ],
)
def test_the_quota_is_the_least_of_a_group_and_those_above(
    own: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    assert process.cpu_quota(*_groups(tmp_path, files, own)) == quota


@pytest.mark.parametrize(
    ("mine", "masks", "quota", "threads"),
    [
        ([0, 1, 2, 3], [[0, 1, 2, 3]], None, 4),
        ([0, 1, 2, 3, 4, 5], [range(6)] * 3, None, 2),
        ([0, 1], [[0, 1], [2, 3]], None, 2),  # bound by the launcher: nothing is shared
        ([0, 1], [[0, 1], range(8)], None, 1),
        ([0], [[0]] * 4, None, 1),
        (range(8), [range(8)] * 2, 3.0, 1),
        (range(8), [range(8)], 2.9, 2),
        (range(8), [range(8)], 0.5, 1),
    ],
)
def test_processes_share_the_cores_that_they_may_use_together(
    mine: list[int], masks: list[list[int]], quota: float | None, threads: int
) -> None:
    assert process.thread_share(mine, masks, quota) == threads


def test_a_note_says_that_a_quota_or_the_load_takes_the_cores() -> None:
    def notes(threads: int, quota: float | None, load: float) -> str:
        return "\n".join(process.notes_on_cores(threads, 1, quota, 4, load, 4))

    assert notes(4, None, 0.4) == notes(2, None, 2.0) == ""
    assert "the load of this host was 3.0 on 4 cores in the last minute" in notes(4, None, 3.0)
    assert "run.threads=1 leaves them" in notes(4, None, 3.0)
    assert "has 1 thread (run.threads): if that is the work of others, steps take longer" in notes(1, None, 9.0)
    assert notes(2, 2.0, 0.0) == "the container may take the time of 2 of 4 cores"
    assert "4 threads wait for each other: set run.threads=2" in notes(4, 2.5, 0.0)


def test_a_run_takes_the_threads_that_the_user_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(run, "affinity", lambda: set(range(6)))
    monkeypatch.setattr(run, "cpu_quota", lambda: 5.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run._set_threads(0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    run._set_threads(0)
    run._set_threads(7)
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    run._set_threads(0)
    assert found == [5, 3, 7, 5]


def test_threads_spin_briefly_unless_the_user_says_how_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "passive"}):
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            monkeypatch.setitem(os.environ, name, "")
            del os.environ[name]
        os.environ.update(given)
        process.spin_briefly()
        found = {name: os.environ[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in os.environ}
        assert found == (given or {"GOMP_SPINCOUNT": "30000"})
        # A rank inherits what its launcher has set for itself; .deepspeed_env adds the policy.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        process.spin_briefly()
        assert os.environ.get("GOMP_SPINCOUNT") == given.get("GOMP_SPINCOUNT")


def test_a_rank_says_how_threads_wait_before_torch_is_loaded() -> None:
    code = (
        "import atexit, os, runpy, sys\n"
        "atexit.register(lambda: print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules))\n"
        "sys.argv[1:] = ['--help']\n"
        "runpy.run_module('capt.pretrain', run_name='__main__')\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert found.stdout.split()[-2:] == ["30000", "False"], found.stderr


def test_as_many_cores_are_usable_as_the_quota_lasts_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "cpu_quota", lambda: None)
    assert process.usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(process, "cpu_quota", lambda: 0.2)
    assert process.usable_cores() == 1

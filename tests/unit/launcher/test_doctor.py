import shutil
from pathlib import Path

import pytest

from capt.launcher import doctor, machine
from capt.launcher.preflight.report import Check


def levels(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.level for check in checks}


def test_this_machine_can_run_jobs(tmp_path: Path) -> None:
    checks = doctor.examine(tmp_path)
    assert {"python", "processors", "disk", "shared memory", "torch", "deepspeed", "apex", "ssh", "CUDA"} <= set(
        levels(checks)
    )
    assert [check for check in checks if check.level == "fail"] == []
    assert all(check.advice for check in checks if check.level in ("warn", "fail"))


def make_apex(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return folder


def test_the_web_toolkit_called_apex_is_a_failure(tmp_path: Path) -> None:
    (check,) = doctor._apex([str(make_apex(tmp_path, "apex/__init__.py", "apex/views.py"))])
    assert check.level == "fail"
    assert "pip uninstall apex" in check.advice


def test_apex_without_kernels_is_a_warning(tmp_path: Path) -> None:
    (check,) = doctor._apex([str(make_apex(tmp_path, "apex/__init__.py", "apex/optimizers/__init__.py"))])
    assert check.level == "warn"


def test_apex_with_kernels_is_good(tmp_path: Path) -> None:
    make_apex(tmp_path, "apex/__init__.py", "apex/optimizers/__init__.py", "amp_C.py")
    (check,) = doctor._apex([str(tmp_path)])
    assert check.level == "ok"


def test_a_release_out_of_the_range_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "requires", lambda name: ["torch>=1.0,<2", "ray[tune]>=9.9; extra == 'sweep'", "datasets>=1"]
    )
    monkeypatch.setattr(doctor, "version", lambda name: {"torch": "1.0+cpu", "ray": "2.60.0"}.get(name, "5"))
    found = levels(list(doctor._packages()))
    assert (found["torch"], found["ray"], found["datasets"]) == ("ok", "warn", "ok")


def test_a_small_disk_and_little_shared_memory_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(total=64 << 20, free=1 << 20))
    found = levels(list(doctor._host(tmp_path)))
    assert (found["disk"], found["shared memory"]) == ("warn", "warn")


def test_a_broken_driver_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'driver mismatch' >&2\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == ([], "driver mismatch")
    assert Check("GPU", "fail", "nvidia-smi: driver mismatch", "check the driver") in list(doctor._devices())


def test_gpus_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA X, 80 MiB, 600.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == (["NVIDIA X, 80 MiB, 600.1"], "")
    assert "NVIDIA X" in machine.hardware_summary()


@pytest.mark.parametrize("writable", [True, False])
def test_the_cache_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path) if writable else "/dev/null")
    (check,) = [check for check in doctor._host(tmp_path) if check.name == "cache"]
    assert check.level == ("ok" if writable else "warn")
    assert writable or "XDG_CACHE_HOME" in check.advice

"""Secrets in the environment, by forty names and a dozen forms: no file, command line, log or dry run holds one."""

import logging
from pathlib import Path

import pytest

from capt.launcher.plan import Options
from capt.launcher.start import begin
from tests.unit.base.test_sensitive import NAMES, VALUES

CANARY = "canary-7c1e"
# A job that needs no torch, and leaves the command lines of itself and of what started it.
JOB = """
import os, pathlib
for pid in (os.getpid(), os.getppid()):
    pathlib.Path(f"argv-{pid}").write_bytes(pathlib.Path(f"/proc/{pid}/cmdline").read_bytes())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, an environment full of secrets, and a job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "hosts").write_text("node-1 slots=1\nnode-2 slots=1\n")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "canary_job.py").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'modules'}:{Path(__file__).parents[3]}")
    for name in NAMES:
        monkeypatch.setenv(name, CANARY)
    for number, value in enumerate(VALUES):
        monkeypatch.setenv(f"NCCL_SETTING_{number}", value)
    return tmp_path


def hits(folder: Path, *texts: str) -> list[str]:
    """List the places of secrets: texts, or files below the folder."""
    secrets = [CANARY, *VALUES]
    everything = {f"text {i}": text for i, text in enumerate(texts)}
    for path in folder.rglob("*"):
        if path.is_file():
            everything[str(path)] = path.read_bytes().decode("utf-8", "replace")
    return [name for name, text in everything.items() if any(secret in text for secret in secrets)]


def launch(launcher: str, folder: Path, *, dry: bool) -> tuple[int, str]:
    shown: list[str] = []
    options = {"launcher": launcher, "hostfile": Path("hosts") if launcher == "deepspeed" else None}
    words = ["run.dir=r", "batch.micro=4"]
    given = Options.given(**options)
    code = begin("canary_job", "capt_tiny", words, given, debug=True, show=shown.append if dry else None)
    return code, "\n".join(shown)


def test_there_are_forty() -> None:
    assert len(set(NAMES)) >= 40


@pytest.mark.parametrize("launcher", ["local", "deepspeed", "torchrun", "slurm"])
def test_no_dry_run_shows_one(launcher: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        code, shown = launch(launcher, folder, dry=True)
    assert code == 0
    assert "# commands" in shown
    assert hits(folder, shown, caplog.text) == []


@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_no_file_command_line_or_log_holds_one(
    launcher: str, folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tools = folder / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text('#!/bin/bash\necho "$@" > sbatch-argv\n')
    (tools / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    with caplog.at_level(logging.DEBUG):
        code, _ = launch(launcher, folder, dry=False)
    assert code == 0
    assert (folder / "r" / "launch.json").exists()
    assert list(folder.glob("*argv*"))
    assert hits(folder, caplog.text, *capfd.readouterr()) == []

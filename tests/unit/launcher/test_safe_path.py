"""What lies in the user's folder is not taken for the program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from capt.launcher.backends import deepspeed, local, slurm, torchrun
from capt.launcher.environment import SAFE_PATH
from capt.launcher.plan import Launch, Options
from capt.pretrain.base.safe_path import protect_children
from capt.pretrain.config.load import load_job

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "hosts").write_text("node-1 slots=1\nnode-2 slots=1\n")
    for name in ("pretrain.py", "tokenizer.py", "yaml.py", "configs/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import os, sys\nsys.stdout.write('hijacked')\nsys.stdout.flush()\nos._exit(0)\n")
    return tmp_path


def test_modules_of_the_users_folder_are_not_the_ranks(folder: Path) -> None:
    argv = [sys.executable, "-m", "capt.pretrain", "--help"]
    said = {}
    for name, safe in (("safe", SAFE_PATH), ("else", {})):
        env = {**os.environ, "PYTHONPATH": str(ROOT), **safe}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        said[name] = done.stdout
    assert "Run one rank of a job" in said["safe"]
    assert said["else"] == "hijacked"


def test_every_launcher_sets_it(folder: Path) -> None:
    launch = Launch("capt.pretrain", ("capt_tiny",), load_job("capt_tiny"), Options())
    over_hosts = Launch("capt.pretrain", ("capt_tiny",), launch.job, Options(hostfile=Path("hosts")))
    for command in (*local.plan(launch).commands, *torchrun.plan(launch).commands, *torchrun.plan(over_hosts).commands):
        assert SAFE_PATH.items() <= command.env.items()
        assert "PYTHONSAFEPATH=1 " in str(command)
    for plan in (deepspeed.plan(over_hosts), slurm.plan(launch)):
        (text,) = plan.files.values()
        assert "PYTHONSAFEPATH=1\n" in text


_CAPT = """
import subprocess, sys
from launcher import cli
cli.app = lambda *a, **k: subprocess.run([sys.executable, "-m", "capt.pretrain", "--help"]).returncode
cli.main()
"""


def test_what_capt_starts_ignores_the_users_folder(folder: Path) -> None:
    """``capt`` is a script, which sees no modules of the working folder (as with ``-P``); its children inherit that."""
    argv = [sys.executable, "-P", "-c", _CAPT, "doctor"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Run one rank of a job" in done.stdout


def test_an_empty_entry_of_the_module_path_is_the_working_folder_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    for given, kept in ((":/a", "/a"), ("/a::/b", "/a:/b"), ("/a:", "/a"), ("", ""), ("/a", "/a")):
        monkeypatch.setenv("PYTHONPATH", given)
        protect_children()
        assert (os.environ["PYTHONPATH"], os.environ["PYTHONSAFEPATH"]) == (kept, "1")


def test_an_empty_entry_is_removed_from_the_running_process_too(folder: Path) -> None:
    """The folder lies before the installed packages, and ``yaml`` is imported when a configuration is read."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}", **SAFE_PATH}
    capt = [sys.executable, "-P", "-c", "from launcher import cli; cli.main()", "config", "show", "capt_tiny"]
    for argv, says in (
        (capt, "schema_version"),
        ([sys.executable, "-m", "capt.pretrain", "x.yaml"], "no configuration"),
    ):
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert says in done.stdout + done.stderr
        assert "hijacked" not in done.stdout


@pytest.mark.parametrize("name", ["tokenizer.py", "yaml.py", "configs/__init__.py"])
def test_a_rank_that_was_started_without_the_variable_ignores_what_it_can(folder: Path, name: str) -> None:
    """As by the raw ``deepspeed --module capt.pretrain``: only a ``pretrain`` in the folder is found before we can
    act."""
    (folder / "pretrain.py").unlink()
    for other in ("tokenizer.py", "yaml.py", "configs/__init__.py"):
        if other != name:
            (folder / other).unlink()
    argv = [sys.executable, "-m", "capt.pretrain", "nowhere.yaml"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no configuration file 'nowhere.yaml'" in done.stderr
    assert done.stdout == ""


def test_a_source_checkout_needs_no_installation(folder: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    code = "import sys, capt.pretrain.base.safe_path as s, pretrain; s.drop_working_folder(); import tokenizer"
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

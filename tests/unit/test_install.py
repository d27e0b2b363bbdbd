"""`make install` refuses an old Python before it makes anything, and takes one build of torch by either tool."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("install", ROOT / "install.py")
assert _SPEC is not None
assert _SPEC.loader is not None
install = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(install)
PIN = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))


def _old_python(path: Path) -> Path:
    """A Python that says it is 3.10 and would leave an environment behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.10.13;; -c) exit 1;; *) mkdir -p "$2";; esac\n')
    path.chmod(0o755)
    return path


def _make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-s", "install", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def test_an_old_python_is_one_line_and_leaves_no_environment(tmp_path: Path) -> None:
    done = _make(f"VENV={tmp_path}/env", f"PYTHON={_old_python(tmp_path / 'python3')}")
    first = done.stderr.splitlines()[0]
    assert done.returncode
    assert first.startswith("error: the pinned packages need Python 3.11 or newer, and ")
    assert first.endswith("is Python 3.10.13: make install PYTHON=python3.12 (without one: docs/install.md)")
    assert not (tmp_path / "env").exists()


def test_an_environment_of_an_old_python_is_not_taken(tmp_path: Path) -> None:
    _old_python(tmp_path / "env/bin/python")
    done = _make(f"VENV={tmp_path}/env", f"PYTHON={sys.executable}")
    assert done.returncode
    expected = f"error: the pinned packages need Python 3.11 or newer, and {tmp_path}/env has Python 3.10.13: rm"
    assert done.stderr.startswith(expected)


def test_an_environment_that_cannot_be_made_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.sys, "executable", str(_old_python(tmp_path / "python3")))
    monkeypatch.setattr(install.subprocess, "run", lambda command, **_: (tmp_path / "env").mkdir() or _Failed())
    assert not install.make(tmp_path / "env")
    assert not (tmp_path / "env").exists()


def test_a_folder_of_the_user_that_cannot_become_an_environment_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr(install.subprocess, "run", lambda command, **_: python.write_text("half") and _Failed())
    assert not install.make(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert not python.exists()  # the next time makes it


def test_what_cannot_be_installed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "env/bin/python"
    bare.parent.mkdir(parents=True)
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    assert install.main([]) == install.main([str(tmp_path / "env")]) == 1
    monkeypatch.setenv("TORCH", "CPU")
    assert install.main([str(tmp_path / "env")]) == 1
    monkeypatch.setattr(install.sys, "version_info", (3, 10, 13))
    assert install.main([str(tmp_path / "new")]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    for line, words in zip(
        errors, ("give the folder", "has no pip", "choose from cpu, cuda", "need Python"), strict=True
    ):
        assert words in line
    assert not (tmp_path / "new").exists()


class _Failed:
    returncode, stdout, stderr = 1, "ensurepip is not available", ""


def test_uv_is_told_what_pip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["global.index-url='https://a/simple'", "global.extra-index-url='https://b https://c'",
             ":env:.index-url='https://d'", ":env:.find-links='/one /two'", "list.format='columns'"]  # fmt: skip
    monkeypatch.setenv("UV_INDEX", "https://mine")
    assert install.as_uv(install.parsed(lines)) == {
        "UV_DEFAULT_INDEX": "https://d", "UV_FIND_LINKS": "/one,/two", "UV_INDEX_STRATEGY": "unsafe-best-match",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("have", "wanted", "offered", "takes"),
    [
        (f"{PIN[7:]}+cu130", "cpu", {f"{PIN}+cpu"}, [f"{PIN}+cu130"]),  # the build that is here stays
        (None, "cpu", {f"{PIN}+cpu", PIN}, [f"{PIN}+cpu"]),
        ("1.0.0", "cpu", {f"{PIN}+cpu"}, [f"{PIN}+cpu"]),  # another release does not
        (None, "cpu", {PIN}, [PIN]),  # said in a line, below
        (None, "cuda", {f"{PIN}+cpu", PIN}, [PIN]),
    ],
)
def test_the_build_of_torch(
    have: str | None, wanted: str, offered: set[str], takes: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    class Tool:
        extra_index = "--index"

        def install(self, requirement: str, *_: str, quiet: bool = False) -> None:
            if requirement not in offered:
                raise subprocess.CalledProcessError(1, requirement)

    monkeypatch.setenv("TORCH", wanted)
    monkeypatch.setattr(install, "build_of_torch", lambda _: have)
    monkeypatch.setattr(install, "settings_of_pip", lambda _: {})
    assert [install.install_torch(Tool(), Path("python"))] == takes
    assert ("the index's own build is taken" in capsys.readouterr().err) == (offered == {PIN})


def test_pip_goes_on_where_uv_fails_and_the_reason_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tool that cannot: its words from the error on, then pip, and an error where that cannot either."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    words = "print('Using Python'); print('error: No solution'); print('because of x'); raise SystemExit(1)"

    def fails(tool: install.Pip, _: Path) -> str:
        tool.command = [sys.executable, "-c", words]
        tool.install("torch")
        return "torch"

    monkeypatch.setattr(install, "with_uv", lambda python: install.Uv(python, {}))
    monkeypatch.setattr(install, "install_torch", fails)
    assert install.main([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.count("because of x") == 2
    assert "Using Python" not in said
    assert said.index("uv could not; the same by pip") < said.index("error: pip could not install")

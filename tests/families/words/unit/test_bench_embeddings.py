"""The benchmark against gensim compares the same text, on the same version, and weighs its updates by their time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import bench_embeddings
from tests.benchmarks.bench_embeddings import Pass, gensim_version, main, speed_of


def python_with(folder: Path, *lines: str) -> Path:
    """A program in place of the Python of another environment."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


def arguments(monkeypatch: pytest.MonkeyPatch, folder: Path, own: Pass, other: Pass) -> None:
    text = folder / "text.txt"
    text.write_text("a b\n")
    python = python_with(folder, "echo 4.4.0")
    monkeypatch.setattr("sys.argv", ["bench", "--gensim-python", str(python), "--text", str(text), "--turns", "3"])
    monkeypatch.setattr(bench_embeddings, "ours", lambda *_: own)
    monkeypatch.setattr(bench_embeddings, "gensim", lambda *_: other)


def test_the_speed_is_all_words_by_all_time() -> None:
    rows = [
        {"tokens": 100.0, "words_per_second": 10.0},  # 10 s
        {"tokens": 100.0, "validation": 1.0},
        {"tokens": 400.0, "words_per_second": 100.0},  # 3 s
    ]
    assert speed_of(rows) == pytest.approx(400 / 13)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["echo 3.8.3"], "gensim 3.8.3"),
        (["echo \"ModuleNotFoundError: No module named 'gensim'\" >&2", "exit 1"], "No module named 'gensim'"),
    ],
)
def test_a_python_without_the_right_gensim_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=f"{message}.*pip install gensim==4.4.0"):
        gensim_version(python_with(tmp_path, *lines))


def test_a_python_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"cannot be run \(No such file or directory\).*pip install"):
        gensim_version(tmp_path / "nothing")


def test_sides_that_read_other_words_are_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments(monkeypatch, tmp_path, Pass(100, 10, 5.0), Pass(100, 12, 5.0))
    with pytest.raises(SystemExit, match=r"10 of them different.*in lower case"):
        main()


@pytest.mark.parametrize(("speed", "code"), [(5.0, 0), (4.9, 1)])
def test_the_exit_code_says_whether_the_bound_is_met(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], speed: float, code: int
) -> None:
    arguments(monkeypatch, tmp_path, Pass(100, 10, speed), Pass(100, 10, 10.0))
    assert main() == code
    assert json.loads(capsys.readouterr().out)["gensim_words_per_second"] == 10

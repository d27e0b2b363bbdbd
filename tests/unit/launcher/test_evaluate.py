"""``capt evaluate`` and ``capt convert`` hand a checkpoint to what its task has, and say when there is nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli import main
from pretrain.config.load import job_from_mapping
from pretrain.engine.checkpoint.save import write_weights_only
from pretrain.registry import TASKS, task_module

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def capt(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of the tests' own task, which has no evaluation."""
    from tests.toy.task import ToyModel

    monkeypatch.setitem(TASKS, "toy", "tests.toy")
    job = job_from_mapping({"task": {"type": "toy"}, "run": {"dir": str(tmp_path / "run")}}, "test")
    write_weights_only(tmp_path / "run" / "checkpoints" / "step-00000000", job, {"model": ToyModel(3)}, {})
    return tmp_path / "run"


def test_a_task_without_evaluation_gets_one_sentence(capt: Run, checkpoint: Path) -> None:
    code, out, err = capt("evaluate", str(checkpoint), "--text", "text.txt")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "a checkpoint of task toy, for which there is no evaluation" in err
    code, out, err = capt("convert", str(checkpoint), str(checkpoint / "out"), "--to", "hf")
    assert (code, out) == (2, "")
    assert "a checkpoint of task toy; there is no export of it" in err


def test_a_task_that_is_not_installed_gets_one_sentence(
    capt: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(TASKS, "toy")
    code, _, err = capt("evaluate", str(checkpoint))
    assert code == 2
    assert err.count("\n") == 1
    assert "unknown task 'toy'" in err


def test_a_task_of_another_distribution_is_handed_its_options(
    capt: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "their_task"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "evaluate.py").write_text(
        "def command(checkpoint, *, samples=7):\n    return {'samples': samples}\n"
        "def as_text(result):\n    return f'{result}'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TASKS, "toy", "their_task")
    assert capt("evaluate", str(checkpoint)) == (0, "{'samples': 7}\n", "")
    assert capt("evaluate", str(checkpoint), "--samples", "3")[1] == "{'samples': 3}\n"
    code, _, err = capt("evaluate", str(checkpoint), "--weighted-sentences", "3")
    assert code == 2
    assert "--weighted-sentences has no meaning for a checkpoint of task toy" in err
    for name in ("their_task", "their_task.evaluate"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("task", ["capt_language", "glue", "latent"])
def test_every_built_in_task_has_an_evaluation(task: str) -> None:
    module = task_module(task, "evaluate")
    assert module is not None
    assert callable(module.command)
    assert callable(module.as_text)


@pytest.mark.parametrize("path", ["../nope", "./a/b", "nope"])
@pytest.mark.parametrize("verb", [["evaluate"], ["neighbors"], ["convert"]])
def test_a_missing_path_is_never_asked_for_at_the_hub(
    capt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str], path: str
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path)
    more = {"evaluate": ["--text", "x.txt"], "neighbors": ["query"], "convert": ["out", "--from", "hf"]}[verb[0]]
    code, out, err = capt(*verb, path, *more)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1

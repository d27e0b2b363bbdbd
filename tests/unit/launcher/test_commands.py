"""A command, and an option of the evaluation of a task, are one file each."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from capt.launcher import cli
from capt.launcher.commands import COMMANDS
from capt.pretrain.registry import TASKS
from tests.support import Capt

SOURCE = '''
from dataclasses import dataclass
from typing import Annotated
import typer

@dataclass(frozen=True)
class Winding:
    turns: Annotated[int, typer.Option(min=1, help="Turns of the key.")]
    spring: Annotated[str, typer.Option(help="Its metal.")] = "steel"

app = typer.Typer(help="Toys.")

@app.callback()
def group(): ...

@app.command()
def wind(name: str, winding: Winding, loud: bool = False):
    """Wind a toy."""
    typer.echo(f"{name}: {winding.turns} turns of {winding.spring}{'!' if loud else ''}")

def register(app):
    app.command()(unwind)

def unwind(folder: Annotated[__import__("pathlib").Path, typer.Option()]):
    """Unwind all toys."""
    typer.echo(folder)
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The entry points of `capt.commands`, and a command line without those that were found before."""
    (tmp_path / "their_commands.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    rows = {"toys": "their_commands:app", "springs": "their_commands"}
    monkeypatch.setattr(cli, "entry_point_values", lambda group: rows if group == "capt.commands" else {})
    fresh(monkeypatch)
    return rows


def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the command line anew."""
    monkeypatch.setattr(cli, "app", typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False))
    monkeypatch.setattr(cli, "_rows", set())
    cli.add_commands(COMMANDS)


def test_a_distribution_adds_a_group_and_a_command(capt: Capt, installed: dict[str, str]) -> None:
    for _ in range(2):  # found once
        code, listed, _ = capt("--help")
        assert (code, listed.count("  toys "), listed.count("  unwind ")) == (0, 1, 1)
    assert "Wind a toy." in capt("toys")[1]
    assert capt("toys", "wind", "bear", "--turns", "3", "--loud") == (0, "bear: 3 turns of steel!\n", "")
    assert capt("toys", "wind", "bear", "--turns", "3", "--spring", "tin")[1] == "bear: 3 turns of tin\n"
    code, _, err = capt("toys", "wind", "bear", "--turns", "0")
    assert (code, err.count("\n")) == (2, 1)
    assert "--turns" in capt("toys", "wind", "bear")[2]
    code, _, err = capt("unwind", "--folder", "s3://bucket/toys")
    assert code == 2, "the refusals of all commands are those of a new one"
    assert "--folder: s3://bucket/toys is in a store" in err


def test_a_package_that_cannot_be_imported_leaves_the_others_alone(
    capt: Capt, installed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    installed["broken"] = "no_such_package.commands"
    assert capt("unwind", "--folder", "x")[:2] == (0, "x\n")
    assert "capt broken: the entry point 'no_such_package.commands' of capt.commands cannot be" in caplog.text
    installed["config"] = "their_commands:app"
    assert "List the shipped jobs" in capt("config", "--help")[1], "a row of ours is not replaced"


def test_our_own_commands_search_no_other_distribution(
    capt: Capt, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(group: str) -> dict[str, str]:
        raise AssertionError(group)

    monkeypatch.setattr(cli, "entry_point_values", search)
    assert capt("config", "list", "--json")[0] == 0
    assert capt("report", "no-such-run")[0] == 2


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose evaluation has an option of its own."""
    package = tmp_path / "wound_task"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "evaluate.py").write_text(
        "def command(checkpoint, *, seed=1, teeth=5):\n    return {'seed': seed, 'teeth': teeth}\n"
        "def as_text(result):\n    return f'{result}'\n"
    )
    (package / "options.py").write_text(
        "from dataclasses import dataclass\nfrom typing import Annotated\nimport typer\n"
        "@dataclass(frozen=True)\nclass EvaluateOptions:\n"
        "    teeth: Annotated[int | None, typer.Option(min=1, help='Teeth of the wheel.')] = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TASKS, "wound", "wound_task")
    fresh(monkeypatch)


def test_a_task_declares_the_options_of_its_evaluation(
    capt: Capt, task: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capt.pretrain.commands.task_of", lambda path: "wound")
    assert "Teeth of the wheel." in capt("evaluate", "--help")[1]
    assert capt("evaluate", tmp_path)[1] == "{'seed': 1, 'teeth': 5}\n"
    assert capt("evaluate", tmp_path, "--teeth", "7", "--seed", "0")[1] == "{'seed': 0, 'teeth': 7}\n"
    assert "--draws has no meaning for a checkpoint of task wound, which takes --seed, --teeth" in capt(
        "evaluate", tmp_path, "--draws", "3"
    )[2]  # fmt: skip
    for words, says in {
        ("--teeth", "7", "--retrieval", "beir"): "--teeth has no meaning with --retrieval",
        ("--dims", "8", "--mteb", "STS12"): "--dims has no meaning with --mteb",
        ("--dtype", "fp16"): "--dtype has no meaning without --retrieval",
        ("--query-prompt", "q: "): "--query-prompt has no meaning without --retrieval",
        ("--retrieval", "beir", "--mteb", "STS12"): "--retrieval and --mteb: give one of them",
        ("--mteb", "STS12", "--pooler", "cls", "--pooler", "mean"): "--pooler may be given once with --mteb",
    }.items():
        code, out, err = capt("evaluate", tmp_path, *words)
        assert (code, out, err.count("\n")) == (2, "", 1), words
        assert says in err

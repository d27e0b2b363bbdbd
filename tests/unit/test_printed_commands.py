"""Every command that a message offers can be pasted into a shell, whatever the names in it."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from capt.pretrain.base.errors import ConfigError, quoted, user_text
from capt.pretrain.engine.run_folder import CONFIG, check_is_free, check_is_no_checkpoint

ROOT = Path(__file__).parents[2]
PACKAGES = ("tokenizer", "pretrain", "finetune", "launcher")
COMMAND = re.compile(r"\b(capt [a-z]+|python -m|torchrun|sbatch|model\.init=)")
"""Where a command, or the part of one that a message offers, begins."""
NAMES = ["my run", "it's", 'a "b"', "$HOME", "a;b", "x&y", "(1)", "*", "-x", "a  b", "über", "tab\\t", "`id`", "a#b"]


def _is_quoted(node: ast.expr) -> bool:
    while isinstance(node, ast.FormattedValue):
        node = node.value
    if isinstance(node, ast.IfExp):
        return isinstance(node.body, ast.Constant) and isinstance(node.orelse, ast.Constant)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "quoted"


def _unquoted(tree: ast.AST) -> Iterator[int]:
    """Lines with a command in which a value is written that `quoted` has not seen."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.expr) and _is_quoted(node)
             for part in ast.walk(node) if part is not node}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in inner:
            before = ""
            for part in node.values:
                if isinstance(part, ast.Constant):
                    before += str(part.value)
                elif (found := [*COMMAND.finditer(before)]) and _is_inside(before[found[-1].end() :]):
                    if not _is_quoted(part):
                        yield node.lineno
                    before += "WORD"
                else:
                    before += "WORD"
        if isinstance(node, ast.Call) and node.args and isinstance(text := node.args[0], ast.Constant):
            yield from _unquoted_in_log(node, str(text.value))


def _is_inside(between: str) -> bool:
    """Whether a value after this text still belongs to the command: no sentence has gone on since."""
    return not re.search(r"[;:,)(]|\. |\b(of|and|with|is|goes|writes|for|to have)\b", between)


def _unquoted_in_log(call: ast.Call, text: str) -> Iterator[int]:
    for number, place in enumerate(re.finditer(r"%[sdgr]", text), start=1):
        found = [*COMMAND.finditer(text[: place.start()])]
        if found and _is_inside(text[found[-1].end() : place.start()]) and not _is_quoted(call.args[number]):
            yield call.lineno


def _sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / "capt" / package).rglob("*.py"))


def test_every_value_in_a_printed_command_is_quoted() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in _sources()
        for line in _unquoted(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, f"write quoted(...) around what stands in a command: {', '.join(sorted(set(found)))}"


@pytest.mark.parametrize(
    "source",
    ["f'capt resume {run}'", "log('next: capt report %s', run)", "f'x; capt ledger check {run} --since {step}'"],
)
def test_the_search_finds_what_is_not_quoted(source: str) -> None:
    assert list(_unquoted(ast.parse(source)))
    assert not list(
        _unquoted(ast.parse(re.sub(r"\{(\w+)\}", r"{quoted(\1)}", source).replace(", run", ", quoted(run)")))
    )


def _words(shell_line: str) -> list[str]:
    """What a shell makes of a line."""
    script = f"printf '%s\\0' {shell_line}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, env={**os.environ, "HOME": "/h"})
    return os.fsdecode(done.stdout).split("\0")[:-1]


@pytest.mark.parametrize("name", NAMES)
def test_a_shell_reads_a_quoted_path_back(name: str) -> None:
    (word,) = _words(quoted(Path(name)))
    assert Path(word) == Path(name)
    assert not word.startswith("-")


@pytest.mark.parametrize("name", NAMES)
def test_what_an_error_offers_can_be_pasted(tmp_path: Path, name: str) -> None:
    run = tmp_path / name
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run / CONFIG).touch()
    (run / "checkpoints" / "step-00000001" / "manifest.json").touch()
    with pytest.raises(ConfigError) as taken:
        check_is_free(run)
    with pytest.raises(ConfigError) as checkpoint:
        check_is_no_checkpoint(run / "checkpoints" / "step-00000001")
    for error in (taken.value, checkpoint.value):
        text = user_text(error)
        assert text is not None
        words = shlex.split(text[text.index("capt resume") :].split(", start")[0])
        assert Path(words[2]) == run

"""Every command that a message offers can be pasted into a shell, whatever the names in it."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer

from capt.finetune.labels.config import LabelsData
from capt.finetune.labels.data import read_splits
from capt.launcher.cli import app
from capt.pretrain.base.errors import ConfigError, UserError, quoted, user_text
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.engine.run_folder import CONFIG, check_is_free, check_is_no_checkpoint
from capt.pretrain.models.hf_folder import read_tensors, require_weights
from capt.pretrain.pairs.forms import read_pairs
from capt.pretrain.retrieval.data import read_documents
from capt.tokenizer.encode import load_tokenizer

ROOT = Path(__file__).parents[2]
PACKAGES = ("tokenizer", "pretrain", "finetune", "launcher")
COMMAND = re.compile(r"\b(capt [a-z]+|python -m|torchrun|sbatch|model\.init=)")
"""Beginning of a command, or of the part that a message offers."""
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
    """Return whether a value after this text still belongs to the command: no sentence has gone on since."""
    return not re.search(r"[;:,)(]|\. |\b(of|and|with|is|goes|writes|for|to have)\b", between)


def _unquoted_in_log(call: ast.Call, text: str) -> Iterator[int]:
    for number, place in enumerate(re.finditer(r"%[sdgr]", text), start=1):
        found = [*COMMAND.finditer(text[: place.start()])]
        if found and _is_inside(text[found[-1].end() : place.start()]) and not _is_quoted(call.args[number]):
            yield call.lineno


@functools.cache
def _sources() -> tuple[list[str], list[tuple[str, str]]]:
    """Places with a command in which a value is not quoted, and every text of the source but docstrings."""
    unquoted, texts = [], []
    for path in sorted(path for package in PACKAGES for path in (ROOT / "capt" / package).rglob("*.py")):
        tree, name = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT)
        unquoted += [f"{name}:{line}" for line in _unquoted(tree)]
        texts += [(f"{name}:{line}", text) for line, text in _texts(tree)]
    return unquoted, texts


def test_every_value_in_a_printed_command_is_quoted() -> None:
    found = _sources()[0]
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
    """Split a line as a shell does."""
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


# ---- every command that a message prints is one that can be run

TOOLS = (
    *(
        "apt-get",
        "awk",
        "chmod",
        "cp",
        "curl",
        "docker",
        "git",
        "gunzip",
        "hf",
        "iconv",
        "jq",
        "kubectl",
        "mkdir",
        "mv",
    ),
    *("perl", "pip", "python", "rm", "sbatch", "scontrol", "sed", "srun", "ssh", "ssh-copy-id", "ssh-keygen", "sysctl"),
    *("tail", "tar", "torchrun", "tr", "ulimit", "unzip", "wget", "xz", "zip", "zstd"),
)
SHELL = re.compile(
    rf"(?<![\w./{{-])(?:{'|'.join(TOOLS)}) (?:(?:lfs|auth|requeue|show|upload|download|install|uninstall|run) )?"
    r"""(?=[-'"<\x01.]|[A-Z]{4}|apex|pdsh|openssh|hostnames|pull|login|fs\.)[^;)`]*"""
)
"""A command of a shell: a tool, and what cannot be the next word of a sentence."""

NOT_RUN = {
    "apt-get install": "needs root and a mirror",
    "docker run": "needs Docker",
    "git lfs pull": "needs a repository of Git LFS",
    "hf ": "needs the hub",
    "pip ": "changes the environment of the tests",
    "scontrol ": "needs Slurm",
    "sbatch --array": "needs Slurm",
    "srun ": "needs Slurm",
    "ssh": "needs another host",
}
"""Commands that tests cannot run on a machine without these, and why."""


class Remedy(NamedTuple):
    """A file with a fault, who refuses it, and the command that the message offers; ``FILE`` is the file."""

    command: str
    name: str
    content: bytes
    read: Callable[[Path], object]
    placeholders: tuple[tuple[str, str], ...] = ()


def _text(path: Path) -> object:
    return list(FileCorpus([path], "text", None).pieces())


def _pairs(path: Path) -> object:
    return list(read_pairs([path]))


def _labels(path: Path) -> object:
    return read_splits(LabelsData(train=path))


def _documents(path: Path) -> object:
    return list(read_documents(path))


def _vocabulary(path: Path) -> object:
    (path.parent / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    return load_tokenizer(path.parent)


def _weights(path: Path) -> object:
    folder = path.parent
    if path.name == "pytorch_model.bin" and not (folder / "model.safetensors").exists():
        torch.save({"a": torch.ones(2), "b": torch.zeros(3)}, path)
    require_weights(folder)
    return read_tensors(folder)


LABELS = ["yes", "no"] * 3
ROWS = json.dumps([{"query": f"q{i}", "pos": f"p{i}"} for i in range(3)])
REMEDIES = [
    Remedy("jq -c '.[]' FILE", "a.jsonl", ROWS.encode(), _pairs),
    Remedy("jq -c '.[]' FILE", "a.json", json.dumps(json.loads(ROWS), indent=1).encode(), _pairs),
    Remedy("jq -c '.[]' FILE", "a.jsonl", json.dumps([[f"q{i}", f"p{i}"] for i in range(3)]).encode(), _pairs),
    Remedy("jq -c . FILE", "a.json", b'{\n"query": "a",\n"pos": "b"}\n{\n"query": "c", "pos": "d"}', _pairs),
    Remedy("jq -c '{\"text\": .[]}' FILE", "a.jsonl", b'["one", "two"]\n["three"]\n', _text),
    Remedy("jq -c '{\"text\": .[0], \"label\": .[1]}' FILE", "a.jsonl",
           "".join(f"{json.dumps([f't {i}', label])}\n" for i, label in enumerate(LABELS)).encode(), _labels),
    Remedy("jq -c '.[] | {\"text\": .[0], \"label\": .[1]}' FILE", "a.jsonl",
           json.dumps([[f"t {i}", label] for i, label in enumerate(LABELS)]).encode(), _labels),
    Remedy("jq -c '{\"_id\": .[0], \"text\": .[1]}' FILE", "a.jsonl", b'["d1", "one"]\n["d2", "two"]\n', _documents),
    *(Remedy(f"iconv -f {form} -t utf-8 FILE", "a.txt", "Über Öl\n\nzwei\n".encode(form), read)
      for form in ("utf-16", "utf-32") for read in (_text, _documents)),
    *(Remedy("iconv -f ENCODING -t utf-8 FILE", "a.txt", "Über Öl\n\nzwei\n".encode("latin-1"), read,
             (("ENCODING", "latin1"),)) for read in (_text, _documents)),
    Remedy("tail -n +2 FILE", "a.csv", b"sep=,\nquery,pos\na,b\nc,d\n", _pairs),
    Remedy(r"tr '\r' '\n' < FILE", "a.csv", b"query,pos\ra,b\rc,d\r", _pairs),
    Remedy(r"tr '\r' '\n' < FILE", "a.csv", b"query,pos\na,b\rc,d\n", _pairs),
    Remedy(r"sed -i '1s/^\xef\xbb\xbf//' FILE", "vocab.txt",
           "\ufeff[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n".encode(), _vocabulary),
    Remedy('python -c "import glob, torch', "pytorch_model.bin", b"", _weights),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REMEDIES)))
def test_a_remedy_that_a_message_prints_mends_the_file(number: int, tmp_path: Path) -> None:
    require_mending(REMEDIES[number], tmp_path)


def require_mending(remedy: Remedy, tmp_path: Path) -> None:
    """Require that a file is refused, and read when the command of the message has run."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    path = folder / remedy.name
    path.write_bytes(remedy.content)
    with pytest.raises(UserError) as error:
        remedy.read(path)
    message = str(error.value)
    assert remedy.command in message
    command = message[message.index(remedy.command) :]
    if command.startswith(("jq", "iconv", "tail", "tr", "sed")):
        command = remedy.command
    for placeholder, value in (("FILE", shlex.quote(str(path))), *remedy.placeholders):
        command = command.replace(placeholder, value)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True, cwd=folder, env=environment)
    if done.stdout:
        path.write_bytes(done.stdout)
    assert remedy.read(path)


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every text but docstrings, with its line; a value in it is one control character."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    left_out = inner | {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(p.value) if isinstance(p, ast.Constant) else "\x01" for p in node.values)


def _is_run(command: str) -> bool:
    pattern = re.compile(".*".join(map(re.escape, command.strip().split("\x01"))))
    return any(command.startswith(remedy.command) or pattern.match(remedy.command) for remedy in REMEDIES)


def test_every_command_of_a_shell_that_a_message_prints_is_run_by_a_test() -> None:
    found = [(place, match[0]) for place, text in _sources()[1] for match in SHELL.finditer(text)]
    new = [f"{place}: {text}" for place, text in found if not _is_run(text) and not text.startswith((*NOT_RUN, *_SEEN))]
    assert not new, f"add a case to REMEDIES that runs: {new}"
    tools = {text.partition(" ")[0] for _, text in found}
    assert {"jq", "iconv", "tail", "tr", "sed", "python", "ulimit"} <= tools, "the search finds commands"
    assert not _is_run("jq -r .x FILE"), "a new one is found"
    unused = [command for command in (*NOT_RUN, *_SEEN) if not any(text.startswith(command) for _, text in found)]
    assert not unused, f"no message prints them: {unused}"


_SEEN = {
    'python -c "from transformers': "tests/families/pictures/lxmert/test_read.py",
    "mv ": "tests/unit/launcher/test_watch.py",
    "ulimit -": "test_limits_are_set_as_they_are_printed",
    "sysctl fs.file-max": "test_limits_are_set_as_they_are_printed",
    'python -c "import sys': "tests/unit/tokenizer/test_export.py",
    "python -m capt": "tests/unit/test_packaging.py",
}
"""Commands that other tests run."""


def test_limits_are_set_as_they_are_printed() -> None:
    for command in ("ulimit -n", "ulimit -u", "ulimit -f unlimited", "test -e /proc/sys/fs/file-max"):
        subprocess.run(["bash", "-c", command], check=True, capture_output=True)


_CAPT = re.compile(r"(?<![\w./-])capt ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)?)([^;)`\n]*)")
_PROSE = {
    "has",
    "and",
    "is",
    "or",
    "runs",
    "which",
    "itself",
    "knows",
    "starts",
    "s",
    "with",
    "to",
    "in",
    "of",
    "on",
    "the",
}


def test_every_command_of_capt_that_a_message_prints_is_there_with_its_options() -> None:
    root: Any = typer.main.get_command(app)
    checked, wrong = 0, []
    for place, text in _sources()[1]:
        for match in _CAPT.finditer(text):
            command, words = root, match[1].split()
            while words and (inner := getattr(command, "commands", {}).get(words[0])) is not None:
                command, words = inner, words[1:]
            if hasattr(command, "default_command"):
                command, words = command.commands[command.default_command], []
            # A word that is no command begins a sentence, where it is one of these.
            if (command is root or hasattr(command, "commands")) and words and words[0] not in _PROSE:
                wrong.append(f"{place}: {match[0]}")
            known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
            # An option belongs to the command as long as no sentence has gone on.
            clause = re.split(r"\. |, |: | -- | (?:and|or|of|for|with|writes|makes|has) ", match[2])[0]
            options = re.findall(r"(?<!\S)--[a-z][a-z-]*", clause)
            checked += len(options)
            wrong += [f"{place}: {match[0]}" for option in options if option not in known]
    assert not wrong, f"capt has no such command or option: {wrong}"
    assert checked > 20

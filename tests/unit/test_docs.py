"""README and documentation name only what exists to type, set, open or trust; the pages build without a warning."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import typer
import yaml
from pydantic import BaseModel

from capt.launcher.bench import find_benchmarks
from capt.launcher.cli import app
from capt.launcher.sweep.config import Sweep
from capt.pretrain.__main__ import parse
from capt.pretrain.base.errors import UserError
from capt.pretrain.base.process import with_value_of_resume
from capt.pretrain.config.load import load_mapping, resolve_path
from capt.pretrain.models.architecture import ENCODERS, EncoderConfig, encoder_class
from capt.pretrain.registry import TASKS, job_class
from tests.documented import BLOCK, OURS, PAGES, ROOT, SHELL, blocks, capt_commands, commands

BIN = Path(sys.executable).parent
_OVERRIDE = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)+)=")


def capt_mentions(page: Path) -> Iterator[list[str]]:
    """Words after ``capt`` in running text, which may be a form (``capt resume RUN``) or a part."""
    for inline in re.findall(r"(?<!`)`capt ([^`]+)`", BLOCK.sub("", page.read_text())):
        yield shlex.split(re.sub(r"\[.*?\]|\.\.\.", "", inline.partition(">")[0]))


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that ``words`` call, and the words behind it; fails where there is none."""
    command: Any = typer.main.get_command(app)
    words = with_value_of_resume([word for word in words if word != "--debug"])
    while hasattr(command, "commands") and words and words[0] not in ("--help", "COMMAND"):
        if words[0] not in command.commands and hasattr(command, "default_command"):
            return command.commands[command.default_command], words
        assert words[0] in command.commands, f"capt has no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def check_command(words: list[str]) -> None:
    """Parse a command line against the real commands, options and their types, without running it."""
    command, rest = find_command(words)
    if rest == ["--help"] or hasattr(command, "commands"):
        return
    config = command.make_context(command.name, rest).params.get("config")
    if config is not None and not config.endswith(".yaml"):
        resolve_path(config)


def check_mention(words: list[str]) -> None:
    """Command and options exist."""
    command, rest = find_command(words)
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = {word.partition("=")[0] for word in rest if word.startswith("--")} - known - {"--help"}
    assert not unknown, f"no option {', '.join(unknown)}"


def test_every_capt_command_line_is_accepted() -> None:
    for page in OURS:
        for check, lines in ((check_command, capt_commands(page)), (check_mention, capt_mentions(page))):
            for words in lines:
                try:
                    check(words)
                except (AssertionError, typer.TyperException) as error:
                    raise AssertionError(f"{page.relative_to(ROOT)}: capt {shlex.join(words)}: {error}") from None


@pytest.mark.parametrize(
    "words",
    [
        ["pretrian", "capt_tiny"],
        ["pretrain", "capt_tinny"],
        ["pretrain", "capt_tiny", "--nproc", "0"],
        ["doctor", "-x"],
    ],
)
def test_wrong_command_lines_are_noticed(words: list[str]) -> None:
    with pytest.raises((AssertionError, typer.TyperException, UserError)):
        check_command(words)


def test_the_example_of_each_command_is_accepted() -> None:
    root: Any = typer.main.get_command(app)
    commands = [command for one in root.commands.values() for command in getattr(one, "commands", {None: one}).values()]
    for command in commands:
        example = re.search(r"Example: (.*)", command.epilog)
        assert example, command.name
        words = shlex.split(example[1].split(" > ")[0].split(" | ")[-1])
        assert words[0] == "capt"
        check_command(words[1:])
        if words[1] == "bench":
            find_benchmarks([words[2]])


def test_the_pages_show_every_command() -> None:
    shown = {tuple(words[:depth]) for page in PAGES for words in capt_commands(page) for depth in (1, 2)}
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        # A group's default command is called by the name of the group.
        inner = set(getattr(command, "commands", {})) - {getattr(command, "default_command", "")}
        for path in [(name, each) for each in inner] or [(name,)]:
            assert path in shown, f"no page shows capt {' '.join(path)} in a block"


def test_every_raw_form_is_accepted() -> None:
    """``python -m capt.pretrain ...`` and what ``deepspeed`` and ``torchrun`` start."""
    for page in OURS:
        for command in commands(page):
            marker = next((flag for flag in ("-m", "--module") if flag in command), None)
            if marker is None or command[command.index(marker) + 1] != "capt.pretrain":
                continue
            options = parse(command[command.index(marker) + 2 :])
            if not options.config.isupper():
                resolve_path(options.config)


def test_there_are_raw_forms_and_python_blocks_to_check() -> None:
    assert any("capt.pretrain" in command for page in OURS for command in commands(page))
    assert any("from capt" in body for page in OURS if page.name != "recipes.md" for body in blocks(page, "python"))


def test_every_make_target_exists() -> None:
    for page in OURS:
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
        inline = [shlex.split(text) for text in re.findall(r"`(make [^`]+)`", page.read_text())]
        for command in [*commands(page), *inline]:
            if command[0] == "make":
                assert command[1] in targets, f"{page.relative_to(ROOT)}: make {command[1]}"


@pytest.mark.parametrize(
    ("ours", "asks"),
    [("", "maximum value"), ("TEXT", "opened the door"), ("ARGS=data.files=my.txt", "opened the door")],
)
def test_the_quickstart_searches_for_what_its_text_is_about(ours: str, asks: str, tmp_path: Path) -> None:
    """Questions about functions are for docstrings; no line of a user's own text need answer them."""
    (tmp_path / "my.txt").write_text("text\n")
    words = [f"CAPT_DATA={tmp_path}" if ours == "TEXT" else "CAPT_DATA=", *([ours] if "=" in ours else [])]
    make = ["make", "-n", "-o", "install", "quickstart-text", *words]
    shown = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    search = shown.partition("capt neighbors")[2].partition("capt report")[0]
    assert asks in search
    own = subprocess.run([*make, 'QUERIES="my words"'], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert '"my words"' in own
    assert asks not in own


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key
        annotation: Any = field.annotation
        if get_origin(annotation) is dict:
            key, annotation = f"{key}.NAME", get_args(annotation)[1]
        kinds = [encoder_class(arch) for arch in ENCODERS] if annotation is EncoderConfig else get_args(annotation)
        for kind in kinds or (annotation,):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys(kind, f"{key}.")


SHIPPED = [name for name, package in TASKS.items() if not package.startswith("tests.")]  # others register there too
OWN = {key for model in (Sweep, *map(job_class, SHIPPED)) for key in keys(model)}
KEYS = OWN | {f"sweep.{key}" for key in keys(Sweep)}  # so written on the command line of `capt sweep`


def test_every_key_exists() -> None:
    """Keys of overrides (``a.b=c``), and words in code style that begin with the name of a section."""
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    for page in OURS:
        text = page.read_text()
        named = set(_OVERRIDE.findall(text)) | set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", text))
        for key in named - {"a.b"}:
            if key.split(".")[0] in sections and not key.endswith(
                (".yaml", ".json", ".jsonl", ".txt", ".py", ".onnx", ".safetensors")
            ):
                assert key in KEYS, f"{page.relative_to(ROOT)}: there is no key {key}"


def test_every_override_has_a_section() -> None:
    sections = {key.split(".")[0] for key in KEYS}
    for page in OURS:
        for key in _OVERRIDE.findall("\n".join(blocks(page, *SHELL))):
            assert key.split(".")[0] in sections | {"a"}, f"{page.relative_to(ROOT)}: {key}"


def test_every_yaml_block_is_a_job_or_a_sweep(tmp_path: Path) -> None:
    for page in OURS:
        for body in blocks(page, "yaml"):
            file = tmp_path / "job.yaml"
            file.write_text(body)
            mapping = load_mapping(file)
            model = Sweep if "studies" in mapping else job_class(mapping["task"]["type"])
            model.model_validate(mapping)


def test_every_python_block_runs_or_at_least_compiles() -> None:
    """Blocks that need nothing but this project are run; tests/distributed/test_recipes.py has the recipes."""
    for page in OURS:
        for body in blocks(page, "python"):
            code = compile(body, str(page.relative_to(ROOT)), "exec")
            if "from capt" in body and "def train(" not in body:
                exec(code, {})


def test_every_named_test_exists() -> None:
    for page in OURS:
        for path, name in re.findall(r"`(tests/[\w/]+(?:\.py)?/?)(?:::(\w+))?`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.relative_to(ROOT)}: {path}"
            assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{page.relative_to(ROOT)}: {path}::{name}"


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_links_of_the_pages_outside_the_site_exist(page: Path) -> None:
    """mkdocs checks those of the others."""
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_named_files_exist() -> None:
    for page in OURS:
        for name in re.findall(r"`((?:docker|configs|docs|pretrain|tokenizer|launcher)/[\w./-]*)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.relative_to(ROOT)}: {name}"


def test_quoted_symptoms_are_messages_of_the_code() -> None:
    """The first column of the troubleshooting tables; what replaces a value there is ``...`` or a number."""
    sources = [path for room in ("tokenizer", "pretrain", "launcher") for path in (ROOT / "capt" / room).rglob("*.py")]
    code = "\n".join(path.read_text() for path in sources)
    code = re.sub(r"\{[^{}]*\}", "...", re.sub(r"\"\s*\n\s*f?\"", "", code))
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs/guide/troubleshooting.md").read_text(), re.M)
    foreign = {"Host key verification failed", "Permission denied", "Address already in use", "g++"}
    foreign |= {"connectFullMesh failed", "Connection closed by peer"}  # of torch
    for quoted in {text for row in rows for text in re.findall(r"`([^`]+)`", row)} - foreign:
        for part in re.split(r"\.\.\.|\d+", quoted):
            assert part.strip(" :") in code, f"no message says {part!r}"


def test_readme_names_one_test_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert re.search(r"```sh\nmake test\n```\n\nis the test command", text)
    assert "make test\n" in (ROOT / ".ci" / "run").read_text()


def test_pre_commit_hooks_run_what_is_installed() -> None:
    config = ROOT / ".pre-commit-config.yaml"
    done = subprocess.run([str(BIN / "pre-commit"), "validate-config", str(config)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for repo in yaml.safe_load(config.read_text())["repos"]:
        assert repo["repo"] == "local"
        for hook in repo["hooks"]:
            assert (BIN / Path(hook["entry"].split()[0]).name).is_file()

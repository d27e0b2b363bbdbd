"""The commands that README and the documentation show in shell blocks, taken from the pages."""

from __future__ import annotations

import io
import re
import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Pages that a tool or a study writes show commands of their time, which need not be those of today.
OURS = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name not in ("benchmarks", "results")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
SHELL = ("sh", "bash", "console", "shell")
STARTS = ("pretrain", "resume", "finetune", "sweep")  # by --dry-run: it merges, checks and plans the whole job
OF_FAMILIES = re.compile(
    r"(?<![\w-])(capt (regions|latent|embeddings|predictions) |capt sweep (latent_|vqa)|(ace|ptb|yahoo|yelp)/"
    r"|capt_vl|lxmert|(runs/)?(vqa|gqa|nlvr2?) |words\.|runs/(words|ace|ptb_vae|latent_table1) |\$run )"
)
"""Parts that commands of pictures, latent variables and words have, and no others."""

Makers = Mapping[str, tuple[str, list[str]]]
"""A word of a command -> the folder that it needs, and the command that makes it."""


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The fenced blocks of a page in one of ``languages``."""
    yield from (body for language, body in BLOCK.findall(page.read_text()) if language in languages)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every simple command in a page's shell blocks, without variables that are set before it."""
    for body in blocks(page, *SHELL):
        for line in body.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for command in _split(words, ("|", "&&", "||", ";")):
                while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
                    command = command[1:]
                if ">" in command:
                    command = command[: command.index(">")]
                if command:
                    yield command


def _split(words: list[str], separators: tuple[str, ...]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in words:
        if word in separators:
            yield part
            part = []
        else:
            part.append(word)
    yield part


def capt_commands(page: Path) -> Iterator[list[str]]:
    """Words after ``capt`` in a page's shell blocks, alone or at the end of a ``docker`` command line."""
    for command in commands(page):
        if command[0] == "capt":
            yield command[1:]
        elif command[0] == "docker" and "capt" in command:
            yield command[command.index("capt") + 1 :]


def shown(*, of_families: bool) -> list[str]:
    """The commands of all pages, each once: those of the core, or of families."""
    # tests/e2e/test_papers.py runs those of papers.md, one after the other.
    found = dict.fromkeys(
        shlex.join(command) for page in OURS if page.name != "papers.md" for command in commands(page)
    )
    return [command for command in found if (OF_FAMILIES.search(_plain(command)) is not None) == of_families]


def _plain(command: str) -> str:
    return " ".join(shlex.split(command)) + " "


def reason_of(command: str, not_run: Mapping[str, str]) -> str | None:
    """Return why a command is not run, by its beginning; None where it is run."""
    return next((why for start, why in not_run.items() if _plain(command).startswith(start)), None)


def require_reasons(commands: Collection[str], not_run: Mapping[str, str], unused: Collection[str] = ()) -> None:
    """Require that each reason is of a command that a page shows, but for ``unused``, and names tests that exist."""
    idle = [start for start in not_run if not any(_plain(command).startswith(start) for command in commands)]
    assert set(idle) <= set(unused), "no page shows these any more"
    for why in not_run.values():
        for word in why.replace(";", " ").replace(",", " ").split():
            assert not word.startswith("tests/") or (ROOT / word).exists(), why


def run_shown(
    command: str, smaller: Mapping[str, str], made_by: Makers, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Run a ``capt`` command of a page in the working folder, with some of its words made smaller."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO("A line of text.\n"))
    words = [smaller.get(word, word) for word in shlex.split(command)[1:]]
    _make_what(words, made_by)
    if words[0] == "convert":  # another command may have needed it before
        shutil.rmtree(words[2], ignore_errors=True)
    if words[0] in STARTS:
        words += ["--dry-run"] if "--dry-run" not in words else []
        words += ["run.dir=runs/new"] if words[0] in ("pretrain", "finetune") else []
    capsys.readouterr()
    code = _exit_code(words)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert captured.out.strip() or captured.err.strip(), "it said nothing"


def _make_what(words: list[str], made_by: Makers) -> None:
    """Make what a command needs, and what that needs."""
    for folder, makes in (made_by[word] for word in words if word in made_by):
        if not Path(folder).exists() and words[:2] != makes[:2]:
            _make_what(makes, made_by)
            assert _exit_code(makes) == 0


def _exit_code(words: list[str]) -> object:
    from capt.launcher.cli import main

    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code

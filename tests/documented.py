"""The commands that README and the documentation show in shell blocks, taken from the pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Pages that a tool or a study writes show commands of their time, which need not be those of today.
OURS = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name not in ("benchmarks", "results")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
SHELL = ("sh", "bash", "console", "shell")


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

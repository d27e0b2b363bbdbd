"""Errors and help have colours on a terminal, and nowhere else."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import pytest

from capt.launcher.commands.options import say
from capt.pretrain.base.process import error_line, takes_colours
from tests.documented import ROOT

CAPT = [sys.executable, "-m", "capt.launcher"]
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def on_a_terminal(words: list[str], **env: str) -> str:
    """Output of a command on a terminal."""
    main, end = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    with subprocess.Popen(
        [*CAPT, *words], stdin=end, stdout=end, stderr=end, env={**clean, "TERM": "xterm", **env}, cwd=ROOT
    ):
        os.close(end)
        shown = b""
        while True:
            try:
                chunk = os.read(main, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            shown += chunk
    os.close(main)
    return shown.decode().replace("\r\n", "\n")


def in_a_pipe(words: list[str]) -> str:
    done = subprocess.run([*CAPT, *words], capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout + done.stderr


def test_colours_are_for_terminals() -> None:
    for words in (["report", "--help"], ["report", "/nowhere/at-all"]):
        shown, plain = on_a_terminal(words), in_a_pipe(words)
        assert ANSI.search(shown)
        assert ANSI.sub("", shown) == plain
        assert "\x1b" not in plain
    assert on_a_terminal(words, NO_COLOR="1") == plain


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("env", "colours"), [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)]
)
def test_a_terminal_takes_colours_unless_they_are_refused(
    env: dict[str, str], colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert takes_colours(_Terminal()) == colours
    assert ("\x1b" in error_line("x", _Terminal())) == colours
    assert not takes_colours(io.StringIO())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07x", "\\x1b[2J\\x1b]0;title\\x07x"),
        ("a\rb\x9b1m", "a\\rb\\x9b1m"),
        ("\u202etxt.exe", "\\u202etxt.exe"),
        ("two\n\tlines", "two\n\tlines"),
        ("क्\u200dष 名\u3000前 é\xa0!", "क्\u200dष 名\u3000前 é\xa0!"),
    ],
)
def test_a_terminal_gets_no_control_characters_of_others(
    text: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say(text)
    assert capsys.readouterr().out == f"{shown}\n"

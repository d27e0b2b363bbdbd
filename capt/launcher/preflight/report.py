"""A finding of the checks, and how findings are shown: as a table, or before a launch as log lines and a refusal."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from capt.pretrain.base.errors import MachineError

# One finding of ``capt doctor`` or of the checks before a launch.


Level = Literal["ok", "note", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """A check: ``ok``, ``note`` (fine, but know it), ``warn`` (some jobs suffer) or ``fail`` (nothing will run)."""

    name: str
    level: Level
    finding: str
    advice: str = ""
    host: str = ""
    """The host of a hostfile that it is about; empty for this machine and for all hosts together."""


log = logging.getLogger(__name__)

_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}


def table(checks: Sequence[Check]) -> str:
    """The checks as lines of columns; with colours and the width of the terminal where there is one."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    hosts = any(check.host for check in checks)
    grid = Table(box=None, pad_edge=False)
    for column in ("", "what", *["host"] * hosts, "finding", "advice"):
        grid.add_column(column, overflow="fold")
    for check in checks:
        words = [check.name, *[check.host] * hosts, check.finding, check.advice]
        grid.add_row(Text(check.level, _COLOURS[check.level]), *map(Text, words))
    terminal = sys.stdout.isatty()
    console = Console() if terminal else Console(width=160, file=io.StringIO())
    with console.capture() as captured:
        console.print(grid)
    text = captured.get()
    return text.rstrip("\n") if terminal else "\n".join(line.rstrip() for line in text.splitlines())


def line(check: Check) -> str:
    """Format a check in one line."""
    where = f"{check.host}: " if check.host else ""
    return f"{where}{check.name}: {check.finding}" + (f" ({check.advice})" if check.advice else "")


SWITCH = "; --no-preflight starts the job nevertheless"
"""The end of the error of a command that has this option."""


def refuse(checks: Sequence[Check], switch: str = SWITCH) -> None:
    """Log what is not in order. Raises ``MachineError``: a check failed; with several, each has a line in the log."""
    for check in checks:
        if check.level == "warn":
            log.warning("preflight: %s", line(check))
    failed = [check for check in checks if check.level == "fail"]
    if not failed:
        return
    for check in failed[1:]:
        log.error("preflight: %s", line(check))
    more = f"; {len(failed) - 1} more above" if len(failed) > 1 else ""
    raise MachineError(f"preflight: {line(failed[0])}{more}{switch}")

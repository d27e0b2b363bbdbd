"""What a person watches: a live table on a terminal, a line a finished trial elsewhere."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from capt.launcher.sweep.trials import TrialSpec
from capt.pretrain.base.files import printable
from capt.pretrain.report.sweeps import TrialRecord

log = logging.getLogger(__name__)

_RECENT = 8
_COLOURS = {"done": "green", "failed": "bold red", "pruned": "yellow", "running": "cyan"}


class ProgressTable:
    """The trials that run and those that ended last, how many are left, and how long that may take."""

    def __init__(self, total: int, over: int) -> None:
        self._total, self._over = total, over
        self._rows: dict[str, list[str]] = {}
        self._recent: list[list[str]] = []
        self._began, self._first = time.monotonic(), over
        console = Console(stderr=True)
        self._live = (
            Live(console=console, refresh_per_second=4, get_renderable=self.render) if console.is_terminal else None
        )

    def __enter__(self) -> ProgressTable:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its callbacks when it begins; a terminal cannot be pickled."""
        return {**self.__dict__, "_live": None}

    def running(self, spec: TrialSpec) -> None:
        """A trial has begun or continues."""
        self._rows.setdefault(spec.key, [spec.study, spec.text, "running", "", "", ""])

    def validated(self, spec: TrialSpec, step: int, value: float, best: float) -> None:
        """A trial has validated."""
        self._rows[spec.key] = [spec.study, spec.text, "running", str(step), f"{value:.4g}", f"{best:.4g}"]

    def gone(self, spec: TrialSpec) -> None:
        """A trial is no longer watched."""
        self._rows.pop(spec.key, None)

    def ended(self, spec: TrialSpec, record: TrialRecord) -> None:
        """A trial has ended and was recorded."""
        self.gone(spec)
        self._over += 1
        score = "" if record.score is None else f"{record.score:.4g}"
        self._recent = [
            *self._recent,
            [spec.study, spec.text, record.state, str(record.best_step or ""), "", score],
        ]
        self._recent = self._recent[-_RECENT:]
        if self._live is None:
            text = record.error or f"{record.metric} {score} at step {record.best_step}"
            log.info(
                "%d/%d %s: %s %s: %s (%.0f s)%s",
                self._over, self._total, record.state, spec.study, spec.text, text, record.seconds, self._left(),
            )  # fmt: skip

    def _left(self) -> str:
        done = self._over - self._first
        if not done or self._over >= self._total:
            return ""
        seconds = (time.monotonic() - self._began) / done * (self._total - self._over)
        return f", about {timedelta(seconds=round(seconds))} left"

    def render(self) -> Group:
        """The table as it is now."""
        grid = Grid(box=None, pad_edge=False)
        for column in ("study", "trial", "state", "step", "metric", "best"):
            grid.add_column(column)
        for row in [*self._recent, *self._rows.values()]:
            grid.add_row(
                *(Text(printable(cell), _COLOURS.get(cell, "") if index == 2 else "") for index, cell in enumerate(row))
            )
        return Group(grid, Text(f"{self._over} of {self._total} trials over{self._left()}", "bold"))

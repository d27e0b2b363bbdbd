"""One finding of ``capt doctor`` or of the checks before a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One line: ``ok``, ``note`` (fine, but know it), ``warn`` (some jobs suffer) or ``fail`` (nothing will run)."""

    name: str
    level: Level
    finding: str
    advice: str = ""
    host: str = ""
    """The host of a hostfile that it is about; empty for this machine and for all hosts together."""

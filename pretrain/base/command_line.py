"""Words of a command line, before any configuration is read: ``capt`` and the ranks understand them alike."""

from __future__ import annotations

from collections.abc import Sequence


def with_value_of_resume(words: Sequence[str]) -> list[str]:
    """A command line in which ``--resume`` has a value: ``auto`` where that follows it, else ``always``."""
    result: list[str] = []
    for word in words:
        if word == "auto" and result[-1:] == ["--resume=always"]:
            result[-1] = "--resume=auto"
        else:
            result.append("--resume=always" if word == "--resume" else word)
    return result

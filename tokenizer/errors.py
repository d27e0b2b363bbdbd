"""Errors that a user can cause, at the bottom of the import graph so that every package may raise them.

The command line prints such an error as one line (no stack trace unless ``--debug``) and exits with 2.
Its text says what was wrong, where (file, key, line), and what would be right.
"""

from collections.abc import Sequence
from difflib import get_close_matches


class UserError(ValueError):
    """Something the user wrote, passed or pointed at is wrong. Exit code 2."""


class ConfigError(UserError):
    """A configuration key, value or combination of values is not valid."""


class DataError(UserError):
    """A corpus, shard, tokenizer or data file is missing, damaged or does not fit the job."""


class CheckpointError(UserError):
    """A checkpoint is damaged, incomplete, or belongs to another model, tokenizer or run."""


def instead_of(name: str, known: Sequence[str], otherwise: str = "known:") -> str:
    """What to write instead of ``name``: the nearest that is known, or ``otherwise`` and all of them."""
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {', '.join(known)}"

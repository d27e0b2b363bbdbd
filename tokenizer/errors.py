"""Errors that a user can cause, at the bottom of the import graph so that every package may raise them.

The command line prints such an error as one line (no stack trace unless ``--debug``) and exits with 2.
Its text says what was wrong, where (file, key, line), and what would be right.
"""

import errno
from collections.abc import Sequence
from difflib import get_close_matches


class UserError(ValueError):
    """Something the user wrote, passed or pointed at is wrong. Exit code 2."""

    everywhere = False
    """Raised on every rank of a job alike, so that one of them says it for all."""


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


_USER_ERRNOS = {
    errno.EACCES: "",
    errno.EDQUOT: "free some space, or use another disk",
    errno.EEXIST: "",
    errno.EINVAL: "",
    errno.EIO: "the device is failing: look at dmesg",
    errno.EISDIR: "",
    errno.ELOOP: "a link stands where none is followed",
    errno.EMFILE: "raise the limit: ulimit -n 65536",
    errno.ENAMETOOLONG: "",
    errno.ENODEV: "",
    errno.ENOENT: "",
    errno.ENOSPC: "free some space, or use another disk",
    errno.ENOTDIR: "",
    errno.ENXIO: "",
    errno.EPERM: "",
    errno.EROFS: "",
    errno.ESTALE: "the network file system has lost the file",
}
"""Errors of the system that a path, a disk or a limit causes, with a remedy where the system's words give none."""


def user_text(error: BaseException) -> str | None:
    """One line for an error that the user can set right; None for what is a fault of this program.

    The one mapping for the command line and the ranks: a `UserError` speaks for itself, and so does an ``OSError`` of
    the kinds above.
    """
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in _USER_ERRNOS:
        remedy = _USER_ERRNOS[error.errno]
        where = " ".join(str(error.filename).split()) if error.filename is not None else "file"
        return f"{where}: {error.strerror}" + (f"; {remedy}" if remedy else "")
    return None

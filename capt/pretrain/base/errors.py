"""Errors that a user can cause, at the bottom of the import graph so that every package may raise them.

The command line prints such an error as one line (no stack trace unless ``--debug``) and exits with 2.
Its text says what was wrong, where (file, key, line), and what would be right.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path


class UserError(ValueError):
    """Something the user wrote, passed or pointed at is wrong. Exit code 2."""

    everywhere = False
    """Raised on every rank of a job alike, so that one of them says it for all."""
    passing = False
    """True if the cause may pass by itself (`is_passing`)."""
    outside = False
    """True if it is about something outside of the job (`is_outside`)."""


class ConfigError(UserError):
    """A configuration key, value or combination of values is not valid."""


class MachineError(ConfigError):
    """Something of a machine is taken, missing or too small for the job: a port, a GPU, a host, shared memory."""

    outside = True


class LockedError(MachineError):
    """Another process holds a folder: it may be about to end. Of a run that has begun the exit code is 75."""


class DataError(UserError):
    """A corpus, shard, tokenizer or data file is missing, damaged or does not fit the job."""

    outside = True


class CheckpointError(UserError):
    """A checkpoint is damaged, incomplete, or belongs to another model, tokenizer or run."""


class MissingModelError(CheckpointError):
    """A model that a job begins with, or a file of it, is not there, or the hub that has it does not give it."""

    outside = True


class NoSpaceError(CheckpointError):
    """A disk, a quota or a table of inodes is full: what could not be written now may be written later."""

    outside = True


def shown(value: object, limit: int = 100) -> str:
    """A value as an error message quotes it: ``repr``, cut to ``limit`` characters, so that a line stays a line."""
    # Cut before it is quoted: a value may be long.
    if isinstance(value, str | bytes):
        value = value[: limit + 1]
    elif isinstance(value, int) and value.bit_length() > 4 * limit:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print more than 4,300 digits
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def quoted(word: object) -> str:
    """A path or an argument as a shell reads it back, for every command that a message offers to be pasted."""
    text = str(word)
    return shlex.quote(f"./{text}" if isinstance(word, Path) and text.startswith("-") else text)


def counted(number: int, noun: str) -> str:
    """``1 file``, ``2 files``, ``2 queries``."""
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{number:,} {noun}"


class RunFailedError(RuntimeError):
    """A run has ended for a reason that the text tells in full. Exit code 1, no stack trace."""

    everywhere = True
    """True if all ranks raise it alike, so that one of them speaks for all."""
    passing = False
    """True if the cause may be gone when the run is started again from its newest checkpoint (a fault of a machine)."""


def did_you_mean(name: str, known: Sequence[str], otherwise: str = "known:") -> str:
    """Suggest the known name nearest to ``name``, or else write ``otherwise`` and all of them."""
    near = get_close_matches(name[:100], known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {names_in(known)}"


def names_in(known: Sequence[str], most: int = 100) -> str:
    """The names of a list, as a line has room for: a table may have a million columns."""
    more = f", and {len(known) - most:,} more" if len(known) > most else ""
    return ", ".join(name[:100] for name in known[:most]) + more


def repeated(names: Iterable[str]) -> str | None:
    """The first name that comes again later; None where each comes once."""
    names = list(names)
    if len(set(names)) == len(names):
        return None
    counts = Counter(names)
    return next(name for name in names if counts[name] > 1)


FILE_LIMIT = "raise the limit of the size of a file (ulimit -f unlimited), or use a disk that takes larger ones"
_USER_ERRNOS = {
    errno.EACCES: "",
    errno.EAGAIN: "raise the limit of processes and threads: ulimit -u",
    errno.EDQUOT: "your quota on this disk is used up (quota -s): free some space, or use another disk",
    errno.EEXIST: "",
    errno.EFBIG: FILE_LIMIT,
    errno.EHOSTDOWN: "the file server does not answer",
    errno.EINVAL: "",
    errno.EIO: "the device is failing: look at dmesg",
    errno.EISDIR: "",
    errno.ELOOP: "there is a link where none is followed",
    errno.EMFILE: "raise the limit: ulimit -n 65536",
    errno.ENAMETOOLONG: "",
    errno.ENFILE: "raise the limit of this host: sysctl fs.file-max",
    errno.ENODEV: "",
    errno.ENOENT: "",
    errno.ENOSPC: "free some space, or use another disk",
    errno.ENOTCONN: "the file server does not answer",
    errno.ENOTDIR: "",
    errno.ENXIO: "",
    errno.EPERM: "",
    errno.EREMOTEIO: "the file server is failing",
    errno.EROFS: "",
    errno.ESHUTDOWN: "the file server does not answer",
    errno.ESTALE: "the network file system has lost the file",
    errno.ETIMEDOUT: "the file server does not answer",
}
"""Errors of the system that a path, a disk or a limit causes, with a remedy where the system's words give none."""
_NO_INODES = "no inodes are left on this disk (df -i): remove some files, or use another disk"
_MACHINE_ERRNOS = {
    errno.EHOSTDOWN, errno.EIO, errno.ENOTCONN, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ESTALE, errno.ETIMEDOUT
}  # fmt: skip


def expect_writable_disks() -> None:
    """Count a read-only disk as a fault of a machine from now on: this process has written to its disks before."""
    _MACHINE_ERRNOS.add(errno.EROFS)


def is_passing(error: BaseException | None) -> bool:
    """Return whether a machine is at fault (a disk that fails, a file server that is away), and not what a user wrote.

    A job that ends for it ends with 1, and may go well when it is started again.
    """
    while error is not None:
        if getattr(error, "passing", False) or (isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS):
            return True
        error = error.__cause__
    return False


def is_outside(error: BaseException | None) -> bool:
    """Return whether an error is about a thing that the job only uses: files, packages, ports, locks, hosts, stores."""
    while error is not None:
        if getattr(error, "outside", False) or isinstance(error, OSError | ModuleNotFoundError):
            return True
        error = error.__cause__
    return False


@contextmanager
def machines_at_fault(has_begun: Callable[[], bool]) -> Iterator[None]:
    """Count what the block finds missing, taken or full as a fault of a machine, where the run ``has_begun``.

    Such a run has had all of it before, and its user has typed nothing since that could be wrong: the job is tried
    again. At a first start the same error is one of the user, exit code 2.
    """
    try:
        yield
    except Exception as error:
        if is_outside(error) and has_begun():
            error.passing = True  # type: ignore[attr-defined]
        raise


_NAMELESS = {
    errno.EAGAIN: "a new process or thread",
    errno.EMFILE: "this process",
    errno.ENFILE: "this host",
    errno.ENOSPC: "a file, the output, or shared memory (/dev/shm)",
}
"""Subjects of errors that name no file, by number."""


def user_text(error: BaseException) -> str | None:
    """Return a line for an error that the user can set right; None for a fault of this program.

    The one mapping for the command line and the ranks: a `UserError` speaks for itself, and so does an ``OSError`` of
    the kinds above. A package that an extra would install is named with the extra.
    """
    if isinstance(error, UserError):
        return _line(error)
    if isinstance(error, ModuleNotFoundError):
        return missing_package(error)
    # Python's own words where the system refuses a thread.
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        error = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    if isinstance(error, OSError) and error.errno in _USER_ERRNOS:
        remedy = space_remedy(error.errno, error.filename) or _USER_ERRNOS[error.errno]
        nameless = _NAMELESS.get(error.errno, "file")
        where = _line(error.filename) if error.filename is not None else nameless
        return f"{where}: {error.strerror}" + (f"; {remedy}" if remedy else "")
    return None


def space_remedy(number: int, path: str | bytes | os.PathLike[str] | None) -> str:
    """Return a remedy for a write that failed for want of space, inodes or quota; empty for other errors.

    The system has one error for a disk without space and for one without inodes.
    """
    if number not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    if number == errno.ENOSPC and path is not None:
        folder = os.path.dirname(os.path.abspath(os.fsdecode(path)))
        # The folders of the file may not be made yet: the nearest that is there tells.
        while not os.path.isdir(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        with suppress(OSError):
            found = os.statvfs(folder)
            if found.f_files and not found.f_favail:  # some file systems have no fixed number, and say 0
                return _NO_INODES
    return _USER_ERRNOS[number]


_BREAK = re.compile(r"\s*[\n\r\t\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
"""A line break with the indentation around it; spaces elsewhere may belong to a path."""


def _line(value: object, limit: int = 1000) -> str:
    """Return a printable line: terminals act on control characters, and a name of a megabyte hides the message."""
    text = _BREAK.sub(" ", str(value)).strip()
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


# Which extra of the distribution installs a package that cannot be imported.


_EXTRAS = {
    "models": (
        "fsspec", "google", "huggingface_hub", "packaging", "pyarrow", "pydantic", "rich", "sentencepiece",
        "tokenizers", "transformers", "typer", "yaml",
    ),
    "train": ("datasets", "deepspeed", "scipy", "sklearn", "tensorboard"),
    "sweep": ("optuna", "ray"),
    "report": ("matplotlib",),
    "export": ("sentence_transformers",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "retrieval": ("bm25s",),
    "ann": ("faiss",),
    "fairscale": ("fairscale",),
    "lora": ("peft",),
    "mteb": ("mteb",),
    "vision": ("PIL",),
    "duplicates": ("datasketch",),
    "prepare": ("zstandard",),
    "kubernetes": ("kubernetes",),
    "track": ("mlflow", "wandb"),
}  # fmt: skip
EXTRA_OF = {package: extra for extra, packages in _EXTRAS.items() for package in packages}
"""The name under which a package is imported -> the extra of pyproject.toml that installs it."""


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Say in a sentence what to install for an import that failed; None for a module that belongs to no extra."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA_OF:
        return None
    return f"the package {package} is not installed: {how_to_install(EXTRA_OF[package])}"


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of the checkout."""
    return f"pip install '.[{extra}]' in a checkout"

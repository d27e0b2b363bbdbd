"""The environment that is forwarded to other hosts. Only this file of the launcher reads environment variables.

DeepSpeed's launcher writes the forwarded variables into the command line of a remote shell: everyone on the hosts can
read them with ``ps``, and the shell executes what looks like a command. So only listed names are forwarded, secrets
stay on this host, and there values that a shell would interpret are refused; ``--launcher ssh`` sends any value. A
``.deepspeed_env`` in the working folder may be somebody else's: it can set a flag or a network interface, but no file
or folder from which code would be loaded.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import read_text
from capt.pretrain.base.process import SPIN_COUNT, SPINS, WAIT_POLICY, without_launchers
from capt.pretrain.base.sensitive import is_secret

log = logging.getLogger(__name__)

OWN_NAMES = "CAPT_TRAVELS"
"""The variable in which a user lists further names, separated by commas."""

_PREFIXES = ("CAPT_", "GLOO_", "HF_DATASETS_", "HF_HUB_", "HF_XET_", "NCCL_", "TORCH_", "UCX_")
THREADS = "OMP_NUM_THREADS"
"""The variable by which a user says the threads of a process; Ray and torchrun set it to 1 where nobody has."""
_FLAGS = frozenset({SPIN_COUNT, THREADS, "TOKENIZERS_PARALLELISM", WAIT_POLICY})
_PLACES = frozenset({"CUDA_HOME", "HF_ENDPOINT", "HF_HOME", "LD_LIBRARY_PATH", "PYTHONPATH"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLACE = re.compile(r"CACHE|CONF|DIR|FILE|HOME|LIB|MODULE|PATH|PIPE|PLUGIN|PRELOAD|ROOT")
_UNSAFE = re.compile(r"""["'`$\\;&|<>()\[\]{}*?!#~]|[^ -~]""")
_EXPORT = re.compile(r"^export[ \t]+")
_COMMENT = re.compile(r"(^|[ \t]+)#.*")
_MAX_BYTES = 1 << 16


def inherited() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def of_ranks(*, within_slurm: bool = False) -> dict[str, str]:
    """The environment that ranks on this host inherit: that of this process without other launchers' variables."""
    return without_launchers(os.environ, within_slurm=within_slurm)


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs a process on this host would see: ``CUDA_VISIBLE_DEVICES``, else all of the host's devices."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device for device in chosen.split(",") if device.strip() not in ("", "-1")]
    return sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))


def forwarded_env(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``environment`` that a job on other hosts gets: the listed names, without what looks secret."""
    own = _own_names(environment)
    result: dict[str, str] = {}
    for name in sorted(filter(_NAME.fullmatch, environment)):  # of another name a comma would list a second one
        if (name, environment[name]) == (SPIN_COUNT, SPINS):
            continue  # this process's own: a rank sets it, unless its host says otherwise
        listed = name in own or name in _FLAGS or name in _PLACES or name.startswith(_PREFIXES)
        if not is_secret(name, environment[name]):
            result |= {name: environment[name]} if listed else {}
        elif listed or name == "HF_TOKEN":
            log.warning("%s looks like a secret and stays on this host; log in on each host instead", name)
    return result


def forwarded_to_hosts(
    environment: Mapping[str, str], folders: tuple[Path, ...], *, through_shell: bool = False
) -> dict[str, str]:
    """Return the variables for every host: ``forwarded_env``, then the lines of ``.deepspeed_env`` files.

    Like DeepSpeed, ``$DS_ENV_FILE`` names another file, and later ``folders`` win. Variables that look like secrets
    are left out with a warning; written into a ``.deepspeed_env`` they are an error, and so are names that are not on
    the list for files: flags, and the prefixes where the name is not that of a file or folder and the value no path.

    Raises:
        ConfigError: a file's line is not ``NAME=value`` with such a name; or, with ``through_shell``, a value holds
            characters that the shell of a host would interpret.
    """
    result, own = forwarded_env(environment), _own_names(environment)
    where = {name: f"environment variable {name}" for name in result}
    for folder in folders:
        path = folder / environment.get("DS_ENV_FILE", ".deepspeed_env")
        found = _env_file(path, own)
        result |= found
        where |= {name: f"{path}: {name}" for name in found}
    return {name: shell_safe(value, where[name]) for name, value in result.items()} if through_shell else result


def shell_safe(value: str, what: str) -> str:
    """``value``, if a shell takes it as it is between double quotes; else raises ``ConfigError`` naming ``what``."""
    found = _UNSAFE.search(value)
    if found:
        raise ConfigError(
            f"{what} holds {found.group()!r}, which the remote shell would interpret; "
            "use letters, digits, spaces and @%+=:,./^_- only, or --launcher ssh"
        )
    return value


def _own_names(environment: Mapping[str, str]) -> frozenset[str]:
    return frozenset(name.strip() for name in environment.get(OWN_NAMES, "").split(","))


def _env_file(path: Path, own: frozenset[str]) -> dict[str, str]:
    if not path.exists():
        return {}
    result: dict[str, str] = {}
    text = read_text(path, limit=_MAX_BYTES, error=ConfigError)
    for number, line in enumerate(text.split("\n"), start=1):
        line, where = _EXPORT.sub("", line.strip(), count=1), f"{path}, line {number}"
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name, value = name.strip(), _value(value.strip(), where)
        if not equals or not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: not of the form NAME=value")
        if is_secret(name, value):
            raise ConfigError(f"{where}: {name} looks like a secret; it would appear in the process list of every host")
        if name not in own and not _is_setting(name, value):
            raise ConfigError(
                f"{where}: {name[:80]} may load code or name a file, or is not known to be needed: "
                f"export it yourself and list it in {OWN_NAMES}={name[:80]}"
            )
        result[name] = value
    return result


def _value(text: str, where: str) -> str:
    """The value after ``NAME=``, as a shell would read the line: without quotes and without a comment."""
    if text[:1] in ("'", '"'):
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            words = []
        if len(words) != 1:
            raise ConfigError(f"{where}: a value in quotes ends with the same quote, and only a comment may follow it")
        expands, text = text[0] == '"', words[0]
    else:
        expands, text = True, _COMMENT.sub("", text)
    if expands and (found := re.search(r"[$`]", text)):
        raise ConfigError(f"{where}: {found.group()!r} is not expanded; write the value itself, or in single quotes")
    return text


def _is_setting(name: str, value: str) -> bool:
    """Return whether a file may set this variable: a flag or number, and nothing that loads code or files."""
    return "/" not in value and (name in _FLAGS or (name.startswith(_PREFIXES) and not _PLACE.search(name)))

"""The environment that travels to other hosts. This is the launcher's only file that reads environment variables.

A multi-host launcher writes what travels into the command line of a remote shell: everyone on the hosts can read it
with ``ps``, and the shell executes what looks like a command. So names are on a list, secrets stay at home, and
values that a shell would read are refused.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from tokenizer.errors import ConfigError

log = logging.getLogger(__name__)

_PREFIXES = ("CAPT_", "GLOO_", "HF_", "NCCL_", "TORCH_", "UCX_")
_NAMES = frozenset({"CUDA_HOME", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PYTHONPATH", "TOKENIZERS_PARALLELISM"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE|_KEY$|AUTH", re.IGNORECASE)
_USERINFO = re.compile(r"://[^/\s]*@")
_UNSAFE = re.compile(r"""["'`$\\;&|<>()\[\]{}*?!#~]|[^ -~]""")


def inherited() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs a process on this host would see: ``CUDA_VISIBLE_DEVICES``, else all of the host's devices."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device for device in chosen.split(",") if device.strip() not in ("", "-1")]
    return sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))


def travelling(environment: Mapping[str, str], folders: tuple[Path, ...]) -> dict[str, str]:
    """The variables that go to every host: the listed ones of ``environment``, then those of ``.deepspeed_env`` files.

    Like DeepSpeed, ``$DS_ENV_FILE`` names another file, and later ``folders`` win. Variables that look like secrets
    are left out with a warning; written into a ``.deepspeed_env`` they are an error.

    Raises:
        ConfigError: a value holds characters that a shell would interpret, or a file's line is not ``NAME=value``.
    """
    result: dict[str, str] = {}
    for name in sorted(environment):
        if name not in _NAMES and not name.startswith(_PREFIXES):
            continue
        if is_secret(name, environment[name]):
            log.warning("%s looks like a secret and stays on this host; log in on each host instead", name)
            continue
        result[name] = shell_safe(environment[name], f"environment variable {name}")
    for folder in folders:
        result |= _env_file(folder / environment.get("DS_ENV_FILE", ".deepspeed_env"))
    return result


def is_secret(name: str, value: str) -> bool:
    """True for a name that says secret (token, key, password), or a URL with a password in it."""
    return bool(_SECRET.search(name) or _USERINFO.search(value))


def shell_safe(value: str, what: str) -> str:
    """``value``, if a shell takes it as it is between double quotes; else raises ``ConfigError`` naming ``what``."""
    found = _UNSAFE.search(value)
    if found:
        raise ConfigError(
            f"{what} holds {found.group()!r}, which the remote shell would interpret; "
            "use letters, digits, spaces and @%+=:,./^_- only"
        )
    return value


def _env_file(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    result: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        name, equals, value = line.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not _NAME.fullmatch(name):
            raise ConfigError(f"{path}, line {number}: not of the form NAME=value")
        if is_secret(name, value):
            raise ConfigError(
                f"{path}, line {number}: {name} looks like a secret; it would stand in the process list of every host"
            )
        result[name] = shell_safe(value, f"{path}, line {number}: {name}")
    return result

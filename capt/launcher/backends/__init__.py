"""The registry of launchers: a plain dict from the name of ``--launcher`` to the module that starts the processes.

A launcher is a module with the two functions of :class:`capt.launcher.plan.Backend`. ``SPARES = True`` in it says that
it takes ``--nodes``, ``ELSEWHERE = True`` that its ranks see other files than this machine. Other distributions add
launchers through the entry-point group ``capt.launchers`` (name = the value of ``--launcher``, value = the module).
"""

from __future__ import annotations

import importlib
from typing import Any

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.registry import load_entry, look_up

LAUNCHERS = {
    "local": "capt.launcher.backends.local",
    "ssh": "capt.launcher.backends.ssh",
    "deepspeed": "capt.launcher.backends.deepspeed",
    "torchrun": "capt.launcher.backends.torchrun",
    "slurm": "capt.launcher.backends.slurm",
    "srun": "capt.launcher.backends.srun",
    "ray": "capt.launcher.backends.ray",
    "kubernetes": "capt.launcher.backends.kubernetes",
}

WORK_LAUNCHERS = ("local", "ssh", "srun")
"""Launchers of ranks for commands that are no jobs, such as ``capt encode``."""


def backend(name: str) -> Any:
    """The module of a launcher, a :class:`capt.launcher.plan.Backend`.

    Raises:
        ConfigError: there is no launcher of that name, or its module cannot be imported or lacks a function.
    """
    path = look_up(name, LAUNCHERS, "capt.launchers", "--launcher: unknown launcher")
    if name in LAUNCHERS:  # an error in it is ours, and keeps its traceback
        module = importlib.import_module(path)
    else:
        module = load_entry(path, "capt.launchers", f"--launcher {name}", "a module")
    missing = [function for function in ("plan", "start") if not hasattr(module, function)]
    if missing:
        raise ConfigError(f"--launcher {name}: its module {path!r} has no function {missing[0]}, as a launcher must")
    return module

"""The ways to start a job's processes. A backend is a module with two functions, named in ``BackendName``."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from launcher.plan import BackendName, End, Launch, Plan


class Backend(Protocol):
    """What every backend module offers."""

    def plan(self, launch: Launch) -> Plan:
        """Work out and check a launch without starting anything. Raises ``ConfigError``."""

    def start(self, launch: Launch, plan: Plan) -> End:
        """Carry the plan out; the job's exit code is 0, 1, 2 or 75."""


def backend(name: BackendName) -> Backend:
    """The backend module of that name."""
    return cast(Backend, importlib.import_module(f"launcher.backends.{name}"))

"""``capt`` whose trials are those of ``tests.sweep.job``."""

from __future__ import annotations

import functools

from capt.launcher import cli
from capt.launcher.sweep import run

run.run_sweep = functools.partial(run.run_sweep, module="tests.sweep.job")

if __name__ == "__main__":
    cli.main()

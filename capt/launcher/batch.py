"""``python -m capt.launcher.batch MODULE ARGUMENT...``: the head of a job in its Slurm allocation, run by the batch
script.

It starts the ranks on the nodes of the allocation, watches them, and starts them again where one dies or hangs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from capt.launcher.allocation import Allocation
from capt.launcher.backends import backend
from capt.launcher.backends.slurm import SCRIPT
from capt.launcher.plan import UNATTENDED, Launch, Options
from capt.launcher.restart import has_gone_back
from capt.launcher.start import carry_on
from capt.pretrain.__main__ import parse, read_job
from capt.pretrain.base.errors import machines_at_fault, user_text
from capt.pretrain.engine.run_folder import exit_code_of


def main(arguments: Sequence[str]) -> int:
    """Run the job of these arguments of its ranks; returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="[capt] %(message)s", stream=sys.stderr)
    module, *words = arguments
    given, allocation = parse(words), Allocation.here()
    try:
        # A job that Slurm has queued again has found its files before.
        with machines_at_fault(lambda: allocation.restarts > 0):
            job = read_job(given)
            # Nobody is there to name an older checkpoint where the newest is damaged.
            if given.resume == "always" and allocation.restarts:
                words = [*_newest_once_gone_back(words), *UNATTENDED]
            # A task of an array has a folder of its own.
            options = Options.read(Path(given.config).parent / "launch.json")
        launch = Launch(module, tuple(words), job, options)
        return carry_on(launch, backend("srun"), name_of_job=allocation.own_id)
    except Exception as error:
        text = user_text(error)
        if text is None or given.debug:
            raise
        sys.stderr.write(f"error: {text}\n")
        return exit_code_of(error)


def _newest_once_gone_back(words: list[str]) -> list[str]:
    """The arguments of a requeued job without ``--checkpoint``, if the run has gone back to that checkpoint already.

    It has when no later checkpoint is older than the batch script, which was written when the job was submitted.
    """
    given = parse(words)
    if given.checkpoint is None:
        return words
    run = Path(given.config).parent
    if not has_gone_back(run, given.checkpoint, (run / SCRIPT).stat().st_mtime_ns):
        return words
    at = words.index("--checkpoint")
    return [*words[:at], *words[at + 2 :]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

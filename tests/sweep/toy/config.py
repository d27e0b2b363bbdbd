"""Configuration of the sweeps' toy task."""

from __future__ import annotations

from capt.pretrain.config.schema import Job


class SweepToyJob(Job):
    """A job with a pace and a fault."""

    pace: float = 0.02
    """Seconds a step."""
    fail_seed: int = 0
    """The seed whose runs fail."""
    flaky_seed: int = 0
    """The seed whose runs fail when they are started the first time."""
    reports: str = "accuracy"
    hold: str = ""
    """A file. While it is there, runs of at most the learning rate that it names wait at their first checkpoint."""


JOB = SweepToyJob

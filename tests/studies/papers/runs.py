"""Runs as the papers' tables read them: the best of a sweep, with the defaults of their jobs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from capt.pretrain.base.errors import DataError
from capt.pretrain.config import flat_keys
from capt.pretrain.config.load import load_job
from capt.pretrain.report.runs import RunRecord, read_run
from capt.pretrain.report.sweeps import Configuration, SweepRecord


def with_defaults(run: RunRecord) -> RunRecord:
    """Complete the configuration of ``run`` with the defaults of its job. Raises ``ConfigError`` where it is none."""
    job = load_job(str(run.folder / "config.yaml"), resolved=True)
    return replace(run, config=flat_keys(job))


def best_runs(sweeps: Sequence[SweepRecord], task: str) -> list[list[RunRecord]]:
    """Read the finished runs of the best configuration of each study of jobs of ``task``, one list per study.

    Runs whose folder was removed, or is on another machine, are left out.
    """
    bests = [study.best for sweep in sweeps for study in sweep.studies if study.config.get("task.type") == task]
    return [_runs_of(best) for best in bests if best is not None]


def _runs_of(configuration: Configuration) -> list[RunRecord]:
    runs = []
    for trial in configuration.trials:
        with suppress(DataError):
            runs += [read_run(trial.path)] if trial.done else []
    return runs

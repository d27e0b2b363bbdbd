"""Rates of a device from runs that were measured on it, in place of assumptions; and predicted against measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from capt.pretrain.base.errors import ConfigError, DataError, shown
from capt.pretrain.config.load import load_job
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.metrics_file import METRICS
from capt.pretrain.engine.provenance import is_processor
from capt.pretrain.engine.run_folder import CONFIG, require_run
from capt.pretrain.plan.devices import CENTRAL, DEVICES, Assumptions, Case, Cluster, cluster, device_named
from capt.pretrain.plan.predict import Prediction, predict
from capt.pretrain.report.runs import read_run

_FITTED = 3
"""Runs from which on three rates are fitted, and not one factor."""
_LEAST_SPREAD = 0.05


@dataclass(frozen=True)
class Measured:
    """A run that was measured, and what is predicted of it."""

    name: str
    job: Job
    cluster: Cluster
    seconds: float

    @property
    def prediction(self) -> Prediction:
        """The prediction with the assumptions of the central case."""
        return predict(self.job, self.cluster, {"central": CENTRAL, "slow": CENTRAL, "fast": CENTRAL})


def measured(folder: Path) -> Measured:
    """The job of a run, its devices, and the median time of a step.

    Raises:
        ConfigError: ``folder`` is not a run folder, or the run was on a GPU of an unknown kind.
        DataError: the run has logged no ``seconds_per_step`` after its first row and after ``batch.ramp``, or has no
            checkpoint, which names the devices.
    """
    require_run(folder)
    run = read_run(folder)
    seconds = run.of_whole_steps("seconds_per_step")
    if not seconds:
        raise DataError(
            f"{folder / METRICS}: no row with seconds_per_step after the first one and after batch.ramp, which a "
            "calibration needs: lower run.log_every, or train for more steps"
        )
    if run.checkpoint is None:
        raise DataError(
            f"{folder}: no checkpoint, which would say on how many and which devices the run was; "
            "train it to its first one (checkpoint.every)"
        )
    hardware = run.checkpoint.provenance.get("hardware", "")
    found = device_named(hardware)
    if found is None and hardware and not is_processor(hardware):
        raise ConfigError(
            f"--calibrate {folder}: the run was on {shown(hardware)}, which capt plan has no peaks of; "
            f"name runs on {', '.join(DEVICES)}"
        )
    kind = "cpu" if found is None else found.name
    job = load_job(folder / CONFIG, resolved=True)
    return Measured(str(folder), job, cluster(f"{run.checkpoint.world_size}x{kind}"), statistics.median(seconds))


def calibrated(runs: Sequence[Measured], kind: str) -> Mapping[Case, Assumptions]:
    """The assumptions that explain what was measured: one factor of time, or from three runs on three rates.

    The least squares of relative errors over the rates of products, of bytes and of operators, none below 0. The slow
    and the fast case are off by the largest error of a run that was fitted.

    Raises:
        ConfigError: a run was not measured on devices of this kind.
    """
    for run in runs:
        if run.cluster.device.name != kind:
            raise ConfigError(f"--calibrate {run.name}: a run on {run.cluster.device.name}, not on {kind}")
    equations, fixed = [], []
    for run in runs:
        time = run.prediction.times["central"]
        equations.append([time.products, time.between + time.update, time.launches])
        fixed.append(time.zero + time.contrast)
    own = [max(run.seconds - wire, 0.1 * run.seconds) for run, wire in zip(runs, fixed, strict=True)]
    relative = np.array(equations) / np.array(own)[:, None]
    factors = _not_negative(relative) if len(runs) >= _FITTED else _one_factor(relative, runs[0].cluster.device.is_gpu)
    products, between, launch = map(float, factors)
    central = replace(
        CENTRAL,
        products=CENTRAL.products / products,
        memory=CENTRAL.memory / between,
        launch=CENTRAL.launch * launch,
    )
    errors = [abs(float(row @ factors) - 1) for row in relative] if not runs[0].cluster.device.is_gpu else []
    spread = max([_LEAST_SPREAD, *errors])
    slow, fast = replace(central, scale=1 + spread), replace(central, scale=1 - min(spread, 0.9))
    return {"central": central, "slow": slow, "fast": fast}


def _one_factor(relative: np.ndarray, overlaps: bool) -> np.ndarray:
    """The factor of all three parts: the geometric mean over the runs."""
    sums = np.maximum(relative[:, 0] + relative[:, 1], relative[:, 2]) if overlaps else relative.sum(1)
    return np.full(3, float(np.exp(-np.log(sums).mean())))


def _not_negative(relative: np.ndarray) -> np.ndarray:
    """The least squares of ``relative @ factors = 1`` with no factor below 0: the best over the sets that are not 0."""
    best, least = np.full(3, 1e-9), np.inf
    for size in (1, 2, 3):
        for chosen in itertools.combinations(range(3), size):
            columns = relative[:, chosen]
            found, *_ = np.linalg.lstsq(columns, np.ones(len(relative)), rcond=None)
            error = float(np.square(columns @ found - 1).sum())
            if (found > 0).all() and error < least:
                least, best = error, np.full(3, 1e-9)
                best[list(chosen)] = found
    return best


def cases(runs: Sequence[Path], kind: str) -> Mapping[Case, Assumptions]:
    """The assumptions of ``--calibrate``."""
    return calibrated([measured(folder) for folder in runs], kind)

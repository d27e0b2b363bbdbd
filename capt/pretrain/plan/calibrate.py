"""Rates of a device from runs that were measured on it, in place of assumptions; and predicted against measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, counted, quoted, shown
from capt.pretrain.config.load import load_job
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.checkpoint import read_manifest
from capt.pretrain.engine.metrics_file import METRICS
from capt.pretrain.engine.provenance import is_processor
from capt.pretrain.engine.run_folder import CONFIG, require_run
from capt.pretrain.engine.step_folders import checkpoints_of
from capt.pretrain.plan.devices import CENTRAL, DEVICES, Assumptions, Case, Cluster, cluster, device_named
from capt.pretrain.plan.predict import Prediction, predict
from capt.pretrain.report.runs import NothingLoggedError, read_run

_FITTED = 3
"""Runs from which on three rates are fitted, and not one factor."""
_LEAST_SPREAD = 0.05
_DISTINCT = 1e-3
"""Share of the largest singular value of the runs' parts that the least must have, for a rate of each part."""


@dataclass(frozen=True)
class Measured:
    """A run that was measured, and what is predicted of it.

    Attributes:
        name: its folder.
        job: what it has trained.
        cluster: its devices.
        seconds: of a step.
        rows: that logged a time, of which ``seconds`` is the median.
        hardware: the device by its own name.
    """

    name: str
    job: Job
    cluster: Cluster
    seconds: float
    rows: int = 1
    hardware: str = ""

    @property
    def prediction(self) -> Prediction:
        """The prediction with the assumptions of the central case."""
        return predict(self.job, self.cluster, {"central": CENTRAL, "slow": CENTRAL, "fast": CENTRAL})

    def __str__(self) -> str:
        where = f"{self.job.task.type} on {self.cluster} ({shown(self.hardware)})"
        return f"{self.name}: {where}, {self.seconds:.4g} seconds a step, the median of {counted(self.rows, 'row')}"


def measured(folder: Path) -> Measured:
    """The job of a run, its devices, and the median time of a step.

    Only the steps of the number of ranks that its newest checkpoint names count: those up to it, and after the last
    checkpoint of another number.

    Raises:
        ConfigError: ``folder`` is not a run folder, or the run was on a GPU of an unknown kind.
        DataError: the run has logged no such ``seconds_per_step`` after its first row and after ``batch.ramp``, or has
            no checkpoint that can be read, which names the devices.
    """
    require_run(folder)
    try:
        run = read_run(folder)
        checkpoints = [read_manifest(each) for each in checkpoints_of(folder)]
    except NothingLoggedError as error:
        raise DataError(f"{error}; train it to its third logged step (run.log_every)") from None
    except CheckpointError as error:
        raise DataError(f"{error}; remove this checkpoint, or name another run") from None
    if not checkpoints:
        raise DataError(
            f"{folder}: no checkpoint, which would say on how many and which devices the run was; "
            f"train it to its first one (checkpoint.every): capt resume {quoted(folder)}"
        )
    newest = checkpoints[-1]
    others = [each.progress.step + 1 for each in checkpoints if each.world_size != newest.world_size]
    since, until = max(others, default=0), newest.progress.step
    rows = run.of_whole_steps("seconds_per_step", since, until)
    seconds = [value for value in rows if 0 < value < math.inf]
    if not seconds:
        raise DataError(
            f"{folder / METRICS}: no row with seconds_per_step after the first one, after batch.ramp and up to the "
            f"checkpoint of step {until}, which a calibration needs: lower run.log_every, or train for more steps"
        )
    hardware = newest.provenance.get("hardware", "")
    found = device_named(hardware)
    if found is None and not is_processor(hardware):
        was = (
            f"was on {shown(hardware)}, which capt plan has no peaks of" if hardware else "does not say on what it was"
        )
        raise ConfigError(f"--calibrate {folder}: the run {was}; name runs on {', '.join(DEVICES)}")
    devices = cluster(f"{newest.world_size}x{'cpu' if found is None else found.name}")
    job = load_job(folder / CONFIG, resolved=True)
    return Measured(str(folder), job, devices, statistics.median(seconds), len(seconds), hardware)


def calibrated(runs: Sequence[Measured], kind: str, task: str) -> Mapping[Case, Assumptions]:
    """The assumptions that explain what was measured: one factor of time, or from three runs on three rates.

    The least squares of relative errors over the rates of products, of bytes and of operators, none below 0, as far as
    the runs differ in their parts. The slow and the fast case are off by the largest error of a run that was fitted.

    Args:
        runs: on devices of one kind.
        kind: of the devices that a job is planned for.
        task: type of that job.

    Raises:
        ConfigError: a run was not measured on devices of this kind, or on others than the first; it cannot be planned;
            or it is of another task, and its rows are shorter than planned.
    """
    for run in runs:
        _check_devices(run, runs[0], kind)
    overlaps = runs[0].cluster.device.is_gpu
    equations, fixed = [], []
    for run in runs:
        try:
            prediction = run.prediction
        except ConfigError as error:
            raise ConfigError(f"--calibrate {run.name}: {error}") from None
        if prediction.step.longest and run.job.task.type != task:
            raise ConfigError(
                f"--calibrate {run.name}: a run of {run.job.task.type}, whose rows are planned as long as they may be, "
                f"and were shorter: its rates would be too fast for {task}; name a run of {task} or capt_language"
            )
        # Computation is fitted; traffic is taken as predicted.
        time = prediction.times["central"]
        equations.append([time.products, time.between + time.update, time.launches])
        fixed.append(time.zero + time.contrast)
    # Where traffic is predicted to fill the step, a tenth of the step is left for computation.
    own = [max(run.seconds - wire, 0.1 * run.seconds) for run, wire in zip(runs, fixed, strict=True)]
    relative = np.array(equations) / np.array(own)[:, None]
    factors = _rates(relative, overlaps) if len(runs) >= _FITTED else _one_factor(relative, overlaps)
    products, between, launch = map(float, factors)
    central = replace(
        CENTRAL,
        products=CENTRAL.products / products,
        memory=CENTRAL.memory / between,
        launch=CENTRAL.launch * launch,
    )
    spread = max(_LEAST_SPREAD, float(np.abs(_times(relative * factors, overlaps) - 1).max()))
    slow, fast = replace(central, scale=1 + spread), replace(central, scale=1 - min(spread, 0.9))
    return {"central": central, "slow": slow, "fast": fast}


def _check_devices(run: Measured, first: Measured, kind: str) -> None:
    if run.cluster.device.name != kind:
        raise ConfigError(
            f"--calibrate {run.name}: a run on {run.cluster.device.name}, not on {kind}; name runs on {kind}, or plan "
            f"with --gpus {run.cluster.count}x{run.cluster.device.name}"
        )
    if run.hardware != first.hardware:
        raise ConfigError(
            f"--calibrate {run.name}: a run on {shown(run.hardware)}, and {first.name} was on {shown(first.hardware)}; "
            "rates are those of one device: name runs on one"
        )


def _times(parts: np.ndarray, overlaps: bool) -> np.ndarray:
    """The time of each row of products, bytes and starts by the host, which a GPU does not wait for."""
    device, host = parts[:, 0] + parts[:, 1], parts[:, 2]
    return np.where(device > host, device, host) if overlaps else device + host


def _one_factor(relative: np.ndarray, overlaps: bool) -> np.ndarray:
    """The factor of all three parts: the geometric mean over the runs."""
    return np.full(3, float(np.exp(-np.log(_times(relative, overlaps)).mean())))


def _rates(relative: np.ndarray, overlaps: bool) -> np.ndarray:
    """The factors of the three parts: on a CPU of all runs, on a GPU of those whose time the part sets."""
    if not overlaps:
        return _not_negative(relative)
    # From both extremes: where the iteration ends may depend on where it begins.
    found = [_settled(relative, by_host) for by_host in (np.zeros(len(relative), bool), np.ones(len(relative), bool))]
    return min(found, key=lambda factors: float(np.square(_times(relative * factors, overlaps) - 1).sum()))


def _settled(relative: np.ndarray, by_host: np.ndarray) -> np.ndarray:
    """The factors that make the host set the time of the runs that they are fitted to as such, from a first guess.

    A part that sets the time of no run stays as assumed, or is the most that the runs allow.
    """
    seen: list[list[bool]] = []
    while by_host.tolist() not in seen:
        seen.append(by_host.tolist())
        factors = np.ones(3)
        # Products and bytes by the runs whose time the device sets, starts by those whose time the host sets.
        for columns, rows in ((slice(0, 2), ~by_host), (slice(2, 3), by_host)):
            part = relative[:, columns]
            factors[columns] = _not_negative(part[rows]) if rows.any() else min(1.0, 1 / part.sum(1).max())
        by_host = relative[:, 2] * factors[2] > relative[:, :2] @ factors[:2]
    return factors


def _not_negative(relative: np.ndarray) -> np.ndarray:
    """The least squares of ``relative @ factors = 1`` with no factor below 0: the best over the sets that are not 0.

    One factor of all columns where the rows do not tell these apart.
    """
    number = relative.shape[1]
    values = np.linalg.svd(relative, compute_uv=False)
    if len(values) < number or values[-1] < _DISTINCT * values[0]:
        return np.full(number, float(np.exp(-np.log(relative.sum(1)).mean())))
    best, least = np.full(number, 1e-9), np.inf
    # Factors are few, so that each set of them may be tried.
    for size in range(1, number + 1):
        for chosen in itertools.combinations(range(number), size):
            columns = relative[:, chosen]
            found, *_ = np.linalg.lstsq(columns, np.ones(len(relative)), rcond=None)
            error = float(np.square(columns @ found - 1).sum())
            if (found > 0).all() and error < least:
                least, best = error, np.full(number, 1e-9)
                best[list(chosen)] = found
    return best

"""The trials of a sweep: settings and seeds, the job of each, and the folder that its content names."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from capt.launcher.sweep.config import Dimension, Sweep, load_sweep
from capt.pretrain.base.errors import ConfigError, UserError, quoted
from capt.pretrain.config.load import flatten, job_from_mapping, load_mapping, merge
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.engines.deepspeed_config import deepspeed_config
from capt.pretrain.engine.step_folders import checkpoints_of
from capt.pretrain.report.sweeps import SWEEP, TRIALS, read_trials

log = logging.getLogger(__name__)

_ATTEMPTS = 50


@dataclass(frozen=True)
class TrialSpec:
    """A trial of a study: the values of its space, and ``run.seed``."""

    study: str
    params: Mapping[str, Any]
    seed: int

    @property
    def key(self) -> str:
        """Return what tells the trial from every other one of the sweep."""
        return json.dumps([self.study, dict(self.params), self.seed], sort_keys=True)

    @property
    def text(self) -> str:
        """The setting and the seed as a person reads them."""
        values = [f"{key.rpartition('.')[2]}={_short(value)}" for key, value in self.params.items()]
        return " ".join([*values, f"seed={self.seed}"])


@dataclass(frozen=True)
class StudyPlan:
    """The plain values that turn a setting into a run, on any node."""

    name: str
    metric: str
    mode: Literal["max", "min"]
    base: Mapping[str, Any]
    """The job's mapping, with all overrides but without a trial's own values."""
    folder: Path

    def run_dir(self, spec: TrialSpec) -> Path:
        """Return the run folder of a trial: named by what it is made of, so that no trial is ever made twice."""
        content = json.dumps([self.base, dict(spec.params), spec.seed], sort_keys=True, default=str)
        readable = re.sub(r"[^A-Za-z0-9=.,+-]", "-", spec.text.replace(" ", ","))[:80]
        return self.folder / f"{readable}-{hashlib.sha256(content.encode()).hexdigest()[:10]}"

    def mapping(self, spec: TrialSpec, threads: int) -> dict[str, Any]:
        """Return the configuration of a trial's run. ``threads`` counts where the job leaves ``run.threads`` open."""
        result = copy.deepcopy(dict(self.base))
        for key, value in spec.params.items():
            set_key(result, key, value)
        set_key(result, "run.seed", spec.seed)
        set_key(result, "run.dir", str(self.run_dir(spec)))
        if not result["run"].get("threads"):
            set_key(result, "run.threads", threads)
        return result

    def better(self, a: float, b: float) -> bool:
        """Return whether score ``a`` is better than ``b``; a score that is not a number is the worst."""
        if b != b:
            return a == a
        return a > b if self.mode == "max" else a < b


@dataclass(frozen=True)
class SweepPlan:
    """A sweep, worked out: its studies and how its trials are run."""

    folder: Path
    cwd: Path
    module: str
    studies: Mapping[str, StudyPlan]
    workers: int
    threads: int
    retries: int
    population: bool
    env: Mapping[str, str] = field(default_factory=dict)
    """The part of the driver's environment that travels to the trials."""
    seeds: tuple[int, ...] = ()
    """The seeds that every setting is run with; of a population, whose members change, only the first."""

    @property
    def stop_file(self) -> Path:
        """The file at whose sight trials save and stop."""
        return self.folder / ".stop"

    def run_dir(self, spec: TrialSpec) -> Path:
        """Return the run folder of a trial."""
        return self.studies[spec.study].run_dir(spec)

    def run_name(self, spec: TrialSpec) -> str:
        """Return the run folder of a trial as records have it: below the sweep's folder."""
        return str(self.run_dir(spec).relative_to(self.folder))

    def job(self, spec: TrialSpec) -> Job:
        """Validate the job of a trial. Raises ``ConfigError``, also when its batch sizes do not fit the workers."""
        mapping = self.studies[spec.study].mapping(spec, self.threads)
        job = job_from_mapping(mapping, f"study {spec.study}, {spec.text}")
        deepspeed_config(job, self.workers)
        return job


def make_plan(sweep: Sweep, module: str, env: Mapping[str, str] | None = None) -> SweepPlan:
    """Resolve every study's base job. Raises ``ConfigError``: a base is missing or malformed."""
    studies = {}
    for name, study in sweep.studies.items():
        overrides: dict[str, Any] = {}
        for key, value in {**flatten(sweep.overrides), **flatten(study.overrides)}.items():
            set_key(overrides, key, value)
        base = merge([load_mapping(study.base), overrides])
        # The sweep sets both for each trial.
        for key in ("dir", "seed"):
            base.get("run", {}).pop(key, None)
        # The checkpoints that are kept are the best by the metric of the study.
        if sweep.keep_checkpoints and base.setdefault("checkpoint", {}).get("best") is None:
            base["checkpoint"] |= {"best": study.metric, "best_mode": study.mode}
        folder = sweep.sweep.dir / "trials" / name
        studies[name] = StudyPlan(name, study.metric, study.mode, base, folder)
    trial = sweep.trial
    population = sweep.scheduler.type == "pbt"
    threads = trial.threads or max(1, int(trial.cpus))
    return SweepPlan(
        sweep.sweep.dir, Path.cwd(), module, studies, trial.workers, threads, trial.retries, population, env or {},
        tuple(sweep.sweep.seeds[:1] if population else sweep.sweep.seeds),
    )  # fmt: skip


def with_initial_runs(sweep: Sweep, *, here: bool = True) -> Sweep:
    """Add the last checkpoints of ``sweep.initial`` as a grid of ``model.init``; without that key, change nothing.

    Where that folder is not ``here`` but in a cluster, it represents its runs.

    Raises:
        ConfigError: the folder is no sweep, or a trial of it is missing, has failed or has no checkpoint left.
        DataError: its record of trials is not a regular file.
    """
    folder = sweep.sweep.initial
    if folder is None:
        return sweep
    starts = _last_checkpoints(folder) if here else [folder]
    space = {**sweep.space, "model.init": Dimension(grid=[str(path) for path in starts])}
    section = sweep.sweep.model_copy(update={"initial": None})
    return sweep.model_copy(update={"space": space, "sweep": section})


def _last_checkpoints(folder: Path) -> list[Path]:
    """Return the last checkpoint of each run of a sweep that is finished: what a run ended with, not the best of it."""
    if not (folder / SWEEP).is_file() or not (folder / TRIALS).is_file():
        raise ConfigError(f"sweep.initial {folder}: no sweep has run there; name the sweep.dir of one that is finished")
    runs = [record.run for record in read_trials(folder / TRIALS)[0].values() if record.state == "done"]
    sweep = load_sweep(str(folder / SWEEP))
    # What a scheduler or Optuna leaves out is no gap.
    fixed = sweep.search.type == "grid" and sweep.scheduler.type == "none"
    planned = sum(len(trial_specs(sweep, study)) for study in sweep.studies) if fixed else 1
    if len(runs) < planned:
        raise ConfigError(
            f"sweep.initial {folder}: {len(runs)} of {planned} trials are done; finish it: "
            f"capt sweep {quoted(folder / SWEEP)} --resume"
        )
    bare = [run for run in runs if not checkpoints_of(folder / run)]
    if bare:
        raise ConfigError(
            f"sweep.initial {folder}: {bare[0]} has no checkpoint left; that sweep needs keep_checkpoints={len(runs)} "
            "(sweep.keep_checkpoints on its command line)"
        )
    return [checkpoints_of(folder / run)[-1] for run in sorted(runs)]


def trial_specs(sweep: Sweep, study: str) -> list[TrialSpec]:
    """Return the trials of a study that are known before it begins (for Optuna: settings as it might draw them)."""
    space = sweep.space_of(study)
    if sweep.search.type == "grid" and sweep.scheduler.type != "pbt":
        settings = _grid(space)
    else:
        settings = _sampled_settings(space, sweep.search.samples, f"{sweep.search.seed}/{study}")
    return [TrialSpec(study, setting, seed) for setting in settings for seed in sweep.sweep.seeds]


def check_jobs(sweep: Sweep, plan: SweepPlan) -> dict[str, list[TrialSpec]]:
    """Return the trials of each study, each with a valid job.

    Raises:
        ConfigError: a key of the space is not a key of the job, a value is not valid, batch sizes do not fit the
            workers, or population based training would find no checkpoint where it validates.
    """
    found = {}
    for study in sweep.studies:
        found[study] = trial_specs(sweep, study)
        settings = len(found[study]) // len(sweep.sweep.seeds)
        if sweep.search.type == "random" and settings < sweep.search.samples:
            log.warning(
                "study %s: its space has no more than %d settings, of the search.samples %d",
                study, settings, sweep.search.samples,
            )  # fmt: skip
        # The ends of ranges too, which no setting that was drawn need come near.
        for key, bound in _ends(sweep.space_of(study)):
            first = found[study][0]
            plan.job(TrialSpec(study, {**first.params, key: bound}, first.seed))
        for spec in found[study][:: len(sweep.sweep.seeds)]:  # one of each setting
            job = plan.job(spec)
            if plan.population and (job.validate_.every == 0 or job.validate_.every != job.checkpoint.every):
                raise ConfigError(
                    f"study {study}: scheduler pbt copies the checkpoint of a validation: set validate.every and "
                    f"checkpoint.every to the same number (they are {job.validate_.every} and {job.checkpoint.every})"
                )
    return found


def check_inputs(plan: SweepPlan, found: Mapping[str, Sequence[TrialSpec]]) -> None:
    """Look whether what the jobs read is there, for one trial of each setting.

    Raises:
        UserError: an input such as the data or ``model.init`` is missing; the study is named.
    """
    for study, trials in found.items():
        for spec in {json.dumps(dict(spec.params)): spec for spec in trials}.values():
            try:
                plan.job(spec).check_inputs()
            except UserError as error:
                raise type(error)(f"study {study}: {error}") from None


def setting_key(params: Mapping[str, Any]) -> str:
    """Return the text that two settings share if they are the same one."""
    return json.dumps(dict(params), sort_keys=True)


def set_key(mapping: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a nested mapping."""
    *parents, last = key.split(".")
    node = mapping
    for parent in parents:
        inner = node.get(parent)
        node[parent] = inner if isinstance(inner, dict) else {}
        node = node[parent]
    node[last] = value


def _grid(space: Mapping[str, Dimension]) -> list[dict[str, Any]]:
    lists = [dimension.values or [] for dimension in space.values()]
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def _sampled_settings(space: Mapping[str, Dimension], samples: int, seed: str) -> list[dict[str, Any]]:
    """Draw different settings; asking for more keeps the earlier ones. A small space may have fewer."""
    found: dict[str, dict[str, Any]] = {}
    for number in range(samples * _ATTEMPTS):
        generator = random.Random(f"{seed}/{number}")
        setting = {key: sample_value(dimension, generator) for key, dimension in space.items()}
        found.setdefault(json.dumps(setting), setting)
        if len(found) == samples:
            break
    return list(found.values())


def sample_value(dimension: Dimension, generator: random.Random) -> Any:
    """Draw a value of a dimension."""
    if dimension.values is not None:
        return generator.choice(dimension.values)
    if dimension.randint:
        return generator.randint(*dimension.randint)
    if dimension.loguniform:
        low, high = dimension.loguniform
        return float(f"{low * (high / low) ** generator.random():.6g}")
    low, high = dimension.uniform or (0.0, 1.0)
    return float(f"{generator.uniform(low, high):.6g}")


def _ends(space: Mapping[str, Dimension]) -> Iterator[tuple[str, float]]:
    for key, dimension in space.items():
        for bound in dimension.bounds or ():
            yield key, bound


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)

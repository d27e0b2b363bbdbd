"""``capt sweep``: from a configuration to finished trials.

What was done is read from the run folders and ``trials.jsonl``, so that a sweep whose driver was killed continues.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from capt.launcher import raycluster
from capt.launcher.kubernetes.apply import apply
from capt.launcher.kubernetes.manifests import JOB_FILES, object_name, sweep_manifest
from capt.launcher.kubernetes.settings import KubernetesCluster
from capt.launcher.supervisor import processes
from capt.launcher.sweep.config import Sweep, load_sweep
from capt.launcher.sweep.trial_log import DrawnSettings, TrialLog
from capt.launcher.sweep.trials import (
    SweepPlan,
    TrialSpec,
    check_inputs,
    check_jobs,
    make_plan,
    with_initial_runs,
)
from capt.pretrain.base.errors import ConfigError, DataError, LockedError, counted, machines_at_fault, quoted
from capt.pretrain.base.files import read_json, require_own_folder, write_text
from capt.pretrain.base.locks import file_lock
from capt.pretrain.base.records import Record, parse_record
from capt.pretrain.config.load import flatten, load_mapping
from capt.pretrain.config.reader import to_yaml
from capt.pretrain.engine.run_folder import DONE, FAILED, OWN_FOLDERS, STOPPED
from capt.pretrain.report.sweeps import TRIALS, format_number

log = logging.getLogger(__name__)

BASES = "bases.json"
"""The base jobs of a sweep, kept in its folder: a resume with other keys would mix two experiments."""
_TUNE = ".tune"
_SWEEP = "sweep.yaml"
_SHOWN = 80


class _Base(Record):
    metric: str
    mode: Literal["max", "min"]
    base: dict[str, Any]


def check_base_jobs(plan: SweepPlan) -> None:
    """Write the metric and the merged base job of each study, or compare them with those that the sweep began with.

    Studies may be added and left out. A sweep folder of an older release, without this file, is accepted.

    Raises:
        ConfigError: a key of a study's jobs is another one than before; the first is named.
        DataError: the record is damaged.
    """
    path = plan.folder / BASES
    now = {name: {"metric": s.metric, "mode": s.mode, "base": dict(s.base)} for name, s in plan.studies.items()}
    now = json.loads(json.dumps(now, default=str))  # as it is read back
    before: dict[str, Any] = {}
    if path.exists():
        content, hint = read_json(path), "; remove it to continue with the sweep as it is"
        if not isinstance(content, dict):
            raise DataError(f"{path}: damaged: not an object{hint}")
        records = {name: parse_record(_Base, value, path, hint, error=DataError) for name, value in content.items()}
        before = {name: record.model_dump() for name, record in records.items()}
    for name in before.keys() & now.keys():
        _compare(plan, name, before[name], now[name])
    write_text(path, json.dumps(before | now, indent=1) + "\n", private=True)


def _compare(plan: SweepPlan, study: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    then, new = ({**flatten(x["base"]), "metric": x["metric"], "mode": x["mode"]} for x in (before, now))
    for key in sorted(then.keys() | new.keys()):
        a, b = (json.dumps(x[key])[:_SHOWN] if key in x else "unset" for x in (then, new))
        if a != b:
            raise ConfigError(
                f"study {study}: {key} is {b}, but the sweep in {plan.folder} began with {a}: resume with the same "
                "keys, or name another sweep.dir"
            )


def run_sweep(
    config: str,
    overrides: Sequence[str],
    *,
    address: str | None = None,
    resume: bool = False,
    show: Callable[[str], None] | None = None,
    module: str = "capt.pretrain",
    cluster: KubernetesCluster | None = None,
) -> int:
    """Run all trials of a sweep that are not over yet; with ``show`` (dry run) only describe them.

    With ``cluster`` they run there, as a RayJob: this returns as soon as the cluster has it, and ``show`` gets it.

    Returns:
        0, 1 when a trial failed, or 75 when stopped by a signal.

    Raises:
        ConfigError: the sweep or a job of it is wrong, its folder is taken or of other jobs, a trial fits no node,
            there is no cluster at ``address`` or ``RAY_ADDRESS``, or the jobs report no metric of the study's name.
        UserError: an input of a job is missing, or a file of the sweep's folder is damaged.
    """
    address = raycluster.chosen_address(address)
    asked = load_sweep(config, overrides)
    sweep = with_initial_runs(asked, here=cluster is None)
    plan = make_plan(sweep, module, raycluster.rank_environment(address))
    specs = check_jobs(sweep, plan)
    # On Kubernetes the rest happens in the cluster, where the data are.
    if cluster is not None:
        return _hand_over(manifest(asked, cluster), show)
    # A sweep that is continued has had its data, its cluster and its folder before.
    resumes = resume or sweep.sweep.resume == "auto"
    begun = resumes and (plan.folder / BASES).is_file()
    with machines_at_fault(lambda: begun):
        check_inputs(plan, specs)
        if show is not None:
            show(describe_sweep(sweep, plan, specs))
            return DONE
        return _start(sweep, plan, specs, address, resumes=resumes)


def _start(
    sweep: Sweep, plan: SweepPlan, specs: Mapping[str, Sequence[TrialSpec]], address: str | None, *, resumes: bool
) -> int:
    # Refuse before the folder is touched: what is asked for must be there.
    if address is None:
        raycluster.check_here(
            _need(sweep, None),
            sweep.trial.workers,
            "lower trial.workers, trial.cpus or trial.gpus, or join a cluster with --address",
        )
    else:
        raycluster.check_reachable(address)
    with _locked_folder(plan.folder, resumes):
        _refuse_links(plan.folder)
        check_base_jobs(plan)
        trial_log = TrialLog(plan, sweep.keep_checkpoints)
        # Under the lock: what has been done is read from the folder, so that a second start continues the first.
        if _is_finished(sweep, specs, trial_log):
            log.info("%s is finished: all trials are over", plan.folder)
            return _outcome(sweep, plan, trial_log, stopping=False)
        with raycluster.without_tracked_run(), raycluster.cluster(address):
            need = _need(sweep, address)
            raycluster.check_cluster(need, sweep.trial.workers)
            write_text(plan.folder / _SWEEP, sweep.to_yaml(), private=True)
            return _run(sweep, plan, specs, trial_log, need)


def _hand_over(text: str, show: Callable[[str], None] | None) -> int:
    """Apply a manifest, or only show it."""
    if show is not None:
        show(text.rstrip())
        return DONE
    for line in apply(text):
        log.info("%s", line)
    return DONE


def describe_sweep(sweep: Sweep, plan: SweepPlan, specs: Mapping[str, Sequence[TrialSpec]]) -> str:
    """Describe a sweep for ``--dry-run``: with its defaults, and its trials."""
    blocks = [sweep.to_yaml().rstrip()]
    for study, found in specs.items():
        note = " (Optuna draws its own; these are examples)" if sweep.search.type == "optuna" else ""
        lines = [f"# study {study}: {counted(len(found), 'trial')} of {sweep.studies[study].base}{note}"]
        lines += [f"{plan.run_dir(spec)}  {spec.text}" for spec in found]
        blocks.append("\n".join(lines))
    trial = sweep.trial
    total = sum(map(len, specs.values()))
    each = f"{counted(trial.workers, 'rank')} with {trial.cpus:g} core{'' if trial.cpus == 1 else 's'} each"
    blocks.append(f"# {counted(total, 'trial')} of {each}, in {plan.folder}")
    return "\n\n".join(blocks)


def _run(
    sweep: Sweep,
    plan: SweepPlan,
    specs: Mapping[str, Sequence[TrialSpec]],
    trial_log: TrialLog,
    need: Mapping[str, float],
) -> int:
    from capt.launcher.sweep.driver import Driver, ProgressTable

    # The file of a stop that was asked for earlier.
    plan.stop_file.unlink(missing_ok=True)
    total = sum(map(len, specs.values()))
    names = {plan.run_name(spec) for found in specs.values() for spec in found}
    # The space and the seeds may have changed; Optuna draws others than those that are listed.
    over = sum(run in names or sweep.search.type == "optuna" for run in trial_log.over)
    if over:
        log.info("%d of %d trials are over already", over, total)
    with ProgressTable(total, over) as table:
        driver = Driver(plan, trial_log, need, table, sweep.trial.concurrent)
        with processes.stop_signals(lambda _: driver.stop(), _give_up):
            try:
                for group in _groups(sweep, plan, specs, trial_log):
                    driver.run(*group)
            except KeyboardInterrupt:  # the second one: no trial saves any more
                driver.stopping = True
    for study in specs:
        trial_log.drop_checkpoints(study, ended=not driver.stopping)
    shutil.rmtree(plan.folder / _TUNE, ignore_errors=True)
    plan.stop_file.unlink(missing_ok=True)
    if driver.fatal:
        raise ConfigError(driver.fatal)
    return _outcome(sweep, plan, trial_log, driver.stopping)


def _groups(
    sweep: Sweep, plan: SweepPlan, specs: Mapping[str, Sequence[TrialSpec]], trial_log: TrialLog
) -> Iterator[tuple[Any, Any, int, list[TrialSpec]]]:
    """Yield what Tune gets together: scheduler, searcher and the number of its trials, trials that are given.

    Trials that do not know of each other are in one group, so that no core waits for the end of a study.
    """
    from ray.tune.schedulers import FIFOScheduler

    from capt.launcher.sweep import search

    kind = sweep.scheduler.type
    if kind == "none" and sweep.search.type != "optuna":
        yield FIFOScheduler(), None, 0, _left(trial_log, [spec for found in specs.values() for spec in found])
        return
    for study, found in specs.items():
        scheduler = search.scheduler(sweep, study)
        judging = sweep.sweep.seeds[:1] if kind == "asha" else sweep.sweep.seeds
        first = [spec for spec in found if spec.seed in judging]
        if sweep.search.type == "optuna":
            drawn = DrawnSettings(plan.folder, plan.studies[study])
            searcher = search.OptunaSettings(sweep, study, drawn, judging)
            yield scheduler, searcher, searcher.left, []
            first = [TrialSpec(study, params, seed) for params in drawn.settings for seed in judging]
        elif kind == "pbt":
            yield scheduler, None, 0, _left(trial_log, first)
        else:  # those that are over report again, so that the others are measured against them
            left = _left(trial_log, first)
            yield scheduler, None, 0, [spec for spec in first if spec not in left] + left if left else []
        if kind == "asha":  # whole settings: with the other seeds those run that the scheduler let reach their end
            ends = [spec for spec in first if trial_log.state(spec) == "done"]
            others = _left(
                trial_log, [TrialSpec(study, e.params, seed) for e in ends for seed in sweep.sweep.seeds[1:]]
            )
            if others:
                log.info("%s: %s with the other seeds of what reached its end", study, counted(len(others), "trial"))
            yield FIFOScheduler(), None, 0, others


def _left(trial_log: TrialLog, specs: Sequence[TrialSpec]) -> list[TrialSpec]:
    """Return the trials that are not over."""
    return [spec for spec in specs if not trial_log.is_over(spec)]


def _is_finished(sweep: Sweep, specs: Mapping[str, Sequence[TrialSpec]], trial_log: TrialLog) -> bool:
    """Return whether nothing is left to do, which needs no cluster; of trials that others decide, Tune has to know."""
    if sweep.scheduler.type != "none" or sweep.search.type == "optuna":
        return False
    return not any(_left(trial_log, found) for found in specs.values())


def _outcome(sweep: Sweep, plan: SweepPlan, trial_log: TrialLog, stopping: bool) -> int:
    for study in sweep.studies:
        say_best(trial_log, study)
    failed = [record for record in trial_log.records.values() if record.state == "failed"]
    for record in failed:
        log.error("failed: %s: %s", record.run, record.error)
    if stopping:
        log.info("stopped early; continue with: capt sweep %s --resume", quoted(plan.folder / _SWEEP))
        return STOPPED
    log.info("%s, %d failed: %s", counted(len(trial_log.records), "trial"), len(failed), plan.folder / TRIALS)
    log.info("next: capt report %s (tables and curves; --out FOLDER)", quoted(plan.folder))
    return FAILED if failed else DONE


def say_best(trial_log: TrialLog, study: str) -> None:
    """Log the best setting of a study and its median, as the report has them, and the trial that represents it."""
    found = trial_log.study(study)
    if found is None or found.best is None or (trial := found.chosen) is None:
        return
    setting = " ".join(f"{key}={value}" for key, value in found.best.params.items())
    log.info(
        "%s: best by the median over its seeds: %s; median %s %s over %s; seed=%s represents it, %s at step %s (%s)",
        study, setting or "as in the base", found.metric, format_number(found.best.median),
        counted(len(found.best.scores), "seed"), trial.seed, format_number(trial.score), trial.best_step, trial.path,
    )  # fmt: skip


def _need(sweep: Sweep, address: str | None) -> dict[str, float]:
    trial = sweep.trial
    gpus = int(raycluster.has_gpus(address)) if trial.gpus == "auto" else trial.gpus
    return raycluster.bundle(trial.cpus, gpus, trial.resources)


def _give_up() -> None:
    raise KeyboardInterrupt


def _refuse_links(folder: Path) -> None:
    """Trials are written and pruned below the sweep's folder: no link there may lead out of it."""
    own = ("trials", "trials/*", "trials/*/*", *(f"trials/*/*/{name}" for name in OWN_FOLDERS), _TUNE)
    for path in (path for pattern in own for path in folder.glob(pattern)):
        require_own_folder(path, error=ConfigError)


@contextmanager
def _locked_folder(folder: Path, resume: bool) -> Iterator[None]:
    """Lock the sweep's folder, which must be unused unless the sweep is resumed."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"sweep.dir {folder} is a file; name a folder")
    if not resume and any((folder / mark).exists() for mark in (_SWEEP, TRIALS, "trials")):
        raise ConfigError(
            f"sweep.dir {folder} already holds a sweep; continue it with --resume, or name another folder"
        )
    with file_lock(
        folder / ".lock", refusal=f"sweep.dir {folder}: another capt sweep is running in it", error=LockedError
    ):
        yield


def manifest(sweep: Sweep, cluster: KubernetesCluster) -> str:
    """Render the RayJob of a sweep, whose Ray cluster KubeRay makes and takes down again.

    Jobs that are in files of this machine go with it.

    Raises:
        ConfigError: a trial has more ranks, cores or GPUs than the pods have.
    """
    ranks_per_pod = _ranks_per_pod(sweep, cluster)
    if sweep.trial.workers > ranks_per_pod * cluster.pods:
        raise ConfigError(
            f"trial.workers {sweep.trial.workers}: {cluster.pods} pods of the cluster file hold "
            f"{ranks_per_pod * cluster.pods} such ranks; set pods, cpus_per_pod or gpus_per_pod"
        )
    files, studies = {}, dict(sweep.studies)
    for number, (name, study) in enumerate(sweep.studies.items()):
        # Base jobs in files of this machine travel along; not every name of a study may be one in a ConfigMap.
        if Path(study.base).is_file():
            base = f"base-{number}.yaml"
            files[base] = to_yaml(load_mapping(study.base))
            studies[name] = study.model_copy(update={"base": base})
    folder = PurePosixPath(cluster.folder)

    # Below the pods' working folder, a sweep lies where it would lie below this one.
    def placed(where: Path) -> PurePosixPath:
        return folder / (where.relative_to(Path.cwd()) if where.is_relative_to(Path.cwd()) else where)

    place, initial = placed(sweep.sweep.dir), sweep.sweep.initial
    moved = {"dir": Path(place)} | ({"initial": Path(placed(initial))} if initial else {})
    section = sweep.sweep.model_copy(update=moved)
    files[_SWEEP] = sweep.model_copy(update={"studies": studies, "sweep": section}).to_yaml()
    words = shlex.join(
        [
            *(cluster.python, "-m", "capt.launcher", "sweep", str(JOB_FILES / _SWEEP)),
            *("--address", "auto", "--resume", "auto"),
        ]
    )
    # KubeRay puts the entrypoint unquoted into a line of its submitter's shell: no operator may be a word of it.
    command = shlex.join(["sh", "-c", f"cd {shlex.quote(str(folder))} && exec {words}"])
    return sweep_manifest(cluster, object_name(cluster, place.name), files, command)


def _ranks_per_pod(sweep: Sweep, cluster: KubernetesCluster) -> int:
    """Return the number of ranks of a trial that a pod holds, as far as the cluster file tells."""
    trial = sweep.trial
    gpus = min(1, cluster.gpus_per_pod) if trial.gpus == "auto" else trial.gpus
    if not cluster.cpus_per_pod:
        raise ConfigError("the cluster file of a sweep needs cpus_per_pod: Ray shares the cores of a pod among trials")
    by_cores = int(cluster.cpus_per_pod // trial.cpus)
    return min(by_cores, int(cluster.gpus_per_pod // gpus)) if gpus else by_cores

"""``capt sweep``: from a configuration to finished trials. What was done is read from the sweep's folder, never from
Tune's own state, so that a sweep whose driver was killed continues with what is missing.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher import raycluster, runfolder
from launcher.backends import processes
from launcher.sweep.bases import keep_bases
from launcher.sweep.config import Sweep, load_sweep
from launcher.sweep.records import TrialLog, TrialState
from launcher.sweep.trials import Plan, Point, check, check_inputs, make_plan
from pretrain.base.errors import ConfigError, counted
from pretrain.base.files import require_own_folder
from pretrain.engine.run_folder import OWN_FOLDERS
from pretrain.report.trials_file import TRIALS

log = logging.getLogger(__name__)

_TUNE = ".tune"


def run_sweep(
    config: str,
    overrides: Sequence[str],
    *,
    address: str | None = None,
    resume: bool = False,
    show: Callable[[str], None] | None = None,
    module: str = "pretrain",
) -> int:
    """Run all trials of a sweep that are not over yet; with ``show`` (dry run) only describe them.

    Returns:
        0, 1 when a trial failed, or 75 when stopped by a signal.

    Raises:
        ConfigError: the sweep or a job of it is wrong, its folder is taken or of other jobs, a trial fits no node,
            there is no cluster at ``address`` or ``RAY_ADDRESS``, or the jobs report no metric of the study's name.
        UserError: an input of a job is missing, or a file of the sweep's folder is damaged.
    """
    address = raycluster.chosen_address(address)
    sweep = load_sweep(config, overrides)
    plan = make_plan(sweep, module, raycluster.travelling(address))
    points = check(sweep, plan)
    check_inputs(plan, points)
    if show is not None:
        show(describe(sweep, plan, points))
        return runfolder.DONE
    if address is None:
        raycluster.check_here(
            _need(sweep, None),
            sweep.trial.workers,
            "lower trial.workers, trial.cpus or trial.gpus, or join a cluster with --address",
        )
    else:
        raycluster.check_address(address)
    with _taken(plan.folder, resume):
        _refuse_links(plan.folder)
        keep_bases(plan)
        book = TrialLog(plan, sweep.keep_checkpoints)
        with raycluster.cluster(address):
            need = _need(sweep, address)
            raycluster.check_cluster(need, sweep.trial.workers)
            runfolder.write_private(plan.folder / "sweep.yaml", sweep.to_yaml())
            return _run(sweep, plan, points, book, need)


def describe(sweep: Sweep, plan: Plan, points: Mapping[str, Sequence[Point]]) -> str:
    """The text of ``--dry-run``: the sweep with its defaults, and its trials."""
    blocks = [sweep.to_yaml().rstrip()]
    for study, found in points.items():
        note = " (Optuna draws its own; these are examples)" if sweep.search.type == "optuna" else ""
        lines = [f"# study {study}: {counted(len(found), 'trial')} of {sweep.studies[study].base}{note}"]
        lines += [f"{plan.run_dir(point)}  {point.text}" for point in found]
        blocks.append("\n".join(lines))
    trial = sweep.trial
    total = sum(map(len, points.values()))
    each = f"{counted(trial.workers, 'rank')} with {trial.cpus:g} core{'' if trial.cpus == 1 else 's'} each"
    blocks.append(f"# {counted(total, 'trial')} of {each}, in {plan.folder}")
    return "\n\n".join(blocks)


def _run(
    sweep: Sweep, plan: Plan, points: Mapping[str, Sequence[Point]], book: TrialLog, need: Mapping[str, float]
) -> int:
    from launcher.sweep.driver import Driver, Group
    from launcher.sweep.table import Table

    plan.stop_file.unlink(missing_ok=True)
    total = sum(map(len, points.values()))
    known = [point for study in points for point in _known(sweep, plan, study, points[study])]
    over = sum([book.is_done(point) for point in known])
    if over:
        log.info("%d of %d trials are over already", over, total)
    with Table(total, over) as table:
        driver = Driver(plan, book, need, table, sweep.trial.concurrent)
        with processes.stop_signals(lambda _: driver.stop(), _give_up):
            try:
                for group in _groups(sweep, plan, points, book):
                    if not driver.stopping:
                        driver.run(Group(*group))
            except KeyboardInterrupt:  # the second one: no trial saves any more
                driver.stopping = True
    for study in points:
        book.drop_checkpoints(study)
    shutil.rmtree(plan.folder / _TUNE, ignore_errors=True)
    plan.stop_file.unlink(missing_ok=True)
    if driver.fatal:
        raise ConfigError(driver.fatal)
    return _outcome(sweep, plan, book, driver.stopping)


def _groups(
    sweep: Sweep, plan: Plan, points: Mapping[str, Sequence[Point]], book: TrialLog
) -> Iterator[tuple[Any, Any, list[dict[str, Any]], dict[str, Any] | None, int]]:
    """What is given to Tune together: searcher, scheduler, trials, constants of drawn trials, their number.

    Trials that do not know of each other go in one group, so that no core waits for the end of a study.
    """
    from launcher.sweep import search

    kind = sweep.scheduler.type
    if kind == "none" and sweep.search.type != "optuna":
        left = [point for found in points.values() for point in found if not book.is_done(point)]
        yield None, search.scheduler(sweep, ""), [{"point": point} for point in left], None, len(left)
        return
    for study, found in points.items():
        scheduler = search.scheduler(sweep, study)
        if sweep.search.type == "optuna":
            settings = {json.dumps(p.params): p.params for p in _known(sweep, plan, study, found)}
            searcher, number = search.optuna(sweep, study, book, list(settings.values()))
            yield searcher, scheduler, [], {"study": study, "seeds": sweep.sweep.seeds}, number
            continue
        left = [point for point in found if not book.is_done(point)]
        if kind == "pbt":
            yield None, scheduler, [{"point": p, "params": _current(plan, p)} for p in left], None, len(left)
        elif left:  # those that are over report again, so that the others are measured against them
            settled = [{"point": p, "settled": book.state(p)} for p in found if book.finished(p)]
            yield None, scheduler, [*settled, *({"point": p} for p in left)], None, len(settled) + len(left)


def _known(sweep: Sweep, plan: Plan, study: str, found: Sequence[Point]) -> list[Point]:
    """The trials of a study that may have been begun: Optuna's are known by their folders alone."""
    if sweep.search.type != "optuna":
        return list(found)
    from launcher.sweep.begun import begun

    return [point for point in begun(plan.studies[study]) if point.seed in sweep.sweep.seeds]


def _current(plan: Plan, point: Point) -> dict[str, Any]:
    history = TrialState.read(plan.run_dir(point)).history
    return dict(history[-1].params if history else point.params)


def _outcome(sweep: Sweep, plan: Plan, book: TrialLog, stopping: bool) -> int:
    for study in sweep.studies:
        best = book.best(study)
        if best:
            line = best[0]
            setting = " ".join(f"{key}={value}" for key, value in line["params"].items())
            log.info(
                "%s: best %s %.4g at step %s with %s seed=%s (%s)",
                study, line["metric"], line["score"], line["best_step"], setting, line["seed"],
                plan.folder / line["run"],
            )  # fmt: skip
    failed = [line for line in book.lines.values() if line["state"] == "failed"]
    for line in failed:
        log.error("failed: %s: %s", line["run"], line["error"])
    if stopping:
        log.info("stopped early; continue with: capt sweep %s --resume", plan.folder / "sweep.yaml")
        return runfolder.STOPPED
    log.info("%s, %d failed: %s", counted(len(book.lines), "trial"), len(failed), plan.folder / TRIALS)
    log.info("next: capt report %s (tables and curves; --out FOLDER)", plan.folder)
    return runfolder.FAILED if failed else runfolder.DONE


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
def _taken(folder: Path, resume: bool) -> Iterator[None]:
    """Hold the sweep's folder, which must be unused unless it is resumed."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"sweep.dir {folder} is a file; name a folder")
    if not resume and any((folder / mark).exists() for mark in ("sweep.yaml", TRIALS, "trials")):
        raise ConfigError(f"sweep.dir {folder} already holds a sweep; continue it with --resume or name another folder")
    with runfolder.held(folder, ".lock", f"sweep.dir {folder}: another capt sweep is running in it"):
        yield

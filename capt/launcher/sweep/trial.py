"""A trial, as the class that Ray Tune runs: it starts the ranks, reads what they validate, and reports it.

The ranks are processes of their own, started anew for each trial, because a DeepSpeed engine cannot be used twice.
This process only watches ``metrics.jsonl``. Everything that must survive is in the run folder: a trial whose run is
done reports again what it had found, and one with a checkpoint continues from it.
"""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import tune

from capt.launcher import raycluster
from capt.launcher.backends.ray import Rank, RankGroup, remote_ranks
from capt.launcher.supervisor.processes import signal_name
from capt.launcher.sweep.trial_log import JOB, TrialState, ValidationRows, remove_checkpoints, run_state, write_spec
from capt.launcher.sweep.trials import SweepPlan, TrialSpec, set_key
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.files import require_own_folder, write_text
from capt.pretrain.base.locks import file_lock
from capt.pretrain.config.load import load_mapping
from capt.pretrain.config.reader import to_yaml
from capt.pretrain.engine.metrics_file import METRICS, MetricsRow, drop_rows_after
from capt.pretrain.engine.run_folder import BAD_INPUT, CONFIG, DONE, STATUS, STOPPED, read_status
from capt.pretrain.engine.step_folders import MANIFEST, checkpoints_of, is_step, step_folder, step_of

_OF_A_RUN = (CONFIG, METRICS, STATUS, "best.json")


def prepare_restart(run_dir: Path, source: Mapping[str, Any] | None) -> tuple[tuple[str, ...], int]:
    """Make a run folder ready to start.

    Args:
        run_dir: the run folder.
        source: ``{"checkpoint", "step"}`` to continue from, or None for the newest of the run itself.

    Returns:
        The arguments that make the job continue (none for a new run), and the step it continues from.
    """
    if source is not None:
        _adopt(run_dir, Path(source["checkpoint"]), int(source["step"]))
    complete = checkpoints_of(run_dir)
    if not complete:
        _clear(run_dir)
        return (), 0
    newest, step = complete[-1].name, step_of(complete[-1])
    # The steps behind the checkpoint are done, and logged, once more.
    drop_rows_after(run_dir / METRICS, step)
    # Else the end of the last attempt would be taken for that of the next.
    (run_dir / STATUS).unlink(missing_ok=True)
    return ("--resume", "--checkpoint", newest), step


def what_went_wrong(run_dir: Path, code: int) -> str:
    """Say in one line why the ranks ended with ``code``: what rank 0 noted, or the last thing that was said."""
    with suppress(ConfigError):
        status = read_status(run_dir)
        if status is not None and status.state == "failed" and status.reason:
            return status.reason
    log = run_dir / "log" / "trial.log"
    said = [line for line in _tail(log).splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("error: ")]
    text = (errors or said or [""])[-1].removeprefix("error: ").strip()
    how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
    return f"{text[:400]} ({how}; {log})" if text else f"{how}; {log}"


def _adopt(run_dir: Path, source: Path, step: int) -> None:
    """Make ``source`` the newest checkpoint of the run."""
    own = step_folder(run_dir, step)
    there = [path for path in (run_dir / "checkpoints").glob("*") if is_step(path.name)]  # whole or not
    # Checkpoints of later steps would be newer.
    remove_checkpoints(run_dir, [path.name for path in there if step_of(path) > step or path == own != source])
    for link in ("latest", "best"):
        path = run_dir / "checkpoints" / link
        if path.is_symlink() and not path.exists():
            path.unlink()
            if link == "best":
                (run_dir / "best.json").unlink(missing_ok=True)
    if own == source:
        return
    # Renamed when it is whole: a copy that was interrupted is no checkpoint.
    partial = own.with_name(f".{own.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    partial.rename(own)


def _clear(run_dir: Path) -> None:
    for name in _OF_A_RUN:
        (run_dir / name).unlink(missing_ok=True)
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(run_dir / name, ignore_errors=True)


def _tail(path: Path, size: int = 20_000) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as f:
        f.seek(max(0, path.stat().st_size - size))
        return f.read().decode(errors="replace")


_POLL = 0.1
_LOCK_SECONDS = 60.0
_SAVE_SECONDS = 60.0
_WORST = -1e30


def spec_of(config: Mapping[str, Any]) -> TrialSpec:
    """Return the trial that a Tune configuration means."""
    spec: TrialSpec = config["trial"]["spec"]
    return spec


class SweepTrial(tune.Trainable):
    """Tune's side of a trial. Its results hold ``objective`` (more is better), ``validations`` (how many there were),
    and in the last one ``ended``: done, failed, stopped (resumable) or unreported (the metric has another name).
    """

    _group: RankGroup | None = None

    def setup(self, config: dict[str, Any]) -> None:
        """Take the run folder; nothing is started yet."""
        self._plan: SweepPlan = config["plan"]
        self._spec = spec_of(config)
        self._study = self._plan.studies[self._spec.study]
        self._run = self._plan.run_dir(self._spec)
        self._params: dict[str, Any] = config["trial"]["params"]
        if not self._plan.folder.is_dir():
            raise RuntimeError(f"node {raycluster.own_address()} does not see the sweep's folder {self._plan.folder}")
        self._run.mkdir(parents=True, exist_ok=True)
        self._lock = ExitStack()  # a predecessor that is dying still holds it for a moment
        self._lock.enter_context(_trial_lock(self._run))
        self._state = TrialState.read(self._run)
        self._rows = ValidationRows(self._run / METRICS)
        self._began: float | None = None
        self._copy_from: Mapping[str, Any] | None = None
        self._retries = self._plan.retries
        self._last: dict[str, Any] = {}
        self._best: float | None = None
        self._step = 0
        self._error = ""
        # A trial that is over starts no ranks, and reports again what it had.
        self._over = config["recorded"].get(self._plan.run_name(self._spec)) or (
            "done" if run_state(self._run) == "done" else ""
        )

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Use this process for another trial (its ranks are new ones)."""
        self.cleanup()
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Wait for the next validation, or for the end."""
        if not self._over and self._began is None:
            self._start()
        while True:
            row = self._rows.next()
            if row is not None:
                return self._report(row)
            if self._over:
                return self._end()
            if self._plan.stop_file.exists():
                self._stop()
            elif (code := self._ranks.poll()) is None:
                time.sleep(_POLL)
            # The ranks have ended; what they logged last is reported first.
            elif not self._rows.waiting():
                self._ranks_ended(code)

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Return where the checkpoint of the last validation lies; the ranks end, because a pause follows."""
        del checkpoint_dir  # only the path travels
        checkpoint = step_folder(self._run, self._step)
        # The validation may be logged before its checkpoint is whole.
        while not (checkpoint / MANIFEST).is_file() and not self._over and self._ranks.poll() is None:
            time.sleep(_POLL)
        self.cleanup(keep_lock=True)
        if not (checkpoint / MANIFEST).is_file():
            raise RuntimeError(f"{checkpoint}: the validation of this step left no checkpoint, which pbt copies")
        prepare_restart(self._run, {"checkpoint": checkpoint, "step": self._step})  # the ranks continued meanwhile
        return {"checkpoint": str(checkpoint), "step": self._step}

    def load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue from a checkpoint of this or another member when the ranks start."""
        self._copy_from = checkpoint
        self._over = ""

    def cleanup(self, keep_lock: bool = False) -> None:
        """End the ranks; they save first when the whole sweep is stopping."""
        if self._began is not None:
            if self._plan.stop_file.exists():
                self._stop()
            else:
                self._ranks.send(signal.SIGKILL)
                self._add_time()
        if not keep_lock:
            self._lock.close()

    @property
    def _ranks(self) -> RankGroup:
        if self._group is None:  # kept for the next trial of this process: it has the same placement group
            others = range(1, self._plan.workers)
            group = ray.util.get_current_placement_group()
            remote = remote_ranks(group, others, group.bundle_specs[1]) if others else []
            self._group = RankGroup([Rank(), *remote])
        return self._group

    def _start(self) -> None:
        arguments, self._step = prepare_restart(self._run, self._copy_from)
        if self._plan.population:
            self._rows.skip(self._step)
        job = self._study.mapping(replace(self._spec, params=self._params), self._plan.threads)
        set_key(job, "run.dir", str(self._run))
        write_spec(self._run, self._spec)
        write_text(self._run / JOB, to_yaml(job), private=True)
        require_own_folder(self._run / "log")
        (self._run / "log").mkdir(exist_ok=True)
        self._state = self._state.updated(attempts=self._state.attempts + 1, node=raycluster.own_address(), error="")
        self._state.write(self._run)
        argv = (sys.executable, "-m", self._plan.module, str(self._run / JOB), "--merged", *arguments)
        self._began = time.monotonic()
        self._ranks.start(argv, self._plan.cwd, self._run / "log" / "trial.log", self._plan.env)

    def _report(self, row: MetricsRow) -> dict[str, Any]:
        value = row.figures.get(self._study.metric)
        if value is None:
            self._over = "unreported"
            return {"ended": self._over, "reported": sorted(row.figures), "done": True}
        self._step = row.step
        if self._best is None or self._study.better(value, self._best):
            self._best = value
        # A population compares what its members reach now, the other schedulers the best so far.
        ranked = value if self._plan.population else self._best
        sign = 1 if self._study.mode == "max" else -1
        objective = sign * ranked if math.isfinite(ranked) else _WORST
        self._last = {
            "objective": objective,
            "validations": self._rows.count,
            "step": self._step,
            "value": value,
            "best": self._best,
        }
        if not self._over:
            self._add_time(again=True)
            if self._step >= self._max_steps():
                self._await_end()
        return self._end() if self._over and not self._rows.waiting() else self._last

    def _await_end(self) -> None:
        while (code := self._ranks.poll()) is None:
            time.sleep(_POLL)
        self._ranks_ended(code)

    def _ranks_ended(self, code: int) -> None:
        """End the trial, whose ranks have ended, or let it continue from its last checkpoint."""
        self._add_time()
        if code == DONE or (code == STOPPED and self._stops_early()):
            self._over = "done"
            if not self._rows.count:
                self._end_as_failed("the run ended without a validation: there is nothing to rank it by")
        elif code != BAD_INPUT and self._retries > 0:
            self._retries -= 1
            self._copy_from = None
            self._start()
        else:
            self._end_as_failed(what_went_wrong(self._run, code))

    def _end_as_failed(self, error: str) -> None:
        self._over, self._error = "failed", error
        self._state = self._state.updated(error=error)
        self._state.write(self._run)

    def _stop(self) -> None:
        """Let the ranks save, and end them."""
        self._ranks.send(signal.SIGTERM)
        deadline = time.monotonic() + _SAVE_SECONDS
        while self._ranks.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        self._ranks.send(signal.SIGKILL)
        self._add_time()
        self._over = "done" if run_state(self._run) == "done" else "stopped"

    def _end(self) -> dict[str, Any]:
        return {**self._last, "ended": self._over, "error": self._error, "done": True}

    def _add_time(self, again: bool = False) -> None:
        assert self._began is not None
        now = time.monotonic()
        self._state = self._state.updated(seconds=self._state.seconds + now - self._began)
        self._state.write(self._run)
        self._began = now if again else None

    def _max_steps(self) -> int:
        """Read the number of steps from the run, since a task may work it out from its data."""
        return int(load_mapping(self._run / CONFIG, resolved=True)["schedule"]["max_steps"])

    def _stops_early(self) -> bool:
        return load_mapping(self._run / CONFIG, resolved=True)["schedule"].get("stop_after") is not None


def _trial_lock(run_dir: Path) -> AbstractContextManager[None]:
    refusal = f"{run_dir} is in use by another process"
    return file_lock(run_dir / ".lock", refusal=refusal, wait=_LOCK_SECONDS, error=DataError)

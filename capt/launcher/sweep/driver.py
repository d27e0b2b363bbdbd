"""Runs groups of trials through Tune, shows them in a live table, and records each as it ends."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from ray import tune
from ray.tune import PlacementGroupFactory
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from capt.launcher.sweep.trial import SweepTrial, spec_of
from capt.launcher.sweep.trial_log import OVER, TrialLog
from capt.launcher.sweep.trials import SweepPlan, TrialSpec
from capt.pretrain.base.files import printable
from capt.pretrain.report.sweeps import TrialRecord

log = logging.getLogger(__name__)

_RECENT = 8
_COLOURS = {"done": "green", "failed": "bold red", "pruned": "yellow", "running": "cyan"}


class ProgressTable:
    """The trials that run and those that ended last, how many are left, and how long that may take."""

    def __init__(self, total: int, over: int) -> None:
        self._total, self._over = total, over
        self._running: dict[str, list[str]] = {}
        self._ended: deque[list[str]] = deque(maxlen=_RECENT)
        self._began, self._first = time.monotonic(), over
        console = Console(stderr=True)
        self._live = (
            Live(console=console, refresh_per_second=4, get_renderable=self.render) if console.is_terminal else None
        )

    def __enter__(self) -> ProgressTable:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the terminal, which Tune, that pickles its callbacks, could not pickle."""
        return {**self.__dict__, "_live": None}

    def running(self, spec: TrialSpec, *figures: str) -> None:
        """Show a trial that runs, with the step, the metric and the best of it since its last validation."""
        if figures or spec.key not in self._running:
            self._running[spec.key] = [spec.study, spec.text, "running", *figures]

    def gone(self, spec: TrialSpec) -> None:
        """Show a trial no longer."""
        self._running.pop(spec.key, None)

    def ended(self, spec: TrialSpec, record: TrialRecord) -> None:
        """Show a trial that has ended and was recorded."""
        self.gone(spec)
        self._over += 1
        score = "" if record.score is None else f"{record.score:.4g}"
        self._ended.append([spec.study, spec.text, record.state, str(record.best_step or ""), "", score])
        if self._live is None:
            text = record.error or f"{record.metric} {score} at step {record.best_step}"
            log.info(
                "%d/%d %s: %s %s: %s (%.0f s)%s",
                self._over, self._total, record.state, spec.study, spec.text, text, record.seconds, self._left(),
            )  # fmt: skip

    def _left(self) -> str:
        # Trials that were over before this start say nothing of the time that one takes.
        done = self._over - self._first
        if not done or self._over >= self._total:
            return ""
        seconds = (time.monotonic() - self._began) / done * (self._total - self._over)
        return f", about {timedelta(seconds=round(seconds))} left"

    def render(self) -> Group:
        """Return the table as it is now."""
        grid = Grid("study", "trial", "state", "step", "metric", "best", box=None, pad_edge=False)
        for row in [*self._ended, *self._running.values()]:
            grid.add_row(
                *(Text(printable(cell), _COLOURS.get(cell, "") if i == 2 else "") for i, cell in enumerate(row))
            )
        return Group(grid, Text(f"{self._over} of {self._total} trials over{self._left()}", "bold"))


class Driver(tune.Callback, tune.Stopper):
    """Tune's callback and stopper in one: what happened to trials, and whether the sweep continues."""

    def __init__(
        self,
        plan: SweepPlan,
        trial_log: TrialLog,
        need: Mapping[str, float],
        table: ProgressTable,
        concurrent: int | None,
    ) -> None:
        self._plan, self._trial_log, self._table = plan, trial_log, table
        self._need, self._concurrent = need, concurrent
        self.stopping = False
        self.fatal = ""
        """The reason why no trial can be ranked."""

    def stop(self) -> None:
        """Let running trials save and stop, and start no others."""
        self.stopping = True
        self._plan.stop_file.touch()

    def run(self, scheduler: Any, searcher: Any, samples: int, trials: Sequence[TrialSpec]) -> None:
        """Run ``trials``, or ``samples`` that a searcher draws, to their end, or until the sweep stops.

        Trials that are over are among them: they start no ranks, and report again what they had. Tune's own folder is
        a new one each time. `Tuner.restore` would know neither what a scheduler had decided, which Tune does not save,
        nor seeds, values and samples that were added, and it runs what is pickled in the sweep's folder.
        """
        if self.stopping or not (samples or trials):
            return
        resources = PlacementGroupFactory([dict(self._need)] * self._plan.workers, strategy="PACK")
        space: dict[str, Any] = {"plan": self._plan, "recorded": self._trial_log.over}
        if trials:
            space["trial"] = tune.grid_search(
                [{"spec": spec, "params": self._trial_log.params(spec)} for spec in trials]
            )
        tuner = tune.Tuner(
            tune.with_resources(SweepTrial, resources),
            param_space=space,
            tune_config=tune.TuneConfig(
                scheduler=scheduler,
                search_alg=searcher,
                # A list of given trials is gone through once; a searcher draws this many.
                num_samples=samples or 1,
                max_concurrent_trials=self._concurrent,
                reuse_actors=True,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(
                name=str(time.time_ns()),
                storage_path=str(self._plan.folder / ".tune"),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                failure_config=tune.FailureConfig(max_failures=self._plan.retries),
                callbacks=[self],
                stop=self,
                verbose=0,
            ),
        )
        tuner.fit()

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Answer Tune that this trial continues; the scheduler ends trials."""
        return False

    def stop_all(self) -> bool:
        """Return whether the whole sweep ends."""
        return self.stopping or bool(self.fatal)

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Show it."""
        self._table.running(spec_of(trial.config))

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Mapping[str, Any], **info: Any) -> None:
        """Show it; a metric that no trial will report ends the sweep."""
        spec = spec_of(trial.config)
        if result.get("ended") == "unreported":
            names = ", ".join(result["reported"])
            metric = self._plan.studies[spec.study].metric
            self.fatal = f"studies.{spec.study}.metric: validation reports no {metric!r}; it reports {names}"
            self._plan.stop_file.touch()
        elif "value" in result:
            figures = f"{result['value']:.4g}", f"{result['best']:.4g}"
            self._table.running(spec, str(result["step"]), *figures)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Record a finished trial; one that the scheduler ended early is pruned."""
        spec = spec_of(trial.config)
        ended = trial.last_result.get("ended")
        # A trial that stops with the sweep is not over: it continues when the sweep does.
        if ended in ("stopped", "unreported") or self._trial_log.state(spec) in OVER:
            self._table.gone(spec)
            return
        self._table.ended(spec, self._trial_log.add(spec, ended or "pruned", trial.last_result.get("error", "")))

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Record a trial that Ray lost or that broke outside its ranks."""
        spec = spec_of(trial.config)
        said = [line for line in str(trial.get_error() or "the trial's process was lost").splitlines() if line.strip()]
        self._table.ended(spec, self._trial_log.add(spec, "failed", said[-1].strip()[:400]))

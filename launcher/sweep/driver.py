"""Runs groups of trials through Tune, and records each as it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import tune
from ray.tune import PlacementGroupFactory

from capt.launcher.sweep.table import ProgressTable
from capt.launcher.sweep.trial import SweepTrial, spec_of
from capt.launcher.sweep.trial_log import TrialLog
from capt.launcher.sweep.trials import SweepPlan


@dataclass(frozen=True)
class TrialGroup:
    """Trials that are given to Tune together: listed ones, or ``number`` that a searcher draws."""

    searcher: Any
    scheduler: Any
    trials: Sequence[Mapping[str, Any]]
    constants: Mapping[str, Any] | None
    number: int


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
        """Why no trial can be ranked."""

    def stop(self) -> None:
        """Let running trials save and stop, and start no others."""
        self.stopping = True
        self._plan.stop_file.touch()

    def run(self, group: TrialGroup) -> None:
        """Run a group to its end, or until the sweep stops."""
        if not group.number:
            return
        resources = PlacementGroupFactory([dict(self._need)] * self._plan.workers, strategy="PACK")
        space: dict[str, Any] = {"plan": self._plan, **(group.constants or {})}
        if group.trials:
            space["trial"] = tune.grid_search(list(group.trials))
        tuner = tune.Tuner(
            tune.with_resources(SweepTrial, resources),
            param_space=space,
            tune_config=tune.TuneConfig(
                scheduler=group.scheduler,
                search_alg=group.searcher,
                num_samples=1 if group.trials else group.number,
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
            self._table.validated(spec, result["step"], result["value"], result["best"])

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Record a finished trial; one that the scheduler ended early is pruned."""
        spec = spec_of(trial.config)
        ended = trial.last_result.get("ended")
        if ended in ("stopped", "unreported") or self._trial_log.finished(spec):
            self._table.gone(spec)
            return
        self._table.ended(spec, self._trial_log.add(spec, ended or "pruned", trial.last_result.get("error", "")))

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Record a trial that Ray lost or that broke outside its ranks."""
        spec = spec_of(trial.config)
        said = [line for line in str(trial.get_error() or "the trial's process was lost").splitlines() if line.strip()]
        self._table.ended(spec, self._trial_log.add(spec, "failed", said[-1].strip()[:400]))

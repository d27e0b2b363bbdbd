"""Tune's searchers and schedulers as a sweep's configuration names them. All of them maximise ``objective``."""

from __future__ import annotations

import hashlib
import logging
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Searcher

from capt.launcher.sweep.config import Asha, Dimension, Pbt, Sweep
from capt.launcher.sweep.trial_log import DrawnSettings
from capt.launcher.sweep.trials import TrialSpec, sample_value, setting_key

log = logging.getLogger(__name__)

METRIC, TIME = "objective", "validations"
_NO_END = 10**9
_TPE_ATTEMPTS, _ATTEMPTS = 10, 50
"""The number of times that TPE may draw a known setting, and after it the uniform generator for each sample."""


def scheduler(sweep: Sweep, study: str) -> TrialScheduler:
    """Build the scheduler of one study's trials."""
    section = sweep.scheduler
    if isinstance(section, Asha):
        return ASHAScheduler(
            time_attr=TIME,
            metric=METRIC,
            mode="max",
            # Trials end by their own schedules.
            max_t=_NO_END,
            grace_period=section.grace,
            reduction_factor=section.reduction,
            stop_last_trials=False,
        )
    if isinstance(section, Pbt):
        return Population(section, sweep.space_of(study), f"{sweep.search.seed}/{study}")
    return FIFOScheduler()


_Judgement = tuple[Any, list[float | None]]
"""Optuna's trial of a setting, and the scores of its seeds that have ended."""


class Population(PopulationBasedTraining):
    """Tune's synchronous population based training, with members that keep their folders, bounds that hold, and no
    endless wait for a member that failed.
    """

    def __init__(self, section: Pbt, space: Mapping[str, Dimension], seed: str) -> None:
        super().__init__(
            time_attr=TIME,
            metric=METRIC,
            mode="max",
            perturbation_interval=section.interval,
            quantile_fraction=section.quantile,
            resample_probability=section.resample,
            hyperparam_mutations={"trial": {"params": {key: _values(dimension) for key, dimension in space.items()}}},
            synch=True,
            log_config=False,
        )
        self._space, self._seed = dict(space), seed

    def _checkpoint_or_exploit(self, trial: Any, *others: Any, **named: Any) -> None:
        """Tune's hook: what a member copies and how it changes is drawn here, from the global generators.

        Each change has draws of its own, so that a population that was killed does not repeat its first ones.
        """
        member, time = trial.config["trial"]["spec"].key, self._trial_state[trial].last_train_time
        digits = hashlib.sha256(f"{self._seed}/{member}/{time}".encode()).hexdigest()
        random.seed(digits)
        np.random.seed(int(digits[:8], 16))
        super()._checkpoint_or_exploit(trial, *others, **named)

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> Any:
        config, operations = super()._get_new_config(trial, trial_to_clone)
        params = {key: _within(self._space[key], value) for key, value in config["trial"]["params"].items()}
        # The spec, which names the folder, stays the member's own.
        config["trial"] = {**config["trial"], "spec": trial.config["trial"]["spec"], "params": params}
        return config, operations

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """Tune's hook. Members that all wait for one that failed, or for one that a resumed sweep had ahead of them,
        continue to the next change of the population.
        """
        chosen = super().choose_trial_to_run(tune_controller)
        live = tune_controller.get_live_trials()
        if chosen is not None or not live or any(trial.status != Trial.PAUSED for trial in live):
            return chosen
        furthest = max(self._trial_state[trial].last_train_time for trial in live)
        self._next_perturbation_sync = furthest + self._perturbation_interval
        return super().choose_trial_to_run(tune_controller)


class OptunaSettings(Searcher):
    """Optuna's TPE over a study's settings: each is run with every seed, and judged by the median over them.

    The n-th setting is drawn from a generator of its own, so that a sweep that was killed continues the sequence: its
    settings so far come first, and their trials that are over report again what they had. No setting is drawn twice.
    Each is recorded before Tune gets it. (Tune's `OptunaSearch` draws from one generator, draws settings twice, and its
    `Repeater` takes the mean over the seeds.)
    """

    def __init__(self, sweep: Sweep, study: str, drawn: DrawnSettings, seeds: Sequence[int]) -> None:
        """Begin with the settings drawn so far; ``seeds`` are the sweep's, or those that judge a setting."""
        super().__init__(metric=METRIC, mode="max")
        import optuna  # half a second that other searches need not wait

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._drawn, self._seeds = optuna, drawn, tuple(seeds)
        self._name, self._seed, self._samples = study, sweep.search.seed, sweep.search.samples
        self._space = sweep.space_of(study)
        self._distributions = {key: self._distribution(dimension) for key, dimension in self._space.items()}
        self._study = optuna.create_study(direction="maximize")
        self._known = {setting_key(params) for params in drawn.settings}
        self._again = [params for params in drawn.settings if self._is_of_the_space(params)]
        """Settings drawn before, which are still to be handed out."""
        self._pending: list[tuple[TrialSpec, _Judgement]] = []
        self._running: dict[str, _Judgement] = {}
        self.left = max(len(self._again), self._samples) * len(self._seeds)
        """The number of trials that are left to hand out."""

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """Return the next seed of a setting, or the first one of the next setting."""
        if not self._pending:
            trial = self._ask(self._again.pop(0)) if self._again else self._draw()
            if trial is None:
                self.left = 0
                return str(Searcher.FINISHED)
            params = {key: trial.params[key] for key in self._space}
            judgement: _Judgement = (trial, [])
            self._pending = [(TrialSpec(self._name, params, seed), judgement) for seed in self._seeds]
        spec, self._running[trial_id] = self._pending.pop(0)
        self.left -= 1
        return {"trial": {"spec": spec, "params": dict(spec.params)}}

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        """Tell Optuna of a setting all of whose seeds are over; those that failed have no score."""
        trial, scores = self._running.pop(trial_id)
        scores.append((result or {}).get(METRIC))
        if len(scores) < len(self._seeds):
            return
        numbers = [float(score) for score in scores if score is not None]
        failed = None if numbers else self._optuna.trial.TrialState.FAIL
        self._study.tell(trial, statistics.median(numbers) if numbers else None, state=failed)

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a sweep continues from its folder."""

    def _draw(self) -> Any:
        """Draw a setting that was not drawn before; None where there is no other, or there are enough."""
        if self.left < 1:
            return None
        for attempt in range(_TPE_ATTEMPTS + _ATTEMPTS * self._samples):
            digits = hashlib.sha256(f"{self._seed}/{self._name}/{len(self._known)}/{attempt}".encode()).hexdigest()
            if attempt < _TPE_ATTEMPTS:
                self._study.sampler = self._optuna.samplers.TPESampler(seed=int(digits[:8], 16))
                trial = self._study.ask(self._distributions)
            else:  # of a small space TPE may draw the same few without end
                generator = random.Random(digits)
                trial = self._ask({key: sample_value(each, generator) for key, each in self._space.items()})
            params = {key: trial.params[key] for key in self._space}
            if setting_key(params) not in self._known:
                self._known.add(setting_key(params))
                self._drawn.add(params)
                return trial
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        log.warning(
            "study %s: its space has no more than %d settings, of the search.samples %d",
            self._name, len(self._known), self._samples,
        )  # fmt: skip
        return None

    def _ask(self, params: Mapping[str, Any]) -> Any:
        """Return Optuna's trial of given values."""
        self._study.enqueue_trial(dict(params))
        return self._study.ask(self._distributions)

    def _is_of_the_space(self, params: Mapping[str, Any]) -> bool:
        """Return whether a setting could be drawn now; the space of a sweep that is continued may have changed."""
        return params.keys() == self._space.keys() and all(
            _may_be(dimension, params[key]) for key, dimension in self._space.items()
        )

    def _distribution(self, dimension: Dimension) -> Any:
        kinds = self._optuna.distributions
        if dimension.values is not None:
            return kinds.CategoricalDistribution(dimension.values)
        if dimension.randint:
            return kinds.IntDistribution(*dimension.randint)
        low, high = dimension.bounds or (0.0, 1.0)
        return kinds.FloatDistribution(low, high, log=dimension.loguniform is not None)


def _values(dimension: Dimension) -> Any:
    """Return the values of a dimension as Tune has them: a list, or a domain."""
    if dimension.values is not None:
        return list(dimension.values)
    if dimension.randint:
        # Tune leaves the upper end out.
        return tune.randint(dimension.randint[0], dimension.randint[1] + 1)
    return tune.loguniform(*dimension.loguniform) if dimension.loguniform else tune.uniform(*(dimension.uniform or ()))


def _may_be(dimension: Dimension, value: Any) -> bool:
    if dimension.bounds is None:
        return value in (dimension.values or ())
    kind = int if dimension.randint else int | float
    return isinstance(value, kind) and dimension.bounds[0] <= value <= dimension.bounds[1]


def _within(dimension: Dimension, value: Any) -> Any:
    if dimension.bounds is None:
        return value
    clipped = min(max(value, dimension.bounds[0]), dimension.bounds[1])
    return int(clipped) if dimension.randint else float(f"{clipped:.6g}")

"""Tune's searchers and schedulers as a sweep's configuration names them. All of them maximise ``objective``."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Repeater, Searcher

from capt.launcher.sweep.config import Asha, Dimension, Pbt, Sweep
from capt.launcher.sweep.trial_log import TrialLog
from capt.launcher.sweep.trials import TrialSpec

METRIC, TIME = "objective", "validations"
_NO_END = 10**9


def scheduler(sweep: Sweep, study: str) -> TrialScheduler:
    """Build the scheduler of one study's trials."""
    section = sweep.scheduler
    random.seed(sweep.search.seed)  # Tune draws from the global generators
    np.random.seed(sweep.search.seed)
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
        return Population(section, sweep.space_of(study))
    return FIFOScheduler()


class Population(PopulationBasedTraining):
    """Tune's synchronous population based training, with members that keep their folders, bounds that hold, and no
    endless wait for a member that failed.
    """

    def __init__(self, section: Pbt, space: Mapping[str, Dimension]) -> None:
        super().__init__(
            time_attr=TIME,
            metric=METRIC,
            mode="max",
            perturbation_interval=section.interval,
            quantile_fraction=section.quantile,
            resample_probability=section.resample,
            hyperparam_mutations={"trial": {"params": {key: _mutation(d) for key, d in space.items()}}},
            synch=True,
            log_config=False,
        )
        self._space = dict(space)

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


def optuna(
    sweep: Sweep, study: str, trial_log: TrialLog, known: Sequence[Mapping[str, Any]], seeds: Sequence[int]
) -> tuple[Searcher, int]:
    """Optuna's TPE over a study's settings, each run with every one of ``seeds`` and judged by the mean.

    Args:
        sweep: the sweep.
        study: a study of it.
        trial_log: its recorded trials; settings all of whose seeds are over teach the search without being run.
        known: settings that were begun, recorded or not.
        seeds: the sweep's, or those that judge a setting.

    Returns:
        The searcher, and how many trials are left to run.
    """
    from ray.tune.search.optuna import OptunaSearch  # half a second that other searches need not wait

    sign = 1 if sweep.studies[study].mode == "max" else -1
    taught, begun = [], []
    for params in known:
        scores = [trial_log.score(p) for s in seeds if trial_log.is_done(p := TrialSpec(study, params, s))]
        numbers = [score for score in scores if score is not None]
        if len(scores) == len(seeds) and numbers:
            taught.append((dict(params), sign * float(np.mean(numbers))))
        else:
            # Settings that were begun come first, so that all of their seeds get done.
            begun.append({f"params/{key}": value for key, value in params.items()})
    space = OptunaSearch.convert_search_space({"params": {key: _domain(d) for key, d in sweep.space_of(study).items()}})
    # With the seed of before, a continued search would draw the same settings again.
    searcher = OptunaSearch(space, METRIC, "max", points_to_evaluate=begun, seed=sweep.search.seed + len(taught))
    for params, value in taught:
        searcher.add_evaluated_point({f"params/{key}": v for key, v in params.items()}, value)
    left = max(0, sweep.search.samples - len(taught))
    return Repeater(searcher, repeat=len(seeds)), left * len(seeds)


def _domain(dimension: Dimension) -> Any:
    if dimension.values is not None:
        return tune.choice(dimension.values)
    if dimension.randint:
        # Tune leaves the upper end out.
        return tune.randint(dimension.randint[0], dimension.randint[1] + 1)
    return tune.loguniform(*dimension.loguniform) if dimension.loguniform else tune.uniform(*(dimension.uniform or ()))


def _mutation(dimension: Dimension) -> Any:
    return list(dimension.values) if dimension.values is not None else _domain(dimension)


def _within(dimension: Dimension, value: Any) -> Any:
    if dimension.bounds is None:
        return value
    clipped = min(max(value, dimension.bounds[0]), dimension.bounds[1])
    return int(clipped) if dimension.randint else float(f"{clipped:.6g}")

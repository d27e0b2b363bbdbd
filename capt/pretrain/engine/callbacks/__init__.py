"""The callbacks of the loop, each in its own file, and their order."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from capt.pretrain.base.errors import ConfigError, shown
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.callbacks.agreement import Agreement
from capt.pretrain.engine.callbacks.averager import Averager
from capt.pretrain.engine.callbacks.checkpointer import Checkpointer
from capt.pretrain.engine.callbacks.metrics import Metrics, Validator
from capt.pretrain.engine.callbacks.performance import GarbageCollector, Profiler, Throughput
from capt.pretrain.engine.callbacks.progress import NextSteps, ProgressDisplay
from capt.pretrain.engine.loop import Callback
from capt.pretrain.registry import callback_class, check_callbacks, reliability_callback, require_tracker


def default_callbacks(job: Job, users: Sequence[Callback] = ()) -> list[Callback]:
    """Return the callbacks that every job runs with, and ``users``, the job's own ones (`user_callbacks`).

    Throughput and Stragglers add to the report before Metrics writes it; the ranks agree before anything is validated
    or saved, and the ledger has a step before a checkpoint does; what a callback of the user may stop is saved by the
    Checkpointer after it. Each callback declares in ``follows`` which ones must come before it.
    """
    metrics, spikes = Metrics(users), reliability_callback("spikes")
    callbacks: list[Callback] = [
        Throughput(),
        reliability_callback("stragglers"),
        spikes,
        Agreement(spikes.look),
        reliability_callback("ledger"),
        reliability_callback("replicas"),
        metrics,
        Validator(metrics),
        ProgressDisplay(metrics),
        *users,
    ]
    if job.run.profile_step:
        callbacks.append(Profiler())
    stored = [reliability_callback("uploads")] if job.checkpoint.upload is not None else []
    last = [reliability_callback("local"), GarbageCollector(), NextSteps()]
    return [*callbacks, Checkpointer(), Averager(), *stored, *last]


def user_callbacks(job: Job, *, begun: bool = False) -> list[Callback]:
    """Build the callbacks of ``run.callbacks``, in its order; the settings of each are keywords of its class.

    A run that has ``begun`` does not end for the missing package of a tracker, which warns of it.

    Raises:
        ConfigError: a key is unknown or leads to no callback, its settings do not fit, or its package
            is not installed.
    """
    check_callbacks(job.run.callbacks)
    callbacks: list[Callback] = []
    for name, settings in job.run.callbacks.items():
        cls = callback_class(name)
        if not (isinstance(cls, type) and issubclass(cls, Callback)):
            raise ConfigError(
                f"run.callbacks.{name}: {shown(cls)} is not a subclass of capt.pretrain.engine.loop.Callback"
            )
        try:
            # Bound before the call: a TypeError from within the class is no wrong setting.
            inspect.signature(cls).bind(**settings)
        except TypeError as error:
            raise ConfigError(f"run.callbacks.{name}: {error}; it takes {_takes(cls)}") from None
        if not begun:
            require_tracker(name)
        callbacks.append(cls(**settings))
    return callbacks


def _takes(cls: type[Callback]) -> str:
    return ", ".join(inspect.signature(cls).parameters) or "no settings: write {}"

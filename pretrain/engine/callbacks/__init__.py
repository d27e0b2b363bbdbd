"""Callbacks, one concern a file, in the order in which the loop runs them."""

from __future__ import annotations

from pretrain.config.schema import Job
from pretrain.engine.callbacks.agreement import Agreement
from pretrain.engine.callbacks.checkpointer import Checkpointer
from pretrain.engine.callbacks.garbage import GarbageCollector
from pretrain.engine.callbacks.metrics import Metrics
from pretrain.engine.callbacks.next_steps import NextSteps
from pretrain.engine.callbacks.profiler import Profiler
from pretrain.engine.callbacks.progress import ProgressDisplay
from pretrain.engine.callbacks.throughput import Throughput
from pretrain.engine.callbacks.validator import Validator
from pretrain.engine.loop import Callback


def default_callbacks(job: Job) -> list[Callback]:
    """What every job runs with. Throughput adds to the report before Metrics writes it; the ranks agree before anything
    is validated or saved."""
    metrics = Metrics()
    callbacks: list[Callback] = [
        Throughput(),
        Agreement(),
        metrics,
        Validator(metrics),
        ProgressDisplay(metrics),
    ]
    if job.run.profile_step:
        callbacks.append(Profiler())
    return [*callbacks, Checkpointer(), GarbageCollector(), NextSteps()]

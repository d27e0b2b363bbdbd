"""Stops a run whose loss or gradient is no longer a number, before it writes such a checkpoint."""

from __future__ import annotations

import math

from pretrain.engine import distributed
from pretrain.engine.loop import Callback, Run
from pretrain.engine.task import Report, number


class TrainingDivergedError(RuntimeError):
    """The loss or the gradient norm is not finite."""


class Stability(Callback):
    """Raises :class:`TrainingDivergedError` on all ranks when any rank sees a non-finite loss or gradient norm.

    An fp16 overflow, which the loss scaler answers by skipping the update, is no divergence.
    """

    def after_step(self, run: Run, report: Report) -> None:
        if any(engine.update_was_skipped() for engine in run.engines.values()):
            return
        found = {name: number(report[name]) for name in ("loss", "grad_norm") if name in report}
        bad = [f"{name} is {value}" for name, value in found.items() if not math.isfinite(value)]
        if distributed.highest_over_ranks(len(bad)):
            run.diverged = True
            raise TrainingDivergedError(
                f"{bad[0] if bad else 'loss or grad_norm is not finite on another rank'} at step {run.progress.step}; "
                "resume from the last checkpoint with a lower optimizer.lr, a longer schedule.warmup_steps or "
                "optimizer.clip=1.0"
            )

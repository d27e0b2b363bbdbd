"""Computes the learning rate as a function of the step."""

from __future__ import annotations

import math

from pretrain.config.schema import OptimizerSection, ScheduleSection


def learning_rate(step: int, schedule: ScheduleSection, optimizer: OptimizerSection) -> float:
    r"""Return the learning rate of update ``step`` (0-based).

    Warmup: :math:`\eta\,(t+1)/w` for :math:`t < w`. Then with :math:`u = (t-w)/(T-w)`: ``linear`` :math:`\eta(1-u)`,
    ``cosine`` :math:`\eta(1+\cos\pi u)/2`, ``constant`` :math:`\eta`.
    """
    warmup, total = schedule.warmup_steps, schedule.max_steps
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    done = min(max(step - warmup, 0) / max(total - warmup, 1), 1.0)
    if schedule.type == "linear":
        return optimizer.lr * (1.0 - done)
    if schedule.type == "cosine":
        return optimizer.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return optimizer.lr

"""Computes the learning rate as a function of the step."""

from __future__ import annotations

import math

from pretrain.config.schema import OptimizerSection, ScheduleSection


def learning_rate(step: int, schedule: ScheduleSection, optimizer: OptimizerSection) -> float:
    r"""Return the learning rate of update ``step`` (0-based).

    Warmup: :math:`\eta\,(t+1)/w` for :math:`t < w`. Then with :math:`u = (t-w)/(T-w)` and
    :math:`\phi` = ``final``: :math:`\eta(\phi + (1-\phi)\,d)`, where :math:`d = 1-u` for ``linear`` and
    :math:`(1+\cos\pi u)/2` for ``cosine``; ``constant`` is :math:`\eta`.
    """
    warmup, total = schedule.warmup_steps, schedule.max_steps
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    done = min(max(step - warmup, 0) / max(total - warmup, 1), 1.0)
    if schedule.type == "linear":
        left = 1.0 - done
    elif schedule.type == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        return optimizer.lr
    return optimizer.lr * (schedule.final + (1.0 - schedule.final) * left)

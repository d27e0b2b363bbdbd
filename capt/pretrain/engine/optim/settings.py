"""Settings of a module's updates by a task: its optimizer, and the learning rate of each step. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from capt.pretrain.config.schema import EngineSection, OptimizerSection, ScheduleSection

# Computes the learning rate as a function of the step.


def learning_rate(step: int, schedule: ScheduleSection, optimizer: OptimizerSection) -> float:
    r"""Return the learning rate of update ``step`` (0-based).

    Warmup: :math:`\eta\,(t+1)/w` for :math:`t < w`. Then with :math:`u = (t-w)/(T-w)` and
    :math:`\phi` = ``final``: :math:`\eta(\phi + (1-\phi)\,d)`, where :math:`d = 1-u` for ``linear`` and
    :math:`(1+\cos\pi u)/2` for ``cosine``; ``constant`` is :math:`\eta`. ``wsd`` (Hu et al. 2024, arXiv 2404.06395) is
    :math:`\eta` until the last :math:`D` = ``decay_steps``; in them :math:`u = (t-T+D)/D`, and :math:`d = 1-\sqrt u`
    for ``decay: sqrt`` (Hagele et al. 2024, arXiv 2405.18392), :math:`1-u` for ``linear``.
    """
    warmup, total = schedule.warmup_steps, schedule.max_steps
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    begin = total - schedule.decay_steps if schedule.type == "wsd" else warmup
    done = min(max(step - begin, 0) / max(total - begin, 1), 1.0)
    if schedule.type == "linear":
        left = 1.0 - done
    elif schedule.type == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * done))
    elif schedule.type == "wsd" and schedule.decay_steps:
        left = 1.0 - (math.sqrt(done) if schedule.decay == "sqrt" else done)
    else:
        return optimizer.lr
    return optimizer.lr * (schedule.final + (1.0 - schedule.final) * left)


@dataclass(frozen=True)
class ModuleOptimizer:
    """The optimizer of one module: its own section, and whether ``schedule`` moves its learning rate.

    Args:
        section: type, learning rate, weight decay, clipping. A task makes it from sections of its own job.
        schedule: false keeps the learning rate at ``section.lr`` from the first update to the last.
        average: decay of an average of the weights (:mod:`capt.pretrain.engine.optim.optimizers`); None keeps none.
    """

    section: OptimizerSection
    schedule: bool = True
    average: float | None = None

    def learning_rate(self, step: int, schedule: ScheduleSection) -> float:
        """Learning rate of update ``step`` (0-based)."""
        return learning_rate(step, schedule, self.section) if self.schedule else self.section.lr


def offloads_optimizer(engine: EngineSection) -> bool:
    """Return whether the optimizer's state is in host memory."""
    extra = engine.deepspeed_extra.get("zero_optimization", {})
    # the second is DeepSpeed's older name, which it still takes
    return engine.offload_optimizer or "offload_optimizer" in extra or bool(extra.get("cpu_offload"))

"""How a module is updated, as a task says it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.schema import EngineSection, OptimizerSection, ScheduleSection
from pretrain.engine.schedule import learning_rate


@dataclass(frozen=True)
class ModuleOptimizer:
    """The optimizer of one module: its own section, and whether ``schedule`` moves its learning rate.

    Args:
        section: type, learning rate, weight decay, clipping. A task makes it from sections of its own job.
        schedule: false keeps the learning rate at ``section.lr`` from the first update to the last.
        average: decay of an average of the weights (:mod:`pretrain.engine.optim.average`); None keeps none.
    """

    section: OptimizerSection
    schedule: bool = True
    average: float | None = None

    def learning_rate(self, step: int, schedule: ScheduleSection) -> float:
        """Learning rate of update ``step`` (0-based)."""
        return learning_rate(step, schedule, self.section) if self.schedule else self.section.lr


def offloads_optimizer(engine: EngineSection) -> bool:
    """Whether the optimizer's state lies in host memory."""
    extra = engine.deepspeed_extra.get("zero_optimization", {})
    # the second is DeepSpeed's older name, which it still takes
    return engine.offload_optimizer or "offload_optimizer" in extra or bool(extra.get("cpu_offload"))

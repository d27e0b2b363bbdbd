"""The sequences of each optimizer step of a job: one number, or a ramp that grows to it in steps. No torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Steps of ``batch`` sequences, which follow the first ``step`` steps and their ``samples``."""

    step: int
    samples: int
    batch: int


@dataclass(frozen=True)
class BatchSizeSchedule:
    """The number of sequences of every optimizer step, a function of the number of the step alone.

    The order of the data, the ledger, rollbacks and the plan all find the samples of a step with it.
    """

    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, batch: int, ramp: Iterable[tuple[int, int]] = (), sample_tokens: int = 1) -> BatchSizeSchedule:
        """Return the schedule of ``batch.global`` and ``batch.ramp``.

        Args:
            batch: sequences of a step after the ramp.
            ramp: (tokens, sequences): the size of a step until the run has seen these tokens, in whole steps.
            sample_tokens: tokens of a sequence.
        """
        steps, step, samples = list[tuple[int, int]](), 0, 0
        for tokens, sequences in ramp:
            steps.append((step, sequences))
            # Rounded up to whole steps; none where the stage before has seen that number of tokens already.
            more = max(0, -(-(tokens - samples * sample_tokens) // (sequences * sample_tokens)))
            step, samples = step + more, samples + more * sequences
        return cls.of_steps([*steps, (step, batch)])

    @classmethod
    def of_steps(cls, steps: Sequence[tuple[int, int]]) -> BatchSizeSchedule:
        """Return the schedule of (step, batch): the steps after the first ``step`` have ``batch`` sequences."""
        stages = [Stage(0, 0, steps[0][1])]
        for step, batch in steps[1:]:
            last = stages[-1]
            # A stage without a step gives way to the next.
            if step == last.step:
                stages.pop()
            stages.append(Stage(step, last.samples + (step - last.step) * last.batch, batch))
        return cls(tuple(stages))

    @property
    def as_steps(self) -> tuple[tuple[int, int], ...]:
        """The schedule as `of_steps` reads it."""
        return tuple((stage.step, stage.batch) for stage in self.stages)

    def _stage(self, step: int) -> Stage:
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage.step) - 1]

    def size(self, step: int) -> int:
        """Sequences of update ``step`` (0-based)."""
        return self._stage(step).batch

    def samples_before(self, step: int) -> int:
        """Sequences of the first ``step`` updates together."""
        stage = self._stage(step)
        return stage.samples + (step - stage.step) * stage.batch

    def samples_at(self, steps: float) -> float:
        """`samples_before`, on a straight line within a step."""
        whole = math.floor(steps)
        return self.samples_before(whole) + (steps - whole) * self.size(whole)

    def begins_at(self, step: int) -> bool:
        """Return whether update ``step`` (0-based) is the first one of another size than the one before."""
        return any(stage.step == step for stage in self.stages[1:])

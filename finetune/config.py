"""The sections that every fine-tuning job shares: its length, validation and checkpoints in epochs. No torch here."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.base import NonNegativeInt, PositiveInt
from capt.pretrain.config.schema import CheckpointSection, Job, ScheduleSection, ValidateSection

AnyJob = TypeVar("AnyJob", bound="FineTuningJob")


class FineTuningSchedule(ScheduleSection):
    """``epochs`` and the warmup are turned into steps once the data is known; null = the steps as given."""

    max_steps: PositiveInt = Field(1_000_000_000, description="with epochs: the largest number")
    epochs: PositiveFloat | None = Field(10.0, description="passes over the training data; null = max_steps alone")
    warmup_epochs: NonNegativeFloat | None = Field(None, description="passes of warmup; null = warmup_ratio")
    warmup_ratio: NonNegativeFloat | None = Field(0.06, le=1, description="of max_steps; null = warmup_steps")

    def in_steps(self, steps_per_epoch: float) -> FineTuningSchedule:
        """The schedule with ``max_steps`` and ``warmup_steps`` for an epoch of this number of steps.

        Raises:
            ConfigError: the warmup is longer than the job.
        """
        steps = self.max_steps
        if self.epochs is not None:
            steps = min(steps, math.ceil(self.epochs * steps_per_epoch))
        key, warmup = "warmup_steps", self.warmup_steps
        if self.warmup_epochs is not None:
            key, warmup = "warmup_epochs", int(self.warmup_epochs * steps_per_epoch)
        elif self.warmup_ratio is not None:
            warmup = int(self.warmup_ratio * steps)
        if warmup > steps:
            given = f"{warmup}" if key == "warmup_steps" else f"{self.warmup_epochs:g} ({warmup} steps)"
            raise ConfigError(f"schedule.{key} {given} is longer than the {steps} steps of this job")
        return self.model_copy(update={"max_steps": steps, "warmup_steps": warmup})


class FineTuningValidate(ValidateSection):
    """Validation on the whole dev set."""

    per_epoch: PositiveInt | None = Field(1, description="validations an epoch; null = every validate.every steps")


class FineTuningCheckpoint(CheckpointSection):
    """The newest checkpoint is kept beside the best one, so that a job that is killed loses an epoch at most."""

    every: NonNegativeInt | Literal["auto"] = Field(
        0, description="steps; 0 = per_epoch; auto = as often as they cost at most 1% of the time, and at least every "
        "15 minutes"
    )  # fmt: skip
    keep: PositiveInt = Field(1, description="how many of the newest stay")
    per_epoch: PositiveInt | None = Field(
        1, description="checkpoints an epoch where every is 0; null = only at the end"
    )


class FineTuningJob(Job):
    """A job that fine-tunes a model for some epochs of a labelled data set."""

    schedule: FineTuningSchedule = FineTuningSchedule()
    validate_: FineTuningValidate = Field(FineTuningValidate(), alias="validate")
    checkpoint: FineTuningCheckpoint = FineTuningCheckpoint()

    def encoder_config(self) -> dict[str, Any] | None:
        """The text encoder in the job's checkpoints, as ``config.json`` describes it; None where they have none.

        It lets further fine-tuning start from them. Tasks override it.
        """
        return None

    def with_steps(self: AnyJob, examples: int) -> AnyJob:
        """The job for a training set of this size: all that is given in epochs is filled in as steps.

        A job that has been through this once stays as it is, so that a resumed run has the same steps.

        Raises:
            ConfigError: the warmup is longer than the job.
        """
        steps_per_epoch = examples / self.batch.global_

        def steps_between(per_epoch: int) -> int:
            return max(1, math.ceil(steps_per_epoch / per_epoch))

        validate, checkpoint = self.validate_, self.checkpoint
        every = validate.every if validate.per_epoch is None else steps_between(validate.per_epoch)
        save_every = checkpoint.every or (steps_between(checkpoint.per_epoch) if checkpoint.per_epoch else 0)
        return self.model_copy(
            update={
                "schedule": self.schedule.in_steps(steps_per_epoch),
                "validate_": validate.model_copy(update={"every": every}),
                "checkpoint": checkpoint.model_copy(update={"every": save_every}),
            }
        )

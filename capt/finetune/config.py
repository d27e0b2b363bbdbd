"""The sections that fine-tuning jobs share: length, validation and checkpoints in epochs; texts and their encoder.

No torch here.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat

from capt.finetune.text_task import TextTask
from capt.pretrain.base.cache import default_cache
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.base import NonNegativeInt, PathField, PositiveInt, Section
from capt.pretrain.config.lora import LoraSection
from capt.pretrain.config.schema import (
    BatchSection,
    CheckpointSection,
    Job,
    OptimizerSection,
    ScheduleSection,
    ValidateSection,
)
from capt.pretrain.language.inputs import describe_initial_model as describe_encoder
from capt.pretrain.models.hf_config import FolderOrId

AnyJob = TypeVar("AnyJob", bound="FineTuningJob")
AnyTextJob = TypeVar("AnyTextJob", bound="TextJob")


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
            # max_steps stays the upper limit.
            steps = min(steps, math.ceil(self.epochs * steps_per_epoch))
        key, warmup = "warmup_steps", self.warmup_steps
        if self.warmup_epochs is not None:
            key, warmup = "warmup_epochs", int(self.warmup_epochs * steps_per_epoch)
        elif self.warmup_ratio is not None:
            warmup = int(self.warmup_ratio * steps)
        if warmup > steps:
            given = f"{warmup}" if key == "warmup_steps" else f"{self.warmup_epochs:g} ({warmup} steps)"
            raise ConfigError(f"schedule.{key} {given} is longer than the {steps} steps of this job")
        return self.with_steps(steps, warmup)


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


class TextData(Section):
    """Settings for reading labelled texts and putting them into batches. A task adds where the texts are."""

    sequence_length: PositiveInt | None = Field(
        None, ge=8, le=2**20, description="longest input in tokens; if unset 512, or the positions of the encoder"
    )
    bucketing: bool = Field(True, description="put texts of similar length into a batch; false = plain shuffled order")
    shuffle: bool = Field(True, description="false = file order in every epoch, without bucketing")
    max_train: PositiveInt | None = Field(None, description="train on this many examples, the same ones for every seed")
    cache: PathField = Field(default_factory=default_cache, description="where the token ids of large tasks are kept")

    @property
    @abstractmethod
    def text_task(self) -> TextTask:
        """The meaning of the classifier's outputs."""


class TextModel(Section):
    """The encoder to start from and the dropouts of fine-tuning."""

    init: FolderOrId = Field(
        description="a run or checkpoint of ours, a Hugging Face folder, or USER/NAME[@REV] of the hub"
    )
    dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of embeddings and layer outputs")
    attention_dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of the attention weights")
    classifier_dropout: NonNegativeFloat | None = Field(
        None, lt=1, description="dropout of the classifier; if unset model.dropout"
    )
    allow_missing: bool = Field(False, description="continue where weights of the encoder are missing or unknown")
    lora: LoraSection | None = Field(
        None, description="train low-rank adapters of the encoder, and the head, with its own weights frozen; null = "
        "train all weights"
    )  # fmt: skip
    encoder: dict[str, Any] | None = Field(
        None, description="the encoder as config.json describes it; filled in by the job"
    )


class TextOptimizer(OptimizerSection):
    """Adam as RoBERTa was fine-tuned."""

    lr: PositiveFloat = Field(1e-5, description="peak learning rate")
    weight_decay: NonNegativeFloat = Field(0.1, description="of matrices; vectors do not decay")


class TextJob(FineTuningJob):
    """A pretrained encoder fine-tuned on labelled texts.

    Defaults are RoBERTa's recipe (Liu et al. 2019, Table 10; fairseq's ``config/finetuning``): 10 epochs, 6% of warmup
    and a linear decay to 0, Adam (0.9, 0.98) eps 1e-6, weight decay 0.1, dropouts 0.1, no clipping. One thing differs
    from fairseq: biases and LayerNorm do not decay, as in every job here.
    """

    data: TextData
    model: TextModel
    batch: BatchSection = BatchSection(global_=16, micro=16)
    optimizer: TextOptimizer = TextOptimizer()

    @abstractmethod
    def describe_data(self) -> str:
        """Describe the files of the task in one line; no file is read through."""

    def check_inputs(self) -> list[str]:
        """Describe the files of the task and where the encoder comes from; no file is read through."""
        return [f"data: {self.describe_data()}", f"model.init: {describe_initial_model(self.model.init)}"]

    def encoder_config(self) -> dict[str, Any] | None:
        """The ``config.json`` keys of the encoder from ``model.init``, which the job records when it starts."""
        return self.model.encoder

    def longest(self, max_positions: int) -> int:
        """Tokens of the longest row for an encoder with ``max_positions``. Raises ``ConfigError`` if it has too few."""
        length = self.data.sequence_length or min(512, max_positions)
        if length > max_positions:
            raise ConfigError(f"data.sequence_length {length} is longer than the encoder's {max_positions} positions")
        return length

    def with_encoder(self: AnyTextJob, encoder: dict[str, Any], max_positions: int) -> AnyTextJob:
        """The job with what follows from its encoder: ``data.sequence_length`` and ``model.encoder``.

        Args:
            encoder: the encoder as ``config.json`` describes it.
            max_positions: the longest sequence that it takes.

        Raises:
            ConfigError: ``data.sequence_length`` is longer.
        """
        return self.model_copy(
            update={
                "data": self.data.model_copy(update={"sequence_length": self.longest(max_positions)}),
                "model": self.model.model_copy(update={"encoder": encoder}),
            }
        )


# A look at what every fine-tuning job starts from, without torch: for dry runs and ``capt config validate``.


def describe_initial_model(init: Path) -> str:
    """Say in one line where the model of ``model.init`` comes from; see `capt.pretrain.language.inputs`.

    Raises:
        CheckpointError: as there, or its family has no classifier.
    """
    from capt.pretrain.models.foreign.families import family_of
    from capt.pretrain.models.hf_folder import is_hf, read_json
    from capt.pretrain.models.sentence_folder import encoder_folder

    described = describe_encoder(init)
    if is_hf(init):
        path = encoder_folder(init) / "config.json"
        family_of(read_json(path), str(path))
    return described

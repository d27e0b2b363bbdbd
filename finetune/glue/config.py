"""The configuration of the ``glue`` job: a pretrained encoder fine-tuned on one GLUE task. No torch here.

Defaults are RoBERTa's recipe (Liu et al. 2019, Table 10; fairseq's ``config/finetuning``): 10 epochs, 6% of warmup and
a linear decay to 0, Adam (0.9, 0.98) eps 1e-6, weight decay 0.1, dropouts 0.1, no clipping. One thing differs from
fairseq: biases and LayerNorm do not decay, as in every job here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from capt.finetune.config import FineTuningJob
from capt.finetune.glue.tasks import GlueTask, glue_task
from capt.finetune.inputs import describe_initial_model
from capt.pretrain.base.cache import default_cache
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.base import PathField, PositiveInt, Section
from capt.pretrain.config.schema import BatchSection, OptimizerSection
from capt.pretrain.models.hf_config import Source


class GlueData(Section):
    """Which task, and where its files are."""

    task: str = Field(description="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli")
    source: Literal["files", "hub"] = Field("files", description="the official TSV files, or the datasets library")
    path: PathField | None = Field(
        None, description="files: folder with RTE/, CoLA/, ...; hub: a saved copy of the dataset"
    )
    sequence_length: PositiveInt | None = Field(
        None, ge=8, le=2**20, description="longest input in tokens; if unset 512, or the positions of the encoder"
    )
    bucketing: bool = Field(True, description="put texts of similar length into a batch; false = plain shuffled order")
    shuffle: bool = Field(True, description="false = file order in every epoch, without bucketing")
    max_train: PositiveInt | None = Field(None, description="train on this many examples, the same ones for every seed")
    cache: PathField = Field(default_factory=default_cache, description="where the token ids of large tasks are kept")

    @property
    def glue_task(self) -> GlueTask:
        """The task that ``task`` names."""
        return glue_task(self.task)

    @field_validator("task")
    @classmethod
    def _is_known(cls, value: str) -> str:
        try:
            task = glue_task(value)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("data.task: ")) from None
        if "train" not in task.splits:
            raise ValueError(f"{value} has no training data; it is predicted with the model of mnli")
        return value

    @model_validator(mode="after")
    def _has_a_place(self) -> GlueData:
        if self.source == "files" and self.path is None:
            raise ValueError("data.path is missing: name the folder that holds RTE/, CoLA/ and so on")
        return self


class GlueModel(Section):
    """The encoder to start from and the dropouts of fine-tuning."""

    init: Source = Field(
        description="a run or checkpoint of ours, a Hugging Face folder, or USER/NAME[@REV] of the hub"
    )
    dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of embeddings and layer outputs")
    attention_dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of the attention weights")
    classifier_dropout: NonNegativeFloat | None = Field(
        None, lt=1, description="dropout of the classifier; if unset model.dropout"
    )
    allow_missing: bool = Field(False, description="continue where weights of the encoder are missing or unknown")
    encoder: dict[str, Any] | None = Field(
        None, description="the encoder as config.json describes it; filled in by the job"
    )


class GlueOptimizer(OptimizerSection):
    """Adam as RoBERTa was fine-tuned."""

    lr: PositiveFloat = Field(1e-5, description="peak learning rate")
    weight_decay: NonNegativeFloat = Field(0.1, description="of matrices; vectors do not decay")


class GlueJob(FineTuningJob):
    """A ``glue`` job: a pretrained encoder fine-tuned on one task of GLUE."""

    data: GlueData
    model: GlueModel
    batch: BatchSection = BatchSection(global_=16, micro=16)
    optimizer: GlueOptimizer = GlueOptimizer()

    def metric_names(self) -> frozenset[str]:
        """The task's metrics, the loss and what `compute_metrics` adds; for MNLI those of the second dev set too."""
        task = self.data.glue_task
        names = (*task.metrics, "loss", "degenerate", "baseline")
        suffixes = ("", "_mismatched") if "dev_mismatched" in task.splits else ("",)
        return frozenset(f"{name}{suffix}" for name in names for suffix in suffixes)

    def check_inputs(self) -> list[str]:
        """Describe the files of the task and where the encoder comes from; no file is read."""
        from capt.finetune.glue.inputs import describe_data  # numpy

        data = self.data
        described = describe_data(data.glue_task, data.path, from_hub=data.source == "hub")
        return [f"data: {described}", f"model.init: {describe_initial_model(self.model.init)}"]

    def encoder_config(self) -> dict[str, Any] | None:
        """What ``model.init`` held, which the job notes when it starts."""
        return self.model.encoder

    def longest(self, max_positions: int) -> int:
        """Tokens of the longest row for an encoder with ``max_positions``. Raises ``ConfigError`` if it has too few."""
        length = self.data.sequence_length or min(512, max_positions)
        if length > max_positions:
            raise ConfigError(f"data.sequence_length {length} is longer than the encoder's {max_positions} positions")
        return length

    def with_encoder(self, encoder: dict[str, Any], max_positions: int) -> GlueJob:
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


JOB = GlueJob

"""The configuration of the ``capt_language`` job: RoBERTa with masked-language-model and CAPT losses. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from pretrain.config.base import NonNegativeInt, PathField, PositiveInt, Section
from pretrain.config.schema import Job, ValidateSection
from pretrain.data.config import CorruptionConfig, DataConfig
from pretrain.models.config import RobertaConfig


class TokenizerSection(Section):
    """A tokenizer to use (``path``), or how to train one on ``data.*`` when there is none (cached by content)."""

    path: PathField | None = Field(
        None, description="folder: ours, any Hugging Face tokenizer, vocab.json + merges.txt, vocab.txt"
    )
    type: Literal["unigram", "bpe"] = "unigram"
    vocab_size: PositiveInt = Field(8192, le=2**24)
    byte_fallback: bool = True
    max_sentences: PositiveInt = Field(1_000_000, description="lines of the corpus to train on, sampled by seed")


class TemperatureSection(Section):
    """tau over training: ``inverted_triangle`` (Eq. 6, down to ``minimum`` at half time and up again), ``constant``
    (``value``), ``linear`` (``start`` to ``end``) or ``learned`` (from ``value``)."""

    type: Literal["inverted_triangle", "constant", "linear", "learned"] = "inverted_triangle"
    minimum: PositiveFloat = 0.05
    value: PositiveFloat = 0.1
    start: PositiveFloat = 0.5
    end: PositiveFloat = 0.05


class ContrastSection(Section):
    """The CAPT loss. ``weight`` 0 is MLM alone: one view, no queue."""

    weight: NonNegativeFloat = 1.0
    queue: NonNegativeInt = Field(
        8192, le=2**31 - 1, description="representations over all ranks, both views counted; 0 = none"
    )
    queue_start: NonNegativeInt = Field(
        0, description="step from which queued rows are negatives; an encoder that still changes fast needs some"
    )
    queue_dtype: Literal["fp32", "bf16"] = "fp32"
    in_batch: Literal["global", "local", "none"] = Field("global", description="whose live rows are negatives")
    reduction: Literal["mean", "sum"] = Field("mean", description="sum is Eq. 4 to the letter and grows with the batch")
    mask_duplicates: bool = Field(True, description="a queued view of the same window is no negative")
    temperature: TemperatureSection = TemperatureSection()
    impl: Literal["chunked", "dense"] = "chunked"

    @model_validator(mode="after")
    def _has_negatives(self) -> ContrastSection:
        if self.weight > 0 and self.queue == 0 and self.in_batch == "none":
            raise ValueError("contrast.in_batch none without contrast.queue leaves no negatives; set one of them")
        return self


class LoaderSection(Section):
    """Background processes that assemble batches; their number never changes what is trained on."""

    workers: NonNegativeInt = Field(1, le=1024)
    prefetch: PositiveInt = Field(4, le=65_536)


class LanguageValidate(ValidateSection):
    """Validation on held-out text, the same samples, noise and temperature at every step and for every run."""

    samples: PositiveInt = Field(512, description="held-out sequences")
    temperature: PositiveFloat = Field(0.05, description="fixed, so that runs and steps compare")


class LanguageJob(Job):
    """A ``capt_language`` job."""

    data: DataConfig
    tokenizer: TokenizerSection = TokenizerSection()
    model: RobertaConfig = RobertaConfig()
    contrast: ContrastSection = ContrastSection()
    corruption: CorruptionConfig = CorruptionConfig()
    loader: LoaderSection = LoaderSection()
    validate_: LanguageValidate = Field(LanguageValidate(), alias="validate")

    @model_validator(mode="after")
    def _positions_suffice(self) -> LanguageJob:
        if self.data.sequence_length > self.model.max_positions:
            raise ValueError(
                f"data.sequence_length {self.data.sequence_length} is longer than the position table: "
                f"model.max_positions is {self.model.max_positions}"
            )
        return self

    def check_inputs(self) -> list[str]:
        """Corpus, tokenizer and ``model.init``; see `pretrain.language.inputs.describe_inputs`."""
        from pretrain.language.inputs import describe_inputs  # numpy, and the readers of files

        return describe_inputs(self)


JOB = LanguageJob

"""The configuration of the ``capt_pairs`` job: an embedding model from pairs of texts, on any encoder. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from capt.pretrain.base.errors import ConfigError, counted
from capt.pretrain.config.base import NonNegativeInt, PositiveInt, Section
from capt.pretrain.config.contrast import ContrastSection, TemperatureSection, check_validation_samples
from capt.pretrain.config.lora import LoraSection
from capt.pretrain.config.retrieval import RetrievalSection
from capt.pretrain.config.schema import (
    BatchSection,
    Job,
    LoaderSection,
    OptimizerSection,
    ScheduleSection,
    ValidateSection,
)
from capt.pretrain.data.config import CorruptionConfig
from capt.pretrain.data.views import find_view
from capt.pretrain.models.hf_config import FolderOrId
from capt.pretrain.pairs.data_config import PairData, PairOptions, paths_of
from capt.pretrain.pairs.distillation_config import PairDistillation
from capt.pretrain.pairs.losses import LOSSES, NO_LOSS, find_loss
from capt.pretrain.pairs.metric_names import METRICS, RETRIEVAL, SPREAD, TAUGHT, at_width, of_teacher
from capt.pretrain.pairs.representations import REPRESENTATIONS, check_representation, find_representation

Pooling = Literal["mean", "cls", "last"]


class PairModel(Section):
    """The encoder, which queries and documents share, and how a text's representation is made of its output."""

    init: FolderOrId = Field(
        description="a run or checkpoint of ours, a Hugging Face folder, or USER/NAME[@REV] of the hub"
    )
    pooling: Literal["auto", "mean", "cls", "last"] = Field(
        "auto", description="mean over tokens, first or last token; auto: as model.init was trained, else mean"
    )
    projection: PositiveInt | None = Field(
        None, le=65_536, description="columns of a linear map after the pooling; null = none"
    )
    representation: str = Field(
        "dense",
        description="what a text becomes: "
        + "; ".join(f"{name}: {row.about}" for name, row in REPRESENTATIONS.items())
        + "; or one of another package",
    )
    representation_options: dict[str, Any] = Field(
        {}, description="settings of a representation of another package, as it defines them"
    )
    dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of embeddings and layer outputs")
    attention_dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of the attention weights")
    random: bool = Field(False, description="random weights of the sizes of init, whose tokenizer is taken alone")
    allow_missing: bool = Field(False, description="continue where weights of the encoder are missing or unknown")
    lora: LoraSection | None = Field(
        None, description="train low-rank adapters of the encoder, and what is on it, with its own weights frozen; "
        "null = train all weights"
    )  # fmt: skip
    encoder: dict[str, Any] | None = Field(
        None, description="the encoder as config.json describes it; filled in by the job"
    )


class PairMasked(Section):
    """The masked-language-model loss beside the contrast, on corruptions of queries and documents."""

    weight: NonNegativeFloat = Field(
        0.0, description="factor of the loss in the total (0.1 in SimCSE); 0 = none, and no head"
    )


class PairSchedule(ScheduleSection):
    """``epochs`` are turned into steps once the pairs are read, unless ``max_steps`` alone is given."""

    max_steps: PositiveInt = Field(1_000_000_000, description="optimizer steps; with epochs an upper bound")
    epochs: Literal["auto"] | PositiveFloat | None = Field(
        "auto",
        description="passes over the pairs of all sources; auto = those that come to 256,000 pairs, 1 at least and 10 "
        "at most; null = max_steps alone, as where max_steps is given and epochs is not",
    )
    warmup_ratio: NonNegativeFloat | None = Field(
        0.1, le=1, description="with epochs: warmup as a share of the steps; null = warmup_steps"
    )

    @model_validator(mode="before")
    @classmethod
    def _steps_are_meant(cls, values: Any) -> Any:
        # A run of a release without epochs has steps alone, and is resumed with them.
        if isinstance(values, dict) and "max_steps" in values and "epochs" not in values:
            return {**values, "epochs": None}
        return values

    def in_steps(self, rows: int, batch: int) -> PairSchedule:
        """The schedule with steps in place of epochs, for ``rows`` pairs in batches of ``batch``."""
        if self.epochs is None:
            return self
        epochs = min(_MOST_EPOCHS, max(1.0, _PAIRS_ENOUGH / rows)) if self.epochs == "auto" else self.epochs
        steps = min(self.max_steps, math.ceil(epochs * rows / batch))
        warmup = self.warmup_steps if self.warmup_ratio is None else int(self.warmup_ratio * steps)
        if warmup > steps:
            raise ConfigError(
                f"schedule.warmup_steps {warmup} is longer than the {steps} steps of {epochs:g} epochs of {rows:,} "
                "pairs; lower it, or set schedule.warmup_ratio"
            )
        return self.with_steps(steps, warmup)


_PAIRS_ENOUGH, _MOST_EPOCHS = 256_000, 10.0
"""Pairs of 1,000 steps of 256, and passes after which few pairs are learnt by heart."""


class PairTemperature(TemperatureSection):
    """tau over training; ``constant`` at .05 unless set."""

    type: Literal["inverted_triangle", "constant", "linear", "learned"] = Field(
        "constant", description="how tau changes over training"
    )
    value: PositiveFloat = Field(0.05, description="constant: tau; learned: its first value")


class PairContrast(ContrastSection):
    """The contrast of queries and documents."""

    queue: NonNegativeInt = Field(0, le=2**31 - 1, description="documents kept as negatives, over all ranks; 0 = none")
    directions: Literal["infonce", "symmetric", "gte", "qwen3"] = Field(
        "infonce",
        description="cosines in the loss: infonce = query to documents; symmetric = also document to queries, one "
        "softmax each; gte and qwen3 = also queries and documents among themselves, in one softmax",
    )
    mask_duplicates: bool = Field(
        True, description="what a row of any source gives to a query, and copies of it, are not negatives of the query"
    )
    hard_negatives: Literal["all", "own"] | None = Field(
        None, description="a query sees the hard negatives of all queries, or its own; null = as directions has it"
    )
    hardness_own: NonNegativeFloat = Field(
        0.0,
        le=1000,
        description="this factor times the cosine is added to the logit of a query's own hard negatives, without "
        "gradient (5 in EmbeddingGemma)",
    )
    precisions: tuple[Literal["float", "int8", "binary"], ...] = Field(
        (),
        description="the loss is the sum over these precisions of the vectors (float, int8, binary), which learn to be "
        "quantized; with matryoshka at each width; [] = float alone",
    )
    precision_weights: tuple[NonNegativeFloat, ...] = Field(
        (), description="a factor of each of precisions; [] = 1 each"
    )
    temperature: PairTemperature = PairTemperature()

    @model_validator(mode="after")
    def _precisions_fit(self) -> PairContrast:
        if len(set(self.precisions)) < len(self.precisions):
            raise ValueError(f"contrast.precisions names one twice: {', '.join(self.precisions)}")
        if self.precision_weights and len(self.precision_weights) != len(self.precisions):
            raise ValueError(
                f"contrast.precision_weights has {len(self.precision_weights)} numbers for {len(self.precisions)} of "
                "contrast.precisions; give one each, or []"
            )
        if self.precisions and self.drift != "none":
            raise ValueError(
                f"contrast.drift={self.drift} moves queued rows, which are then no int8 or binary ones: set it to "
                "none, or contrast.precisions=[]"
            )
        return self

    def columns(self, width: int) -> int:
        """The numbers of a row that the loss reads, of vectors of ``width``: those of every precision."""
        return width * max(1, len(self.precisions))


class PairValidate(ValidateSection):
    """Validation on held-out pairs: each query searches its document among all of them, and the other way round."""

    first: bool = Field(True, description="validate before the first step as well: the baseline of the run")
    samples: PositiveInt = Field(1000, description="held-out pairs")
    temperature: PositiveFloat = Field(0.05, description="temperature of the validation loss, the same at every step")
    retrieval: RetrievalSection = RetrievalSection()


class PairBatching(BatchSection):
    """Pairs of an optimizer step (``global``), and what a forward pass on one rank takes of them.

    With ``micro_tokens`` the number of micro-batches follows from the texts of each step, on all ranks together.
    """

    micro_tokens: PositiveInt | None = Field(
        None,
        le=2**31 - 1,
        description="most tokens of queries and documents in a forward pass on one rank, padding counted, in place of "
        "batch.micro; the texts of a step decide how many passes it has, and its loss is the same; null = batch.micro",
    )


class PairOptimizer(OptimizerSection):
    """Adam as embedding models are trained."""

    lr: PositiveFloat = Field(2e-5, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of Adam's two moments")
    clip: NonNegativeFloat = Field(1.0, description="largest global gradient norm; 0 = off")


class PairJob(Job):
    """The configuration of an embedding model trained on pairs of texts."""

    data: PairData
    model: PairModel
    batch: PairBatching = PairBatching()
    schedule: PairSchedule = PairSchedule()
    contrast: PairContrast = PairContrast()
    mlm: PairMasked = PairMasked()
    distillation: PairDistillation = PairDistillation()
    corruption: CorruptionConfig = CorruptionConfig()
    optimizer: PairOptimizer = PairOptimizer()
    loader: LoaderSection = LoaderSection()
    validate_: PairValidate = Field(PairValidate(), alias="validate")

    @model_validator(mode="after")
    def _fits_together(self) -> PairJob:
        if self.contrast.weight == 0:
            raise ValueError("contrast.weight 0: the contrast is the only loss of capt_pairs; set it above 0")
        if self.contrast.queue_weight is not None:
            raise ValueError(
                "contrast.queue_weight: in capt_pairs the queue is part of the contrast and has no loss of its own; "
                "remove the key, contrast.queue_share bounds the weight of the queue"
            )
        sources = self.data.sources
        if self.contrast.temperature.type == "learned" and (own := [s.name for s in sources if s.temperature]):
            raise ValueError(
                f"data.sources: {own[0]} has a temperature of its own, and contrast.temperature.type is learned: "
                "remove one of them"
            )
        # Mixed batches have one contrast over the whole step: from cached vectors, at one temperature.
        if self.data.batches == "mixed" and self.contrast.cached is False:
            raise ValueError(
                "data.batches mixed has one contrast over the whole step: it needs contrast.cached=auto or true"
            )
        if self.batch.micro_tokens and self.contrast.cached is False:
            raise ValueError(
                "batch.micro_tokens divides a step by its texts, which leaves the loss as it is where the step has one "
                "contrast: it needs contrast.cached=auto or true"
            )
        hardness = self.contrast.hardness or self.contrast.hardness_in_batch or self.contrast.hardness_own
        if self.data.batches == "mixed" and hardness and (own := [s.name for s in sources if s.temperature]):
            raise ValueError(
                f"data.sources: {own[0]} has a temperature of its own in mixed batches, and hardness needs one "
                "temperature: set contrast.hardness* to 0, or data.batches=single"
            )
        each: list[PairOptions] = [source.completed(self.data) for source in sources]
        if self.distillation.vectors is None and any(one.loss == NO_LOSS for one in each or [self.data]):
            raise ValueError("data.loss=none leaves rows to a teacher's vectors: set distillation.vectors")
        if self.distillation.vectors is not None and self.contrast.precisions:
            raise ValueError(
                "contrast.precisions does not go with distillation.vectors, whose losses are of vectors in float: "
                "leave one of the two out"
            )
        if self.distillation.vectors is not None and any(find_view(one.view).draw for one in each or [self.data]):
            raise ValueError(
                "distillation.vectors: a teacher's vector is a whole text's, and data.view draws spans: leave it out"
            )
        if self.distillation.weight and not any(source.negatives for source in each or [self.data]):
            raise ValueError(
                "distillation.weight: a teacher's scores compare a row's documents; set data.negatives above 0"
            )
        return self

    @model_validator(mode="after")
    def _searches_in_time(self) -> PairJob:
        self.validate_.retrieval.check_rhythm(self.validate_.every, self.checkpoint.best)
        return self

    @model_validator(mode="after")
    def _suits_its_representation(self) -> PairJob:
        check_representation(self)
        return self

    @classmethod
    def replaced_by(cls, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
        """Steps that are given later take the place of epochs that were given before, and the other way round."""
        old, new = below.get("schedule"), above.get("schedule")
        if not isinstance(old, Mapping) or not isinstance(new, Mapping) or {"epochs", "max_steps"} <= new.keys():
            return below
        left_out = {"epochs"} if "max_steps" in new else {"max_steps"} if new.get("epochs") else set()
        return {**below, "schedule": {key: value for key, value in old.items() if key not in left_out}}

    def metric_names(self) -> frozenset[str]:
        """Names of the metrics of validation."""
        widths = [at_width(name, width) for name in RETRIEVAL for width in self.contrast.matryoshka]
        named = {each.loss for each in [self.data, *self.data.sources]} - {"auto"}
        figures = [name for loss in [*LOSSES.values(), *map(find_loss, named)] for name in loss.figures]
        spread = SPREAD if find_representation(self.model.representation).similarity is None else ()
        searched = self.validate_.retrieval.metric_names()
        taught: list[str] = []
        if self.distillation.vectors is not None:
            taught = [*TAUGHT, *(of_teacher(name) for name in (*RETRIEVAL, *searched))]
        return frozenset([*METRICS, *spread, *figures, *widths, *searched, *taught])

    def queue_bytes(self) -> int | None:
        """Bytes of the queue, whose rows are as wide as the vectors; None for a width that ``init`` brings."""
        width = self.model.projection
        return None if width is None else self.contrast.queue_bytes(width)

    def encoder_config(self) -> dict[str, Any] | None:
        """The encoder of ``model.init``, which the job notes when it starts."""
        return self.model.encoder

    def check_inputs(self) -> list[str]:
        """Describe the files of each source and ``model.init``; no pair is read.

        Refuse ``validate.samples=1`` too: validation compares pairs with each other.
        """
        check_validation_samples(self.validate_.samples)
        from capt.pretrain.language.inputs import describe_initial_model
        from capt.pretrain.pairs.forms import check_form

        lines = []
        for source in self.data.each():
            files = source.paths()
            try:
                check_form(source.form, source.corpus)
            except ConfigError as error:
                raise ConfigError(f"source {source.name}: {error}") from None
            if source.corpus is not None:
                paths_of([str(source.corpus)], f"source {source.name}: corpus")
            size = sum(file.stat().st_size for file in files if file.is_file())
            lines.append(
                f"source {source.name}: {counted(len(files), 'file')}, {size:,} bytes, weight {source.weight:g}"
            )
        if self.data.validation_files:
            lines.append(f"held-out pairs: {counted(len(self.data.held_out_paths()), 'file')}")
        if self.batch.micro_tokens is not None:
            lines.append(f"micro-batches: of at most {self.batch.micro_tokens:,} tokens, in place of batch.micro")
        if self.distillation.vectors is not None:
            lines.append(f"distillation.vectors: {self.distillation.vectors}")
        lines += self.validate_.retrieval.describe()
        return [*lines, f"model.init: {describe_initial_model(self.model.init)}"]


JOB = PairJob

"""The sections of a job that say how CAPT's contrast is computed, for every family of models. No torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.base import NonNegativeInt, PositiveInt, Section


class TemperatureSection(Section):
    """tau over training: ``inverted_triangle`` (Eq. 6, down to ``minimum`` at half time and up again), ``constant``
    (``value``), ``linear`` (``start`` to ``end``) or ``learned`` (from ``value``)."""

    type: Literal["inverted_triangle", "constant", "linear", "learned"] = Field(
        "inverted_triangle", description="how tau changes over training"
    )
    minimum: PositiveFloat = Field(0.05, description="inverted_triangle: tau at half time")
    value: PositiveFloat = Field(0.1, description="constant: tau; learned: its first value")
    start: PositiveFloat = Field(0.5, description="linear: tau at the first step")
    end: PositiveFloat = Field(0.05, description="linear: tau at schedule.max_steps")

    @model_validator(mode="after")
    def _starts_within_its_bounds(self) -> TemperatureSection:
        if self.type == "learned" and not 0.01 <= self.value <= 1:
            raise ValueError(f"a learned temperature stays within .01 and 1: value {self.value:g} is outside")
        return self


class ContrastSection(Section):
    """The CAPT loss. ``weight`` 0 is MLM alone: one view, no queue."""

    removed: ClassVar = {"impl": "chunked"}

    weight: NonNegativeFloat = Field(1.0, description="factor of the CAPT loss in the total; 0 = no contrast")
    queue: NonNegativeInt = Field(
        8192, le=2**31 - 1, description="rows kept as negatives, over all ranks, both views counted; 0 = none"
    )
    queue_start: NonNegativeInt = Field(
        0, description="first step whose loss uses the queue; a new encoder changes fast and needs some steps without"
    )
    queue_dtype: Literal["fp32", "bf16"] = Field("fp32", description="type in which the queue is stored")
    drift: Literal["none", "mean", "moments"] = Field(
        "none",
        description="queued rows follow the encoder: the rows of each step are moved by as much as the mean of all "
        "rows has moved since (moments: and scaled likewise)",
    )
    queue_share: NonNegativeFloat | None = Field(
        None,
        description="the whole queue weighs at most this many times the live rows, however many rows it holds; null = "
        "every row counts once (the paper)",
    )
    queue_weight: NonNegativeFloat | None = Field(
        None, description="the queue in a loss of its own with this weight (XBM); null = in one softmax with the batch"
    )
    momentum: float | None = Field(
        None, ge=0, lt=1, description="queued rows are encoded by an average of the weights with this decay per update "
        "(.99 to .9995), in a pass of their own; null = the rows of the training pass"
    )  # fmt: skip
    hardness: NonNegativeFloat = Field(
        0.0,
        le=1000,
        description="queued rows that are near to the anchor count more: each in proportion to exp(hardness * cosine), "
        "all together as often as before; 0 = every row counts alike (the paper)",
    )
    cached: bool | Literal["auto"] = Field(
        "auto",
        description="one contrast over the whole step, whatever the micro-batches: each is then encoded twice; auto: "
        "where a step has several",
    )
    keep: NonNegativeInt | Literal["auto"] = Field(
        "auto",
        description="micro-batches of a cached step, the first ones, that keep the graph of their first pass and are "
        "encoded once; auto: all that a GPU has memory for, none on CPUs",
    )
    hardness_in_batch: NonNegativeFloat = Field(
        0.0,
        le=1000,
        description="live rows that are near to the anchor count more: this factor times the cosine is added to the "
        "logits of other samples, without gradient (9 in Lan et al. 2025); 0 = every row counts alike",
    )
    mask_margin: float | None = Field(
        None,
        ge=-2,
        le=2,
        description="a negative whose cosine exceeds the positive's plus this margin is taken for a false one and left "
        "out; a margin below 0 leaves out more; null = no mask",
    )
    mask_relative: float | None = Field(
        None,
        ge=0,
        le=2,
        description="the same mask with the limit s - |s| times this for a positive of cosine s (0.05 = 95 % of it); "
        "null = no mask",
    )
    matryoshka: tuple[PositiveInt, ...] = Field(
        (),
        description="widths: the loss is the sum over them of the loss of rows cut to that many features; list the "
        "whole width as well; [] = whole rows alone",
    )
    matryoshka_weights: tuple[NonNegativeFloat, ...] = Field(
        (), description="a factor of each width of matryoshka; [] = 1 each"
    )
    in_batch: Literal["global", "local", "none"] = Field(
        "global", description="negatives within the batch: rows of all ranks, of this rank, or none"
    )
    reduction: Literal["mean", "sum"] = Field("mean", description="sum is Eq. 4 to the letter and grows with the batch")
    mask_duplicates: bool = Field(True, description="a queued view of the same window is not a negative")
    temperature: TemperatureSection = TemperatureSection()
    precision: Literal["fp32", "tf32", "bf16x6", "bf16x3", "bf16"] = Field(
        "fp32",
        description="precision of the products with keys and queue; tf32 needs a GPU, bf16x* are sums of bf16 products",
    )

    def queue_bytes(self, width: int) -> int:
        """Bytes of the whole queue: rows of ``width`` numbers, each with the id of its sample."""
        return self.queue * (width * (4 if self.queue_dtype == "fp32" else 2) + 8)

    @model_validator(mode="after")
    def _has_negatives(self) -> ContrastSection:
        if self.weight > 0 and self.queue == 0 and self.in_batch == "none":
            raise ValueError("contrast.in_batch none without contrast.queue leaves no negatives; set one of them")
        if self.weight > 0 and self.queue == 0 and self.momentum is not None:
            raise ValueError(
                "contrast.momentum moves the encoder of queued rows, and contrast.queue is 0; set contrast.queue, or "
                "contrast.momentum=null"
            )
        if self.weight > 0 and self.queue_start > 0 and self.in_batch == "none":
            raise ValueError("contrast.in_batch none leaves no negatives before queue_start; set queue_start=0")
        return self

    @model_validator(mode="after")
    def _weights_of_the_queue(self) -> ContrastSection:
        if self.queue_share is not None and (self.in_batch == "none" or self.queue_weight is not None):
            raise ValueError(
                "contrast.queue_share is a share of the live rows in one softmax: it goes neither with "
                "contrast.in_batch none nor with contrast.queue_weight; contrast.queue_share=null takes it away"
            )
        if self.queue_weight is not None and (self.in_batch == "none" or self.queue == 0):
            raise ValueError(
                "contrast.queue_weight weighs a term beside that of the batch: it needs contrast.queue, and "
                "contrast.in_batch other than none"
            )
        if self.mask_margin is not None and self.mask_relative is not None:
            raise ValueError("contrast.mask_margin and contrast.mask_relative are limits of one mask; set one to null")
        if len(set(self.matryoshka)) < len(self.matryoshka):
            raise ValueError(f"contrast.matryoshka lists a width twice: {list(self.matryoshka)}")
        if self.matryoshka_weights and len(self.matryoshka_weights) != len(self.matryoshka):
            raise ValueError(
                f"contrast.matryoshka_weights has {len(self.matryoshka_weights)} numbers for {len(self.matryoshka)} "
                "widths of contrast.matryoshka; give one each, or []"
            )
        if self.hardness and self.queue == 0:
            raise ValueError("contrast.hardness weighs the rows of the queue: it needs contrast.queue, or set it to 0")
        return self

    def is_cached(self, micro_batches: int) -> bool:
        """Return whether a step of this number of micro-batches has one contrast over all of them."""
        return micro_batches > 1 if self.cached == "auto" else self.cached


def check_validation_samples(samples: int) -> None:
    """Refuse a validation of one sample. Raises ``ConfigError``."""
    if samples < 2:
        raise ConfigError(f"validate.samples {samples}: validation compares samples with each other: take at least 2")

"""The section of a job that trains low-rank adapters of an encoder. No torch."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat

from capt.pretrain.config.base import PositiveInt, Section


class LoraSection(Section):
    """LoRA (Hu et al. 2022): the encoder is frozen, and every chosen matrix W becomes W + alpha / rank * B A."""

    rank: PositiveInt = Field(8, le=2**16, description="rows of A and columns of B")
    alpha: PositiveFloat = Field(16.0, description="B A is multiplied by alpha / rank")
    dropout: NonNegativeFloat = Field(0.0, lt=1, description="dropout of what A reads")
    targets: list[str] = Field(
        [], description="last parts of the names of linear layers, such as query; [] = all of them inside the layers"
    )

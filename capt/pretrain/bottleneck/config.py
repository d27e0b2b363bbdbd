"""The section ``bottleneck`` of a job. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from capt.pretrain.config.base import Section

POOLED = {"cls": "the state of each text's first token (cls)", "mean": "the mean over each text's tokens (mean)"}
"""The vector of a text by ``bottleneck.pooling``, in words."""


class BottleneckSection(Section):
    """Losses that only the pooled vector of a text can lower, so that the encoder learns to write the text into it."""

    head: Literal["none", "bow", "decoder", "both"] = Field(
        "none",
        description="what is predicted from the pooled vector of the corrupted view: bow = which tokens the text has; "
        "decoder = every token, by one layer that sees the vector and a random part of the others (RetroMAE)",
    )
    pooling: Literal["cls", "mean"] | None = Field(
        None,
        description="the vector that is trained, and that an export pools: the state of a text's first token, or the "
        "mean over its tokens; if unset that of model.pooling",
    )
    bow_weight: PositiveFloat = Field(0.1, description="factor of the bag of words in the total (.1 in DupMAE)")
    bow_matrix: Literal["tied", "own"] = Field(
        "tied", description="rows that tokens are scored by: those of the word embedding, or a matrix of its own"
    )
    decoder_weight: PositiveFloat = Field(1.0, description="factor of the decoder in the total")
    decoder_rate: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the other tokens that are hidden from the decoder at each position; 1 = it sees the "
        "vector alone. The share that is hidden from the encoder is corruption.rate",
    )

    @property
    def on(self) -> bool:
        """True where the job trains a bottleneck."""
        return self.head != "none"

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of the heads, as metrics have them."""
        return ("bow",) * self.bow + ("decoder",) * self.decoder

    def elements(self, hidden: int, ffn: int, width: int, rows: int) -> int:
        """Elements of the heads' matrices over an encoder that embeds ``rows`` tokens in ``width`` columns."""
        bow = hidden * width + (rows * width if self.bow_matrix == "own" else 0)
        decoder = 4 * hidden * hidden + 2 * hidden * ffn + (hidden * width if width != hidden else 0)
        return self.bow * bow + self.decoder * decoder

    @property
    def bow(self) -> bool:
        """True where the bag of words is trained."""
        return self.head in ("bow", "both")

    @property
    def decoder(self) -> bool:
        """True where the decoder is trained."""
        return self.head in ("decoder", "both")

"""The configuration of an LXMERT model (a size preset, any field of which may be overridden), and its FLOP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.base import NonNegativeInt, PathField, PositiveInt, Section
from capt.pretrain.models.architecture import RECOMPUTE, Recompute, check_heads, with_preset
from capt.pretrain.models.hf_config import FolderOrId

PRESETS: dict[str, dict[str, int]] = {
    "micro": {
        "language_layers": 1, "vision_layers": 1, "cross_layers": 1, "hidden": 64, "heads": 4, "ffn": 256,
    },
    "tiny": {
        "language_layers": 2, "vision_layers": 1, "cross_layers": 2, "hidden": 128, "heads": 2, "ffn": 512,
    },
    "small": {
        "language_layers": 4, "vision_layers": 2, "cross_layers": 3, "hidden": 256, "heads": 4, "ffn": 1024,
    },
    "base": {
        "language_layers": 9, "vision_layers": 5, "cross_layers": 5, "hidden": 768, "heads": 12, "ffn": 3072,
    },
}  # fmt: skip
"""``base`` is LXMERT's 9-5-5; ``custom`` takes all six fields from the user."""


InitAnswers = Literal["new"] | PathField
INIT_ANSWERS = (
    "what the classes of init's answer head are, where it does not say (LXMERT's all_ans.json); new = begin a new head"
)
"""The key ``model.init_answers`` of pretraining and of fine-tuning."""


class LxmertConfig(Section):
    """An LXMERT encoder (Tan and Bansal 2019) with its heads and CAPT's aggregation head. Fields are ``model.*`` keys.

    What the data decide (``vocab_size``, ``pad_id``, ``feature_size``, ``object_classes``, ``attribute_classes``,
    ``answers``) is filled in when the job starts.
    """

    size: Literal["micro", "tiny", "small", "base", "custom"] = Field(
        "small", description="preset of the layers, hidden, heads and ffn; custom = all six are given"
    )
    language_layers: PositiveInt = Field(4, le=1000, description="Transformer layers over the words alone")
    vision_layers: PositiveInt = Field(2, le=1000, description="Transformer layers over the regions alone")
    cross_layers: PositiveInt = Field(3, le=1000, description="cross-modality layers")
    hidden: PositiveInt = Field(256, le=65_536, description="width of the encoder")
    heads: PositiveInt = Field(4, le=65_536, description="attention heads per layer")
    ffn: PositiveInt = Field(1024, le=2**20, description="inner width of feed-forward layers and aggregation head")
    vocab_size: PositiveInt | None = Field(
        None, le=2**24, description="rows of the word embedding; if unset the size of the tokenizer"
    )
    pad_id: NonNegativeInt | None = Field(None, le=2**24, description="token id of padding; if unset the tokenizer's")
    max_positions: PositiveInt = Field(512, le=2**20, description="longest sentence in tokens, special tokens included")
    feature_size: PositiveInt | None = Field(
        None, le=2**20, description="columns of the features; if unset the store's"
    )
    object_classes: NonNegativeInt | None = Field(
        None, le=2**24, description="classes of objects; if unset those of the store; 0 = no object loss"
    )
    attribute_classes: NonNegativeInt | None = Field(
        None, le=2**24, description="classes of attributes; if unset those of the store; 0 = no attribute loss"
    )
    answers: NonNegativeInt | None = Field(
        None, le=2**24, description="classes of the answer head; if unset those of the answer table; 0 = no such head"
    )
    dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of embeddings and layer outputs")
    attention_dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of the attention weights")
    layer_norm_eps: PositiveFloat = Field(1e-12, ge=1e-37, description="added to the variance in LayerNorm")
    initializer_range: PositiveFloat = Field(0.02, description="standard deviation of the initial weights")
    pooling: Literal["cls", "pooled"] = Field(
        "cls",
        description="input of the aggregation head: [CLS] of the last cross layer, or what the matching head reads",
    )
    activation_checkpointing: Recompute = Field("none", description=RECOMPUTE)
    init: FolderOrId | None = Field(
        None,
        description="LXMERT to start from: a run or checkpoint of ours, or a Hugging Face folder",
    )
    init_answers: InitAnswers | None = Field(None, description=INIT_ANSWERS)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        return with_preset(values, PRESETS) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _fits_together(self) -> LxmertConfig:
        check_heads(self.hidden, self.heads)
        return self

    def known(self, name: str) -> int:
        """The value of a field that the data decide. Raises ``ConfigError`` while it is not filled in."""
        value = getattr(self, name)
        if value is None:
            raise ConfigError(f"model.{name} is not known yet: set it, or let the job take it from its data")
        return int(value)


# Floating-point operations of LXMERT, for MFU and for comparisons at equal compute. No torch here.


def encoder_flops(config: LxmertConfig, words: int | float, regions: int | float) -> float:
    """Forward FLOP of a pair of a sentence (``words`` tokens) and a picture (``regions`` regions) through the encoder.

    Matrix products only, a multiply-add being 2, as if the last layer were computed everywhere.
    """
    h = config.hidden

    def self_attention(length: int | float) -> int | float:
        return length * (8 * h * h + 4 * length * h)

    def layer(length: int | float) -> int | float:
        return self_attention(length) + length * 4 * h * config.ffn

    embedding = regions * 2 * (config.known("feature_size") + 4) * h
    cross = (words + regions) * 8 * h * h + 8 * words * regions * h
    return float(
        embedding
        + config.language_layers * layer(words)
        + config.vision_layers * layer(regions)
        + config.cross_layers * (cross + layer(words) + layer(regions))
    )


def step_flops(
    config: LxmertConfig, words: int | float, regions: int | float, masked: int | float, contrast: bool
) -> float:
    """Model FLOP (forward and backward) of one pair in a pretraining step.

    The heads run on the corrupted view alone, the vocabulary only at masked words; the backward pass costs twice the
    forward pass (Chowdhery et al. 2022, appendix B; recomputation is not counted).

    Args:
        config: the model.
        words: tokens of the sentence.
        regions: regions of the picture.
        masked: masked words.
        contrast: whether the original view is encoded as well and both views are aggregated.
    """
    h, views = config.hidden, 2 if contrast else 1
    classes = config.known("object_classes") + config.known("attribute_classes") + config.known("feature_size")
    heads = masked * (2 * h * h + 2 * h * config.known("vocab_size")) + regions * (2 * h * h + 2 * h * classes)
    heads += 2 * h * h + 4 * h
    if answers := config.known("answers"):
        heads += 4 * h * h + 4 * h * answers
    if contrast:
        heads += views * 4 * h * config.ffn
    return 3.0 * (views * encoder_flops(config, words, regions) + heads)

"""The configuration of a RoBERTa encoder: a size preset, whose every field may be overridden. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
    model_serializer,
    model_validator,
)

from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.config.base import NonNegativeInt, PositiveInt, Section
from capt.pretrain.models.hf_config import Source, parse_hf_config

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "hidden": 128, "heads": 2, "ffn": 512},
    "small": {"layers": 6, "hidden": 256, "heads": 4, "ffn": 1024},
    "base": {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072},
    "large": {"layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096},
}
"""``small`` and ``large`` are CAPT's Table 4, ``base`` is RoBERTa's; ``custom`` takes all four fields from the user."""

_HF_FIELDS: dict[str, str] = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "layer_norm_eps": "layer_norm_eps",
    "initializer_range": "initializer_range",
    "pad_id": "pad_token_id",
}
SIZES = ("layers", "hidden", "heads", "ffn", "vocab_size", "max_positions", "pad_id", "layer_norm_eps")
"""Fields that ``init`` decides where the job does not set them."""

_FEW_ROWS = 16
"""Rows of the position table without a token that are not worth a word: RoBERTa has 2."""
_ARCHITECTURE = ("layers", "hidden", "heads", "ffn", "layer_norm_eps", "pad_id", "max_positions")


class RobertaConfig(Section):
    """A post-LN RoBERTa encoder (Liu et al. 2019) with CAPT's aggregation head. Field names are ``model.*`` keys.

    Where ``layers``, ``hidden``, ``heads`` and ``ffn`` are not set, they come from ``init`` if there is one, else from
    ``size``. Lengths are in tokens.
    """

    size: Literal["tiny", "small", "base", "large", "custom"] = Field(
        "small", description="preset of layers, hidden, heads and ffn; custom = all four are given"
    )
    layers: PositiveInt = Field(PRESETS["small"]["layers"], le=1000, description="Transformer layers")
    hidden: PositiveInt = Field(PRESETS["small"]["hidden"], le=65_536, description="width of the encoder")
    heads: PositiveInt = Field(PRESETS["small"]["heads"], le=65_536, description="attention heads per layer")
    ffn: PositiveInt = Field(
        PRESETS["small"]["ffn"],
        le=2**20,
        description="inner width of the feed-forward layers and of the aggregation head",
    )
    vocab_size: PositiveInt | None = Field(
        None, le=2**24, description="rows of the embedding; if unset the size of the tokenizer"
    )
    pad_vocab_to: PositiveInt = Field(
        1,
        le=65_536,
        description="fill the rows of the embedding up to a multiple of this, with zeros that are never predicted",
    )
    max_positions: PositiveInt = Field(512, le=2**20, description="longest sequence, special tokens included")
    pad_id: NonNegativeInt = Field(1, le=2**24, description="token id of padding")
    dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of embeddings and layer outputs")
    attention_dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of the attention weights")
    layer_norm_eps: PositiveFloat = Field(1e-5, ge=1e-37, description="added to the variance in LayerNorm")
    initializer_range: PositiveFloat = Field(0.02, description="standard deviation of the initial weights")
    pooling: Literal["cls", "mean"] = Field("cls", description="input of the aggregation head: <s>, or the token mean")
    activation_checkpointing: Literal["none", "full", "offload"] = Field(
        "none", description="recompute layers in the backward pass; offload also moves their inputs to host memory"
    )
    compile: bool | Literal["auto"] = Field(
        False,
        description="torch.compile the layers (needs a C++ compiler, or Triton on a GPU); auto = on GPUs only",
    )
    init: Source | None = Field(
        None,
        description="RoBERTa or XLM-R to start from, which brings its sizes: a Hugging Face folder or USER/NAME[@REV]",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        size = values.get("size", "small")
        if values.get("init") is not None:
            return values  # which brings the sizes that are not given
        if size == "custom":
            missing = [key for key in PRESETS["small"] if key not in values]
            if missing:
                raise ValueError(f"size custom needs {', '.join(missing)} as well (or take size {', '.join(PRESETS)})")
        return {**PRESETS.get(size, {}), **values} if isinstance(size, str) else values

    @model_serializer(mode="wrap")
    def _omit_sizes_of_init(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        if self.init is None:
            return written
        decided_by_init = {name for name in (*SIZES, "pooling") if name not in self.model_fields_set}
        return {key: value for key, value in written.items() if key not in decided_by_init}

    @model_validator(mode="after")
    def _fits_together(self) -> RobertaConfig:
        if self.hidden % self.heads:
            fits = [n for n in range(1, self.hidden + 1) if self.hidden % n == 0 and self.hidden // n >= 16]
            raise ValueError(f"heads {self.heads} does not divide hidden {self.hidden}; one of {fits or [1]} does")
        if self.vocab_size is not None and self.pad_id >= self.vocab_size:
            raise ValueError(f"pad_id {self.pad_id} is outside the vocabulary of {self.vocab_size} rows")
        return self

    @property
    def position_rows(self) -> int:
        """Rows of the position table: fairseq counts positions from ``pad_id + 1`` (514 rows for 512)."""
        return self.max_positions + self.pad_id + 1

    def unused_positions(self) -> str | None:
        """Describe the rows of the position table that belong to no token, in a sentence; None where they are few."""
        unused = self.pad_id + 1
        if unused <= _FEW_ROWS:
            return None
        return (
            f"model.pad_id is {self.pad_id}, and RoBERTa counts positions from the padding id on: {unused:,} of the "
            f"{self.position_rows:,} rows of the position table belong to no token ({unused * self.hidden:,} "
            "parameters); a tokenizer with a small padding id, such as 0 or 1, avoids them"
        )

    @property
    def vocab_rows(self) -> int:
        """Rows of the word embedding: ``classes`` rounded up to ``pad_vocab_to``."""
        return -(-self.classes // self.pad_vocab_to) * self.pad_vocab_to

    @property
    def elements(self) -> int:
        """Elements of the tables and of the layers' matrices: the model has at least this number of parameters."""
        layer = 4 * self.hidden * self.hidden + 2 * self.hidden * self.ffn
        return self.layers * layer + (self.vocab_rows + self.position_rows) * self.hidden

    @property
    def classes(self) -> int:
        """Ids that are embedded and predicted: ``vocab_size``, once it is known."""
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size is not known yet: set it, or take it from the tokenizer first")
        return self.vocab_size

    def for_tokenizer(self, vocab_size: int, pad_id: int) -> RobertaConfig:
        """This configuration with the vocabulary of a tokenizer of ``vocab_size`` ids filled in.

        Raises:
            ConfigError: a ``vocab_size`` set by hand is too small for the tokenizer, or the padding ids differ.
        """
        if pad_id != self.pad_id:
            raise ConfigError(
                f"model.pad_id is {self.pad_id} but the tokenizer pads with {pad_id}; set model.pad_id: {pad_id}"
            )
        if self.vocab_size is not None and self.vocab_size < vocab_size:
            raise ConfigError(
                f"model.vocab_size {self.vocab_size} is smaller than the tokenizer's {vocab_size} ids; "
                "leave it unset or raise it"
            )
        return self.model_copy(update={"vocab_size": self.vocab_size or vocab_size})

    def require_same_architecture(self, other: RobertaConfig, source: str) -> None:
        """Check that weights made under ``other`` (read from ``source``) fit this configuration.

        Raises:
            CheckpointError: a field that decides shapes or outputs differs; the message names it and both values.
        """
        for name in _ARCHITECTURE:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise CheckpointError(
                    f"{source}: model.{name} is {theirs} there but {mine} in this job; set it to {theirs}"
                )
        if other.vocab_rows not in (self.classes, self.vocab_rows):
            raise CheckpointError(
                f"{source}: holds {other.vocab_rows} rows of vocabulary, this job's model {self.classes} "
                f"(padded to {self.vocab_rows}); set model.vocab_size to {other.vocab_rows}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> RobertaConfig:
        """The configuration that a Hugging Face ``config.json`` of RoBERTa or XLM-R, read from ``source``, describes.

        Raises:
            CheckpointError: a key is missing or has a value that this encoder cannot represent; the key is named.
        """
        hf = parse_hf_config(config, source)
        fields = {ours: getattr(hf, theirs) for ours, theirs in _HF_FIELDS.items()}
        usable = hf.max_position_embeddings - hf.pad_token_id - 1
        try:
            return cls(size="custom", vocab_size=hf.vocab_size, max_positions=usable, **fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"{_HF_FIELDS.get(str(name), name)}: " for name in first["loc"])
            raise CheckpointError(f"{source} does not describe a RoBERTa encoder: {where}{first['msg']}") from None

    def with_sizes_of(self, other: RobertaConfig, source: str) -> RobertaConfig:
        """This configuration with the sizes of ``other``, read from ``source``, for those that the job does not set.

        Raises:
            CheckpointError: as `require_same_architecture`, for a size that the job does set.
        """
        sizes = {name: getattr(other, name) for name in SIZES if name not in self.model_fields_set}
        if "pooling" not in self.model_fields_set:
            sizes["pooling"] = other.pooling
        completed = self.model_copy(update={**sizes, "size": "custom"})
        completed.require_same_architecture(other, source)
        return completed

    def to_hf(self, *, bos_id: int, eos_id: int) -> dict[str, Any]:
        """The ``config.json`` of the stock ``RobertaForMaskedLM`` that computes what this encoder does.

        Every value is written out, because ``transformers``' class defaults are not RoBERTa's (it defaults to
        ``max_position_embeddings`` 512, ``type_vocab_size`` 2 and ``layer_norm_eps`` 1e-12).
        """
        return {
            "architectures": ["RobertaForMaskedLM"],
            "model_type": "roberta",
            **{theirs: getattr(self, ours) for ours, theirs in _HF_FIELDS.items()},
            "vocab_size": self.classes,
            "max_position_embeddings": self.position_rows,
            "type_vocab_size": 1,
            "hidden_act": "gelu",
            "bos_token_id": bos_id,
            "eos_token_id": eos_id,
            "tie_word_embeddings": True,
            "classifier_dropout": None,
            "is_decoder": False,
            "add_cross_attention": False,
            "use_cache": True,
            "dtype": "float32",
        }

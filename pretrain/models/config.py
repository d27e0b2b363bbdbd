"""The configuration of a RoBERTa encoder: a size preset, whose every field may be overridden. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, ValidationError, model_validator

from pretrain.config.base import NonNegativeInt, PathField, PositiveInt, Section
from tokenizer.errors import CheckpointError, ConfigError

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
_ARCHITECTURE = ("layers", "hidden", "heads", "ffn", "layer_norm_eps", "pad_id", "max_positions", "vocab_rows")


class RobertaConfig(Section):
    """A post-LN RoBERTa encoder (Liu et al. 2019) with CAPT's aggregation head. Field names are ``model.*`` keys.

    ``layers``, ``hidden``, ``heads`` and ``ffn`` come from ``size`` unless given. Lengths are in tokens.
    """

    size: Literal["tiny", "small", "base", "large", "custom"] = "small"
    layers: PositiveInt = Field(PRESETS["small"]["layers"], le=1000)
    hidden: PositiveInt = Field(PRESETS["small"]["hidden"], le=65_536)
    heads: PositiveInt = Field(PRESETS["small"]["heads"], le=65_536)
    ffn: PositiveInt = Field(
        PRESETS["small"]["ffn"], le=2**20, description="also the inner size of the aggregation head"
    )
    vocab_size: PositiveInt | None = Field(
        None, le=2**24, description="rows of the vocabulary; unset = as the tokenizer has"
    )
    pad_vocab_to: PositiveInt = Field(
        1, le=65_536, description="round the rows of the embedding up to a multiple of this"
    )
    max_positions: PositiveInt = Field(512, le=2**20, description="longest sequence, special tokens included")
    pad_id: NonNegativeInt = Field(1, le=2**24)
    dropout: NonNegativeFloat = Field(0.1, lt=1)
    attention_dropout: NonNegativeFloat = Field(0.1, lt=1)
    layer_norm_eps: PositiveFloat = 1e-5
    initializer_range: PositiveFloat = 0.02
    pooling: Literal["cls", "mean"] = Field("cls", description="input of the aggregation head: <s>, or the token mean")
    activation_checkpointing: Literal["none", "full", "offload"] = Field(
        "none", description="recompute layers in the backward pass; offload also moves their inputs to host memory"
    )
    compile: bool = Field(False, description="torch.compile the layers (needs a C++ compiler, or Triton on a GPU)")
    init: PathField | None = Field(None, description="Hugging Face RoBERTa or XLM-R folder to start from")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        size = values.get("size", "small")
        if size == "custom":
            missing = [key for key in PRESETS["small"] if key not in values]
            if missing:
                raise ValueError(f"size custom needs {', '.join(missing)} as well (or take size {', '.join(PRESETS)})")
        return {**PRESETS.get(size, {}), **values} if isinstance(size, str) else values

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

    @property
    def vocab_rows(self) -> int:
        """Rows of the word embedding: ``vocab_size`` rounded up to ``pad_vocab_to``."""
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size is not known yet: set it, or take it from the tokenizer first")
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RobertaConfig:
        """The configuration that a Hugging Face ``config.json`` of RoBERTa or XLM-R describes.

        Raises:
            CheckpointError: a key is missing or has a value that this encoder cannot represent; the key is named.
        """
        required = [*_HF_FIELDS.values(), "vocab_size", "max_position_embeddings", "type_vocab_size"]
        missing = [key for key in required if key not in config]
        if missing:
            raise CheckpointError(f"config.json has no {', '.join(missing)}; a RoBERTa or XLM-R encoder needs them")
        if config["type_vocab_size"] != 1:
            raise CheckpointError(
                f"config.json: type_vocab_size is {config['type_vocab_size']}; RoBERTa has 1 (no segments)"
            )
        fields = {ours: config[theirs] for ours, theirs in _HF_FIELDS.items()}
        try:
            usable = config["max_position_embeddings"] - config["pad_token_id"] - 1
            return cls(size="custom", vocab_size=config["vocab_size"], max_positions=usable, **fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"{_HF_FIELDS.get(str(name), name)}: " for name in first["loc"])
            raise CheckpointError(f"config.json does not describe a RoBERTa encoder: {where}{first['msg']}") from None
        except TypeError as error:
            raise CheckpointError(
                f"config.json: max_position_embeddings or pad_token_id is no number: {error}"
            ) from None

    def to_hf(self, *, bos_id: int, eos_id: int) -> dict[str, Any]:
        """The ``config.json`` of the stock ``RobertaForMaskedLM`` that computes what this encoder does.

        Every value is written out, because ``transformers``' class defaults are not RoBERTa's (it defaults to
        ``max_position_embeddings`` 512, ``type_vocab_size`` 2 and ``layer_norm_eps`` 1e-12).
        """
        return {
            "architectures": ["RobertaForMaskedLM"],
            "model_type": "roberta",
            **{theirs: getattr(self, ours) for ours, theirs in _HF_FIELDS.items()},
            "vocab_size": self.vocab_rows,
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

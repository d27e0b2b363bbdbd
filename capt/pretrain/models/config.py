"""RoBERTa as a row of the registry of encoders: its sizes, its names in transformers, its costs. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ValidationError

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.architecture import EncoderConfig, Family, HuggingFace
from capt.pretrain.models.hf_config import HFConfig, RobertaKeys, parse_hf_config

HF_FIELDS: dict[str, str] = {
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

_FEW_ROWS = 16
"""Rows of the position table without a token that are not worth a word: RoBERTa has 2."""

_HF = HuggingFace(
    what="RoBERTa or XLM-R",
    types=("roberta", "xlm-roberta"),
    masked_lm="RobertaForMaskedLM",
    encoder="RobertaModel",
    prefix="roberta.",
    heads=("lm_head.",),
    names={
        "encoder.embeddings.word.weight": ("roberta.embeddings.word_embeddings.weight",),
        "encoder.embeddings.position.weight": ("roberta.embeddings.position_embeddings.weight",),
        "encoder.embeddings.token_type.weight": ("roberta.embeddings.token_type_embeddings.weight",),
        "encoder.embeddings.norm.*": ("roberta.embeddings.LayerNorm.*",),
        "encoder.layers.#.attention.query.*": ("roberta.encoder.layer.#.attention.self.query.*",),
        "encoder.layers.#.attention.key_value.*": (
            "roberta.encoder.layer.#.attention.self.key.*",
            "roberta.encoder.layer.#.attention.self.value.*",
        ),
        "encoder.layers.#.attention.output.*": ("roberta.encoder.layer.#.attention.output.dense.*",),
        "encoder.layers.#.attention_norm.*": ("roberta.encoder.layer.#.attention.output.LayerNorm.*",),
        "encoder.layers.#.ffn_in.*": ("roberta.encoder.layer.#.intermediate.dense.*",),
        "encoder.layers.#.ffn_out.*": ("roberta.encoder.layer.#.output.dense.*",),
        "encoder.layers.#.ffn_norm.*": ("roberta.encoder.layer.#.output.LayerNorm.*",),
        "mlm.dense.*": ("lm_head.dense.*",),
        "mlm.norm.*": ("lm_head.layer_norm.*",),
        "mlm.bias": ("lm_head.bias",),
    },
    # transformers leaves the second names out of its files; other tools write them beside the first, or instead.
    tied={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    # Buffers of old releases, and the pooler, which masked-language modelling never trains.
    unused=r"roberta\.(embeddings\.(position|token_type)_ids|pooler\.dense\.(weight|bias))",
    fixed={
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False, None),
        "add_cross_attention": (False, None),
        "is_encoder_decoder": (False, None),
        "tie_word_embeddings": (True, None),
        "quantization_config": (None,),
        "pruned_heads": ({}, None),
    },
    sizes={
        "vocab_size": ("encoder.embeddings.word.weight", 0),
        "hidden_size": ("encoder.embeddings.word.weight", 1),
        "max_position_embeddings": ("encoder.embeddings.position.weight", 0),
        "intermediate_size": ("encoder.layers.0.ffn_in.weight", 0),
    },
    pooler="pooler.dense",
    classifier=Family("RobertaForSequenceClassification", "classifier.dense", "classifier.out_proj"),
)


class RobertaConfig(EncoderConfig):
    """A post-LN RoBERTa encoder (Liu et al. 2019).

    The sizes ``small`` and ``large`` are CAPT's Table 4, ``base`` is RoBERTa's.
    """

    presets: ClassVar[Mapping[str, Mapping[str, int]]] = {
        "tiny": {"layers": 2, "hidden": 128, "heads": 2, "ffn": 512},
        "small": {"layers": 6, "hidden": 256, "heads": 4, "ffn": 1024},
        "base": {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072},
        "large": {"layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096},
    }
    module: ClassVar[str] = "capt.pretrain.models.roberta:RobertaEncoder"
    hf: ClassVar[HuggingFace] = _HF
    hf_keys: ClassVar[type[HFConfig]] = RobertaKeys

    @property
    def token_types(self) -> int:
        """Rows of the table of token types; tokens have the first."""
        return 1

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
    def elements(self) -> int:
        """Elements of the tables and of the layers' matrices: the model has at least this number of parameters."""
        layer = 4 * self.hidden * self.hidden + 2 * self.hidden * self.ffn
        return self.layers * layer + (self.vocab_rows + self.position_rows) * self.hidden

    def flops(self, length: float, read: float, seen: float | None = None) -> float:
        """Forward FLOP; see `EncoderConfig.flops`.

        The last layer is computed for the positions that are read, but for keys and values, which it needs everywhere.
        """
        h = self.hidden
        keys_values = 4 * h * h
        row = 4 * h * h + 4 * h * self.ffn  # query, output, feed-forward
        scores = 4 * h * (length if seen is None else seen)  # and the average that they weight
        return self.layers * length * keys_values + ((self.layers - 1) * length + read) * (row + scores)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> RobertaConfig:
        """The configuration that the ``config.json`` of a RoBERTa or XLM-R describes; see `EncoderConfig.from_hf`."""
        hf = parse_hf_config(config, source, cls.hf_keys, cls.hf.what)
        fields = {ours: getattr(hf, theirs) for ours, theirs in HF_FIELDS.items()}
        try:
            return cls(size="custom", vocab_size=hf.vocab_size, **fields, **cls._tables(hf, source))
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"{HF_FIELDS.get(str(name), name)}: " for name in first["loc"])
            raise CheckpointError(
                f"{source} does not describe a {cls.hf.what} encoder: {where}{first['msg']}"
            ) from None

    @classmethod
    def _tables(cls, keys: Any, source: str) -> dict[str, int]:
        """The fields that size the tables of positions and of token types."""
        usable = keys.max_position_embeddings - keys.pad_token_id - 1
        if usable < 1:
            raise CheckpointError(f"{source}: max_position_embeddings leaves no position beyond pad_token_id + 1")
        return {"max_positions": usable}

    def to_hf(self, *, bos_id: int, eos_id: int) -> dict[str, Any]:
        """The ``config.json`` of the stock class, such as ``RobertaForMaskedLM``, that computes what this encoder does.

        Every value is written out, because ``transformers``' class defaults are not RoBERTa's (it defaults to
        ``max_position_embeddings`` 512, ``type_vocab_size`` 2 and ``layer_norm_eps`` 1e-12).
        """
        return {
            "architectures": [self.hf.masked_lm],
            "model_type": self.hf.types[0],
            **{theirs: getattr(self, ours) for ours, theirs in HF_FIELDS.items()},
            "vocab_size": self.classes,
            "max_position_embeddings": self.position_rows,
            "type_vocab_size": self.token_types,
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

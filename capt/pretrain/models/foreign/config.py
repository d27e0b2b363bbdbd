"""Encoders of other families as rows of the registry. No torch here.

BERT and CamemBERT are computed by our own RoBERTa encoder, which they equal under other names. The others run on the
model of transformers, with its speed, and have transformers' names in checkpoints.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, PositiveFloat, ValidationError, model_validator

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.config.base import PositiveInt
from capt.pretrain.models.architecture import EncoderConfig, HuggingFace, Table
from capt.pretrain.models.config import HF_FIELDS, RobertaConfig
from capt.pretrain.models.hf_config import HFConfig, parse_hf_config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from capt.pretrain.models.heads import MLMHead

HEAD_KEYS = (
    "architectures", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    "transformers_version", "_name_or_path", "torch_dtype", "dtype", "_num_labels",
)  # fmt: skip
"""Keys of ``config.json`` that do not concern the encoder."""

_ROBERTA = RobertaConfig.hf
_POSITION = "encoder.embeddings.position.weight"
_CLS = {
    "mlm.dense.*": ("cls.predictions.transform.dense.*",),
    "mlm.norm.*": ("cls.predictions.transform.LayerNorm.*",),
    "mlm.bias": ("cls.predictions.bias",),
}
"""The names of BERT's language-model head."""


def _arch(name: str) -> Any:
    return Field(name, description=EncoderConfig.model_fields["arch"].description)


class _BertKeys(HFConfig):
    type_vocab_size: int = Field(ge=1, le=1000)


class BertConfig(RobertaConfig):
    """BERT (Devlin et al. 2019), computed as RoBERTa: positions count from 0, and every token has the first type.

    Our table of positions has ``pad_id + 1`` rows more, in front, for padding. The other token types are kept for the
    export. Hidden states equal those of transformers.
    """

    hf: ClassVar[HuggingFace] = replace(
        _ROBERTA,
        what="BERT",
        types=("bert",),
        masked_lm="BertForMaskedLM",
        encoder="BertModel",
        prefix="bert.",
        heads=("cls.predictions.",),
        names={
            ours: tuple(name.replace("roberta.", "bert.") for name in theirs)
            for ours, theirs in _ROBERTA.names.items()
            if ours.startswith("encoder.")
        }
        | _CLS,
        tied={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        unused=r"bert\.(embeddings\.(position|token_type)_ids|pooler\.dense\.(weight|bias))|cls\.seq_relationship\..*",
        sizes={key: value for key, value in _ROBERTA.sizes.items() if key != "max_position_embeddings"},
        classifier=None,
    )
    hf_keys: ClassVar[type[HFConfig]] = _BertKeys
    decided_by_init: ClassVar[tuple[str, ...]] = (*RobertaConfig.decided_by_init, "segments")

    arch: str = _arch("bert")
    segments: PositiveInt = Field(
        2, le=1000, description="bert: rows of the table of token types; tokens have the first"
    )

    @property
    def token_types(self) -> int:
        """Rows of the table of token types; tokens have the first."""
        return self.segments

    @classmethod
    def _tables(cls, keys: Any, source: str) -> dict[str, int]:
        return {"max_positions": keys.max_position_embeddings, "segments": keys.type_vocab_size}

    def from_hf_tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors with the rows of positions that padding has here."""
        from torch.nn.functional import pad

        table = state[_POSITION]
        # One that is no table is kept, to be named where sizes are compared.
        return {**state, _POSITION: pad(table, (0, 0, self.pad_id + 1, 0)) if table.ndim == 2 else table}

    def to_hf_tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors without the rows of positions that padding has here."""
        return {**state, _POSITION: state[_POSITION][self.pad_id + 1 :]}

    def to_hf(self, *, bos_id: int, eos_id: int) -> dict[str, Any]:
        """The ``config.json`` of the stock ``BertForMaskedLM`` that computes what this encoder does."""
        keys = super().to_hf(bos_id=bos_id, eos_id=eos_id)
        del keys["bos_token_id"], keys["eos_token_id"]
        return {**keys, "max_position_embeddings": self.max_positions}


class CamembertConfig(RobertaConfig):
    """CamemBERT (Martin et al. 2020), which is RoBERTa under another name."""

    hf: ClassVar[HuggingFace] = replace(
        _ROBERTA,
        what="CamemBERT",
        types=("camembert",),
        masked_lm="CamembertForMaskedLM",
        encoder="CamembertModel",
        classifier=None,
    )

    arch: str = _arch("camembert")


_ACTIVATIONS = ("gelu", "gelu_new", "relu", None)
_OTHER_HEADS = r"(cls\.seq_relationship|sop_classifier|discriminator_predictions|mask_predictions)\..*"
"""Heads of pretraining that are left behind."""


class TransformersConfig(EncoderConfig, ABC):
    """An encoder that runs on the model of transformers. ``encoder`` has the keys of ``config.json`` beyond our own."""

    presets: ClassVar[Mapping[str, Mapping[str, int]]] = RobertaConfig.presets
    module: ClassVar[str] = "capt.pretrain.models.foreign.encoder:RegisteredEncoder"
    word: ClassVar[str] = "embeddings.word_embeddings"
    packs_documents: ClassVar[bool] = False
    decided_by_init: ClassVar[tuple[str, ...]] = (*EncoderConfig.decided_by_init, "encoder")
    hf_fields: ClassVar[Mapping[str, str]] = HF_FIELDS
    """Our fields -> keys of ``config.json``."""
    hf_defaults: ClassVar[Mapping[str, Any]] = {"pad_token_id": 0, "layer_norm_eps": 1e-12, "initializer_range": 0.02}
    """Values of keys that a ``config.json`` leaves out."""
    counts_from_padding: ClassVar[bool] = False
    """True if positions begin after the padding id, as in RoBERTa."""

    encoder: dict[str, Any] = Field(
        {}, description="encoders of transformers: further keys of their config.json; brought by init"
    )

    @model_validator(mode="after")
    def _runs_on_transformers(self) -> TransformersConfig:
        if self._head_activation not in _ACTIVATIONS:
            raise ValueError(
                f"encoder: the language-model head has no activation {self._head_activation!r}; it has "
                f"{', '.join(filter(None, _ACTIVATIONS))}"
            )
        for name, only in (("pad_vocab_to", 1), ("activation_checkpointing", "none"), ("compile", False)):
            if getattr(self, name) not in (only, "auto"):
                raise ValueError(
                    f"{name} is for our own encoders, and {self.arch} runs on transformers'; set it to {only}"
                )
        return self

    @property
    def embedding_size(self) -> int:
        """Columns of the table of token embeddings."""
        return int(self.encoder.get("embedding_size", self.hidden))

    @property
    def elements(self) -> int:
        """Elements of the tables and of the layers' matrices: the model has at least this number of parameters."""
        layer = 4 * self.hidden * self.hidden + 2 * self.hidden * self.ffn
        return self._stored_layers * layer + self.vocab_rows * self.embedding_size

    @property
    def _stored_layers(self) -> int:
        return self.layers

    def flops(self, length: float, read: float, seen: float | None = None) -> float:
        """Forward FLOP; see `EncoderConfig.flops`. All positions are computed, whatever is read."""
        h = self.hidden
        scores = 4 * h * (length if seen is None else seen)
        return self.layers * length * (8 * h * h + 4 * h * self.ffn + scores)

    def build_mlm_head(self, word: nn.Embedding, vocab_size: int) -> MLMHead:
        """The family's own language-model head; they all have BERT's form."""
        from capt.pretrain.models.heads import MLMHead

        return MLMHead(word, vocab_size, self.layer_norm_eps, self.hidden, self._head_activation)

    @property
    def _head_activation(self) -> str:
        return str(self.encoder.get("hidden_act", "gelu"))

    def hf_names(self) -> dict[str, tuple[str, ...]]:
        """Every parameter: those of the encoder have the names of transformers."""
        import torch

        with torch.device("meta"):
            names = self.build_encoder().state_dict()
        return {f"encoder.{name}": (self.hf.prefix + name,) for name in names} | super().hf_names()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> TransformersConfig:
        """The configuration that the ``config.json`` of the family describes; see `EncoderConfig.from_hf`."""
        # Only keys that the file has: transformers leaves out some that are at their defaults.
        named = {HF_FIELDS[ours]: config[theirs] for ours, theirs in cls.hf_fields.items() if theirs in config}
        keys = {**cls.hf_defaults, **{key: config[key] for key in HFConfig.model_fields if key in config}, **named}
        hf = parse_hf_config(keys, source, HFConfig, cls.hf.what)
        fields = {ours: getattr(hf, theirs) for ours, theirs in HF_FIELDS.items()}
        usable = hf.max_position_embeddings - (hf.pad_token_id + 1 if cls.counts_from_padding else 0)
        known = {*cls.hf_fields.values(), "vocab_size", "max_position_embeddings", *cls._written(), *HEAD_KEYS}
        rest = {key: value for key, value in config.items() if key not in known}
        try:
            return cls(size="custom", vocab_size=hf.vocab_size, max_positions=usable, encoder=rest, **fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(name) for name in first["loc"])
            raise CheckpointError(
                f"{source} does not describe a {cls.hf.what} encoder: {where}: {first['msg']}"
            ) from None

    def to_hf(self, *, bos_id: int, eos_id: int) -> dict[str, Any]:
        """The ``config.json`` of the stock class that computes what this encoder does."""
        reserved = self.pad_id + 1 if self.counts_from_padding else 0
        return {
            "architectures": [self.hf.masked_lm],
            "dtype": "float32",
            # Our own fields come behind: a value that the job has changed wins.
            **self.encoder,
            **{theirs: getattr(self, ours) for ours, theirs in self.hf_fields.items()},
            "vocab_size": self.classes,
            "max_position_embeddings": self.max_positions + reserved,
            **self._written(),
        }

    @classmethod
    def _written(cls) -> dict[str, Any]:
        """Keys of ``config.json`` that are the same for every model of the family here."""
        return {"model_type": cls.hf.types[0], "tie_word_embeddings": True}


def _hugging_face(
    what: str, kind: str, cls: str, names: Table, tied: str, heads: tuple[str, ...], **other: Any
) -> HuggingFace:
    """The row of a family whose classes are called ``cls``; ``tied``: the second name of the word embeddings."""
    prefix = "deberta." if kind == "deberta-v2" else f"{kind}."
    fixed = {key: value for key, value in _ROBERTA.fixed.items() if key != "hidden_act"}
    return HuggingFace(
        what=what,
        types=(kind,),
        masked_lm=f"{cls}ForMaskedLM",
        encoder=f"{cls}Model",
        prefix=prefix,
        heads=heads,
        names=names,
        tied={
            f"{tied}.weight": f"{prefix}embeddings.word_embeddings.weight",
            **({} if names["mlm.bias"] == (f"{tied}.bias",) else {f"{tied}.bias": names["mlm.bias"][0]}),
        },
        unused=rf"{prefix}(embeddings\.(position|token_type)_ids|pooler\..*)|{_OTHER_HEADS}",
        fixed={**fixed, "hidden_act": _ACTIVATIONS, "activation": _ACTIVATIONS},
        sizes={},
        **other,
    )


class MPNetConfig(TransformersConfig):
    """MPNet (Song et al. 2020)."""

    hf: ClassVar[HuggingFace] = _hugging_face(
        "MPNet",
        "mpnet",
        "MPNet",
        {
            "mlm.dense.*": ("lm_head.dense.*",),
            "mlm.norm.*": ("lm_head.layer_norm.*",),
            "mlm.bias": ("lm_head.bias",),
        },
        tied="lm_head.decoder",
        heads=("lm_head.",),
        pooler="pooler.dense",
    )
    hf_defaults: ClassVar[Mapping[str, Any]] = {**TransformersConfig.hf_defaults, "pad_token_id": 1}
    counts_from_padding: ClassVar[bool] = True

    arch: str = _arch("mpnet")

    @property
    def _head_activation(self) -> str:
        return "gelu"


class ElectraConfig(TransformersConfig):
    """ELECTRA (Clark et al. 2020): a generator with its language-model head, or a discriminator, which has none."""

    hf: ClassVar[HuggingFace] = _hugging_face(
        "ELECTRA",
        "electra",
        "Electra",
        {
            "mlm.dense.*": ("generator_predictions.dense.*",),
            "mlm.norm.*": ("generator_predictions.LayerNorm.*",),
            "mlm.bias": ("generator_lm_head.bias",),
        },
        tied="generator_lm_head",
        heads=("generator_predictions.", "generator_lm_head."),
    )

    arch: str = _arch("electra")
    encoder: dict[str, Any] = Field(
        {"embedding_size": 128}, description=TransformersConfig.model_fields["encoder"].description
    )

    @property
    def _head_activation(self) -> str:
        return "gelu"


class DistilBertConfig(TransformersConfig):
    """DistilBERT (Sanh et al. 2019)."""

    hf: ClassVar[HuggingFace] = _hugging_face(
        "DistilBERT",
        "distilbert",
        "DistilBert",
        {
            "mlm.dense.*": ("vocab_transform.*",),
            "mlm.norm.*": ("vocab_layer_norm.*",),
            "mlm.bias": ("vocab_projector.bias",),
        },
        tied="vocab_projector",
        heads=("vocab_",),
    )
    hf_fields: ClassVar[Mapping[str, str]] = {
        "hidden": "dim", "layers": "n_layers", "heads": "n_heads", "ffn": "hidden_dim", "dropout": "dropout",
        "attention_dropout": "attention_dropout", "initializer_range": "initializer_range", "pad_id": "pad_token_id",
    }  # fmt: skip

    arch: str = _arch("distilbert")
    layer_norm_eps: PositiveFloat = Field(1e-12, ge=1e-37, le=1e-12, description="DistilBERT has this value alone")

    @property
    def _head_activation(self) -> str:
        return str(self.encoder.get("activation", "gelu"))


class AlbertConfig(TransformersConfig):
    """ALBERT (Lan et al. 2020), whose layers share their weights."""

    hf: ClassVar[HuggingFace] = _hugging_face(
        "ALBERT",
        "albert",
        "Albert",
        {
            "mlm.dense.*": ("predictions.dense.*",),
            "mlm.norm.*": ("predictions.LayerNorm.*",),
            "mlm.bias": ("predictions.bias",),
        },
        tied="predictions.decoder",
        heads=("predictions.",),
        pooler="pooler",
    )

    arch: str = _arch("albert")
    encoder: dict[str, Any] = Field(
        {"embedding_size": 128, "hidden_act": "gelu_new"},
        description=TransformersConfig.model_fields["encoder"].description,
    )

    @property
    def _stored_layers(self) -> int:
        return 1


class DebertaV2Config(TransformersConfig):
    """DeBERTa-v2 and v3 (He et al. 2021). The head's other names, of v3, are written as those of v2."""

    hf: ClassVar[HuggingFace] = _hugging_face(
        "DeBERTa-v2",
        "deberta-v2",
        "DebertaV2",
        _CLS,
        tied="cls.predictions.decoder",
        heads=("cls.predictions.",),
        renamed={
            "lm_predictions.lm_head.bias": "cls.predictions.bias",
            "lm_predictions.lm_head.": "cls.predictions.transform.",
        },
    )
    hf_defaults: ClassVar[Mapping[str, Any]] = {**TransformersConfig.hf_defaults, "layer_norm_eps": 1e-7}

    arch: str = _arch("deberta-v2")
    encoder: dict[str, Any] = Field(
        {
            "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256, "share_att_key": True,
            "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
        },
        description=TransformersConfig.model_fields["encoder"].description,
    )  # fmt: skip

    @classmethod
    def _written(cls) -> dict[str, Any]:
        return {**super()._written(), "legacy": True}  # the names of v2

"""ModernBERT as a row of the registry of encoders: its sizes, its names in transformers, its costs. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, ValidationError, model_validator

from capt.pretrain.base.errors import CheckpointError, shown
from capt.pretrain.config.base import PositiveInt
from capt.pretrain.models.architecture import EncoderConfig, Family, HuggingFace

if TYPE_CHECKING:
    from torch import nn

    from capt.pretrain.models.heads import MLMHead

_HF_FIELDS: dict[str, str] = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "dropout": "mlp_dropout",
    "attention_dropout": "attention_dropout",
    "layer_norm_eps": "norm_eps",
    "initializer_range": "initializer_range",
    "pad_id": "pad_token_id",
    "local_attention": "local_attention",
}
_ABSENT = (False, None)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETAS = {"global_rope_theta": (_FULL, 160_000.0), "local_rope_theta": (_SLIDING, 10_000.0)}
"""Our keys, which releases before transformers 5 wrote as well, the kind of layer, and transformers' default."""

_HF = HuggingFace(
    what="ModernBERT",
    types=("modernbert",),
    masked_lm="ModernBertForMaskedLM",
    encoder="ModernBertModel",
    prefix="model.",
    heads=("head.", "decoder."),
    names={
        "encoder.embeddings.word.weight": ("model.embeddings.tok_embeddings.weight",),
        "encoder.embeddings.norm.weight": ("model.embeddings.norm.weight",),
        "encoder.layers.#.attention_norm.weight": ("model.layers.#.attn_norm.weight",),
        "encoder.layers.#.attention.qkv.weight": ("model.layers.#.attn.Wqkv.weight",),
        "encoder.layers.#.attention.output.weight": ("model.layers.#.attn.Wo.weight",),
        "encoder.layers.#.ffn_norm.weight": ("model.layers.#.mlp_norm.weight",),
        "encoder.layers.#.ffn_in.weight": ("model.layers.#.mlp.Wi.weight",),
        "encoder.layers.#.ffn_out.weight": ("model.layers.#.mlp.Wo.weight",),
        "encoder.norm.weight": ("model.final_norm.weight",),
        "mlm.dense.weight": ("head.dense.weight",),
        "mlm.norm.weight": ("head.norm.weight",),
        "mlm.bias": ("decoder.bias",),
    },
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    unused=r"model\.rotary_emb\..*",
    fixed={
        "hidden_activation": ("gelu",),
        "classifier_activation": ("gelu",),
        "norm_bias": _ABSENT,
        "attention_bias": _ABSENT,
        "mlp_bias": _ABSENT,
        "classifier_bias": _ABSENT,
        "decoder_bias": (True, None),
        "tie_word_embeddings": (True, None),
        "is_decoder": _ABSENT,
        "rope_scaling": (None,),
        "quantization_config": (None,),
        "pruned_heads": ({}, None),
    },
    sizes={
        "vocab_size": ("encoder.embeddings.word.weight", 0),
        "hidden_size": ("encoder.embeddings.word.weight", 1),
        "intermediate_size": ("encoder.layers.0.ffn_out.weight", 1),
    },
    classifier=Family(
        "ModernBertForSequenceClassification",
        "head.dense",
        "classifier",
        "gelu",
        norm=("head.norm", "norm_eps"),
        keys={"classifier_pooling": "cls", "classifier_bias": False, "classifier_activation": "gelu"},
    ),
)


class _HFConfig(BaseModel):
    """The keys that decide an encoder, with bounds far above any in use and far below what hangs a machine."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    vocab_size: int = Field(ge=1, le=1 << 24)
    hidden_size: int = Field(ge=1, le=1 << 16)
    num_hidden_layers: int = Field(ge=1, le=1000)
    num_attention_heads: int = Field(ge=1, le=1 << 12)
    intermediate_size: int = Field(ge=1, le=1 << 19)
    max_position_embeddings: int = Field(ge=3, le=1 << 20)
    pad_token_id: int = Field(ge=0, lt=1 << 24)
    local_attention: int = Field(128, ge=2, le=1 << 20)
    norm_eps: float = Field(1e-5, gt=0, le=1)
    initializer_range: float = Field(0.02, gt=0, le=100)
    mlp_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class ModernBertConfig(EncoderConfig):
    """A pre-norm encoder with rotary positions, GeGLU and layers of two kinds of attention (Warner et al. 2024).

    ``base`` and ``large`` are ModernBERT's; ``ettin_*`` are those of Ettin (Weller et al. 2025), of which ``tiny`` and
    ``small`` are two under other names, but for ``tiny``, which is for tests.
    """

    presets: ClassVar[Mapping[str, Mapping[str, int]]] = {
        "tiny": {"layers": 4, "hidden": 128, "heads": 2, "ffn": 192},
        "small": {"layers": 10, "hidden": 384, "heads": 6, "ffn": 576},
        "base": {"layers": 22, "hidden": 768, "heads": 12, "ffn": 1152},
        "large": {"layers": 28, "hidden": 1024, "heads": 16, "ffn": 2624},
        "ettin_17m": {"layers": 7, "hidden": 256, "heads": 4, "ffn": 384},
        "ettin_32m": {"layers": 10, "hidden": 384, "heads": 6, "ffn": 576},
        "ettin_68m": {"layers": 19, "hidden": 512, "heads": 8, "ffn": 768},
        "ettin_150m": {"layers": 22, "hidden": 768, "heads": 12, "ffn": 1152},
        "ettin_400m": {"layers": 28, "hidden": 1024, "heads": 16, "ffn": 2624},
        "ettin_1b": {"layers": 28, "hidden": 1792, "heads": 28, "ffn": 3840},
    }
    module: ClassVar[str] = "capt.pretrain.models.modernbert.encoder:ModernBertEncoder"
    hf: ClassVar[HuggingFace] = _HF
    decided_by_init: ClassVar[tuple[str, ...]] = (
        *EncoderConfig.decided_by_init, "local_attention", "global_every", "global_rope_theta", "local_rope_theta",
    )  # fmt: skip
    free_of_init: ClassVar[tuple[str, ...]] = (
        *EncoderConfig.free_of_init, "max_positions", "global_rope_theta", "local_rope_theta",
    )  # fmt: skip

    arch: str = Field("modernbert", description="the encoder: this one is ModernBERT's")
    dropout: NonNegativeFloat = Field(0.0, lt=1, description="dropout of embeddings and inside the feed-forward layers")
    attention_dropout: NonNegativeFloat = Field(0.0, lt=1, description="dropout of the attention weights")
    output_dropout: NonNegativeFloat | None = Field(
        None, lt=1, description="modernbert: dropout of the attention's output; if unset attention_dropout"
    )
    local_attention: PositiveInt = Field(
        128,
        ge=2,
        le=2**20,
        description="modernbert: window of local layers in tokens: half of it on each side of a token",
    )
    global_every: PositiveInt = Field(
        3,
        le=1000,
        description="modernbert: layers 0, n, 2n ... see the whole sequence, all others are local",
    )
    global_rope_theta: PositiveFloat = Field(
        160_000.0, le=1e12, description="modernbert: base of the rotary positions in layers that see the whole sequence"
    )
    local_rope_theta: PositiveFloat = Field(
        10_000.0, le=1e12, description="modernbert: base of the rotary positions in local layers"
    )

    @model_validator(mode="after")
    def _rotates_pairs(self) -> ModernBertConfig:
        if self.hidden // self.heads % 2:
            raise ValueError(f"heads of {self.hidden // self.heads} features: rotary positions need an even number")
        return self

    @property
    def window(self) -> int:
        """Tokens that a token of a local layer sees on each side."""
        return self.local_attention // 2

    def is_global(self, layer: int) -> bool:
        """Return whether the layer of this number sees the whole sequence."""
        return layer % self.global_every == 0

    @property
    def period(self) -> int:
        """Layers after which their kinds repeat."""
        return self.global_every

    @property
    def elements(self) -> int:
        """Elements of the table and of the layers' matrices: the model has at least this number of parameters."""
        layer = 4 * self.hidden * self.hidden + 3 * self.hidden * self.ffn
        return self.layers * layer + self.vocab_rows * self.hidden

    def flops(self, length: float, read: float, seen: float | None = None) -> float:
        """Forward FLOP; see `EncoderConfig.flops`.

        A local layer counts the keys inside the window, of sequences of ``seen`` tokens; the last layer what follows
        its attention for the positions that are read.
        """
        h, whole = self.hidden, length if seen is None else seen
        reach = min(self.window, max(0.0, whole - 1))
        # A window of 2 reach + 1 keys, less those that are missing at both ends of the sequence.
        local = ((2 * reach + 1) * whole - reach * (reach + 1)) / whole
        globals_ = -(-self.layers // self.global_every)
        keys = globals_ * whole + (self.layers - globals_) * local
        row = 2 * h * h + 6 * h * self.ffn  # output, feed-forward
        return length * (self.layers * 6 * h * h + 4 * h * keys) + ((self.layers - 1) * length + read) * row

    def hf_names(self) -> dict[str, tuple[str, ...]]:
        """Every parameter of encoder and language-model head; the first layer has no norm before its attention."""
        names = super().hf_names()
        del names["encoder.layers.0.attention_norm.weight"]
        return names

    def build_mlm_head(self, word: nn.Embedding, vocab_size: int) -> MLMHead:
        """The language-model head, with a bias of the vocabulary and no other."""
        from capt.pretrain.models.heads import MLMHead

        return MLMHead(word, vocab_size, self.layer_norm_eps, bias=False)

    def initialise(self, module: nn.Module) -> None:
        """Draw the weights of the encoder and of the heads, in place."""
        from capt.pretrain.models.modernbert.initial import initialise_weights

        initialise_weights(module, self.initializer_range, self.layers)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> ModernBertConfig:
        """The configuration that the ``config.json`` of a ModernBERT describes; see `EncoderConfig.from_hf`.

        Both generations are read: ``layer_types`` and ``rope_parameters`` of transformers 5, and
        ``global_attn_every_n_layers`` with one key for each base of the releases before.
        """
        missing = [key for key, field in _HFConfig.model_fields.items() if field.is_required() and key not in config]
        if missing:
            raise CheckpointError(f"{source} has no {', '.join(missing)}; a ModernBERT encoder needs them")
        try:
            # null is the default.
            hf = _HFConfig.model_validate({key: value for key, value in config.items() if value is not None})
            fields = {ours: getattr(hf, theirs) for ours, theirs in _HF_FIELDS.items()}
            every = _global_every(config, hf.num_hidden_layers, source)
            return cls(size="custom", global_every=every, **fields, **_thetas(config, source))
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0]) if first["loc"] else ""
            key = _HF_FIELDS.get(key, key)
            value = f"{key} is {shown(config[key])}, " if key in config else ""
            raise CheckpointError(f"{source}: {value}which describes no ModernBERT encoder: {first['msg']}") from None

    def to_hf(self, *, bos_id: int, eos_id: int) -> dict[str, Any]:
        """The ``config.json`` of the stock ``ModernBertForMaskedLM`` that computes what this encoder does.

        Keys of both generations are written: ``layer_types`` and ``rope_parameters`` are read by transformers 5, the
        others by releases before.
        """
        thetas = {kind: float(getattr(self, ours)) for ours, (kind, _) in _THETAS.items()}
        return {
            "architectures": ["ModernBertForMaskedLM"],
            "model_type": "modernbert",
            **{theirs: getattr(self, ours) for ours, theirs in _HF_FIELDS.items()},
            "vocab_size": self.classes,
            "embedding_dropout": self.dropout,
            "hidden_activation": "gelu",
            "classifier_activation": "gelu",
            "classifier_pooling": "cls",
            "classifier_dropout": 0.0,
            **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False),
            "decoder_bias": True,
            "tie_word_embeddings": True,
            "sparse_prediction": False,
            "layer_types": [_FULL if self.is_global(number) else _SLIDING for number in range(self.layers)],
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": x} for kind, x in thetas.items()},
            "global_attn_every_n_layers": self.global_every,
            # Older releases of transformers read the bases here, newer ones in rope_parameters.
            **{ours: float(getattr(self, ours)) for ours in _THETAS},
            "bos_token_id": bos_id,
            "cls_token_id": bos_id,
            "eos_token_id": eos_id,
            "sep_token_id": eos_id,
            "dtype": "float32",
        }


def _global_every(config: Mapping[str, Any], layers: int, source: str) -> int:
    """Return ``n`` where every ``n``-th layer is global. Raises ``CheckpointError`` for an order of no such period."""
    types, every = config.get("layer_types"), config.get("global_attn_every_n_layers", 3)
    if type(every) is not int or not 1 <= every <= 1000:
        raise CheckpointError(f"{source}: global_attn_every_n_layers is {shown(every)}; 1 to 1000 are possible")
    if types is None:
        return every
    # Where the types contradict the key, they decide.
    second = types.index(_FULL, 1) if isinstance(types, list) and _FULL in types[1:] else layers
    for period in (every, second):
        if types == [_SLIDING if number % period else _FULL for number in range(layers)]:
            return period
    raise CheckpointError(
        f"{source}: layer_types is {shown(types)}; a ModernBERT encoder has {layers} of {_FULL!r} and {_SLIDING!r}, "
        "full in layers 0, n, 2n ... for some n"
    )


def _thetas(config: Mapping[str, Any], source: str) -> dict[str, float]:
    """The bases of the rotary positions. Raises ``CheckpointError`` for positions that are scaled in any way."""
    given = config.get("rope_parameters")
    parameters: Mapping[str, Any] = {} if given is None else given
    if not isinstance(parameters, Mapping) or not parameters.keys() <= {_FULL, _SLIDING}:
        raise CheckpointError(
            f"{source}: rope_parameters is {shown(given)}; a ModernBERT encoder has those of {_FULL} and {_SLIDING}"
        )
    found: dict[str, float] = {}
    for ours, (kind, default) in _THETAS.items():
        own = parameters.get(kind)
        rope = {} if own is None else own
        plain = isinstance(rope, Mapping) and rope.keys() <= {"rope_type", "rope_theta", "type"}
        if not plain or any(rope.get(key, "default") != "default" for key in ("rope_type", "type")):
            raise CheckpointError(
                f"{source}: rope_parameters.{kind} is {shown(own)}; a ModernBERT encoder has rope_type 'default' and "
                "a rope_theta"
            )
        # Releases before transformers 5 read a local base of null as the global one.
        key, old = "rope_theta", config.get(ours, default)
        value = rope.get(key, found.get("global_rope_theta", default) if old is None else old)
        if type(value) not in (int, float) or not 1 <= value <= 1e12:
            name = f"rope_parameters.{kind}.{key}" if key in rope else ours
            raise CheckpointError(f"{source}: {name} is {shown(value)}; a number from 1 to 1e12 is possible")
        found[ours] = float(value)
    return found

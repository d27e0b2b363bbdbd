"""The encoders that can be pretrained: their registry, and the section ``model`` that each of them extends. No torch.

An encoder is one class, a subclass of `EncoderConfig`: its keys, how its modules are built, what they cost, and how
transformers names them. Other distributions add encoders through the entry-point group ``capt.encoders`` (name = the
value of ``model.arch``, value = ``module:Class``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
    model_serializer,
    model_validator,
)

from capt.pretrain.base.errors import CheckpointError, ConfigError, shown
from capt.pretrain.config.base import NonNegativeInt, PositiveInt, Section
from capt.pretrain.models.hf_config import FolderOrId
from capt.pretrain.registry import entry_point_values, load_entry, look_up

if TYPE_CHECKING:
    from torch import Tensor, nn

    from capt.pretrain.models.encoder import Encoder
    from capt.pretrain.models.heads import MLMHead

_FOREIGN = "capt.pretrain.models.foreign.config:"

ENCODERS = {
    "modernbert": "capt.pretrain.models.modernbert.config:ModernBertConfig",
    "roberta": "capt.pretrain.models.config:RobertaConfig",
    "bert": _FOREIGN + "BertConfig",
    "camembert": _FOREIGN + "CamembertConfig",
    "mpnet": _FOREIGN + "MPNetConfig",
    "electra": _FOREIGN + "ElectraConfig",
    "distilbert": _FOREIGN + "DistilBertConfig",
    "albert": _FOREIGN + "AlbertConfig",
    "deberta-v2": _FOREIGN + "DebertaV2Config",
}
"""The value of ``model.arch`` -> the class of the section ``model``."""

Recompute = Literal["none", "full", "offload", "fairscale", "fairscale_offload"]
RECOMPUTE = (
    "recompute layers in the backward pass; offload also moves their inputs to host memory; fairscale* do it by "
    "fairscale, which must be installed, in place of torch"
)
"""Values of ``model.activation_checkpointing``, and the description of the key."""

_GROUP = "capt.encoders"

Table = Mapping[str, tuple[str, ...]]
"""Parameter names, ours and those of another library. A row is our name and the names of its parts there: where several
tensors represent one of ours, they are its rows in that order. ``#`` is the number of a layer, ``*`` represents
``weight`` and ``bias``."""


def encoder_class(name: str) -> type[EncoderConfig]:
    """The class that ``model.arch`` names.

    Raises:
        ConfigError: no encoder has that name, or its entry point leads to no `EncoderConfig`.
    """
    path = look_up(name, ENCODERS, _GROUP, "arch: unknown encoder")
    found = load_entry(path, _GROUP, f"model.arch {name}")
    if not (isinstance(found, type) and issubclass(found, EncoderConfig)):
        raise ConfigError(f"model.arch {name}: {path!r} of {_GROUP} is not a subclass of EncoderConfig, as it must be")
    return found


def encoder_of_type(model_type: object) -> type[EncoderConfig] | None:
    """The class whose models have this ``model_type`` in ``config.json``; None where no encoder can read them."""
    for names in (ENCODERS, entry_point_values(_GROUP)):
        for name in names:
            if model_type in (found := encoder_class(name)).hf.types:
                return found
    return None


def model_types() -> list[str]:
    """Every ``model_type`` that `encoder_of_type` knows."""
    names = {**ENCODERS, **entry_point_values(_GROUP)}
    return list(dict.fromkeys(kind for name in names for kind in encoder_class(name).hf.types))


def expand(table: Table, layers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every parameter that ``table`` means in a model of ``layers`` layers."""
    for ours, theirs in table.items():
        for layer in range(layers) if "#" in ours else (0,):
            for kind in ("weight", "bias") if "*" in ours else ("",):
                yield _fill(ours, layer, kind), tuple(_fill(name, layer, kind) for name in theirs)


def _fill(name: str, layer: int, kind: str) -> str:
    return name.replace("#", str(layer)).replace("*", kind)


@dataclass(frozen=True)
class Family:
    """Form of transformers' own sequence classifier of a family, so that ours can become one.

    Attributes:
        architecture: the class of transformers.
        dense: its name for the first layer of the classification head.
        out: its name for the last layer of the head.
        activation: the function between the two.
        dropout: the key of ``config.json`` for dropout of hidden states.
        attention_dropout: the key for dropout of attention weights.
        counts_from_padding: positions begin after the padding id, as in RoBERTa, so that the first
            ``pad_token_id + 1`` rows of the position table belong to no token.
        norm: its name for a LayerNorm after the activation, and the key for the epsilon; such a head has no biases
            before its last layer, and no dropout before its first. None = no LayerNorm.
        keys: what the classifier's ``config.json`` must say of the head.
    """

    architecture: str
    dense: str
    out: str
    activation: str = "tanh"
    dropout: str = "hidden_dropout_prob"
    attention_dropout: str = "attention_probs_dropout_prob"
    counts_from_padding: bool = False
    norm: tuple[str, str] | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HuggingFace:
    """Names that transformers gives an encoder and its language-model head.

    Attributes:
        what: the family's name in error messages, such as ``RoBERTa or XLM-R``.
        types: values of ``model_type``; exports have the first.
        masked_lm: the class with the language-model head.
        encoder: the class without it.
        prefix: of the encoder's tensors in ``masked_lm``.
        heads: prefixes of the tensors of the head.
        names: our parameters -> those of transformers; `capt.pretrain.models.hf_map` says how a row is written.
        tied: second names of shared parameters -> the first names.
        renamed: parts of names that other tools write -> those of transformers.
        unused: a regular expression of tensors that may be there and are not read.
        fixed: keys of ``config.json`` -> the only values that our encoder can represent.
        sizes: keys of ``config.json`` -> the tensor (our name) and the axis that have this size.
        pooler: the name of the linear map of the pooler that ``encoder`` has, which masked-language modelling never
            trains; None = it has none.
        classifier: for fine-tuning; None = the encoder cannot be fine-tuned as a classifier.
    """

    what: str
    types: tuple[str, ...]
    masked_lm: str
    encoder: str
    prefix: str
    heads: tuple[str, ...]
    names: Table
    tied: Mapping[str, str]
    unused: str
    fixed: Mapping[str, tuple[Any, ...]]
    sizes: Mapping[str, tuple[str, int]]
    pooler: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    classifier: Family | None = None


def _allow_keys_of_an_arch(schema: dict[str, Any], cls: type[Any]) -> None:
    """The schema of the section, which is that of no single encoder, lets further keys pass."""
    if cls is EncoderConfig:
        schema.pop("additionalProperties", None)


def with_preset(values: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the keys of a section with those of the preset that ``size`` names. Raises ``ValueError`` of custom."""
    size = values.get("size", "small")
    if size == "custom" and (missing := [key for key in presets["small"] if key not in values]):
        raise ValueError(f"size custom needs {', '.join(missing)} as well (or take size {', '.join(presets)})")
    return {**presets.get(size, {}), **values} if isinstance(size, str) else values


def check_heads(hidden: int, heads: int) -> None:
    """Raise ``ValueError`` where the heads cannot share the width."""
    if hidden % heads:
        fits = [n for n in range(1, hidden + 1) if hidden % n == 0 and hidden // n >= 16]
        raise ValueError(f"heads {heads} does not divide hidden {hidden}; one of {fits or [1]} does")


class EncoderConfig(Section):
    """An encoder with CAPT's aggregation head. Field names are ``model.*`` keys; ``arch`` may bring further ones.

    Where ``layers``, ``hidden``, ``heads`` and ``ffn`` are not set, they come from ``init`` if there is one, else from
    ``size``. Lengths are in tokens.
    """

    presets: ClassVar[Mapping[str, Mapping[str, int]]]
    """Values of ``size`` -> layers, hidden, heads and ffn; one of them is called ``small``."""
    module: ClassVar[str]
    """``MODULE:CLASS`` of the `capt.pretrain.models.encoder.Encoder`, which is built from this configuration."""
    word: ClassVar[str] = "embeddings.word"
    """The name of its table of token embeddings, a `WordEmbedding` where ``pad_vocab_to`` is not 1."""
    hf: ClassVar[HuggingFace]
    packs_documents: ClassVar[bool] = True
    """True if attention can be kept inside the documents of a window (``data.cross_document_attention=false``)."""
    decided_by_init: ClassVar[tuple[str, ...]] = (
        "layers", "hidden", "heads", "ffn", "vocab_size", "max_positions", "pad_id", "layer_norm_eps",
    )  # fmt: skip
    """Fields that ``init`` decides where the job does not set them."""
    free_of_init: ClassVar[tuple[str, ...]] = ("vocab_size",)
    """Fields among them that a job may set otherwise; all others must be equal there."""

    model_config = ConfigDict(json_schema_extra=_allow_keys_of_an_arch)

    arch: str = Field(
        "roberta",
        description="the encoder: roberta, modernbert, bert, camembert, mpnet, electra, distilbert, albert, deberta-v2,"
        " or an entry point of capt.encoders; if unset that of init",
    )
    size: str = Field(
        "small", description="preset of layers, hidden, heads and ffn: tiny, small, base, large; custom = all are given"
    )
    layers: PositiveInt = Field(6, le=1000, description="Transformer layers")
    hidden: PositiveInt = Field(256, le=65_536, description="width of the encoder")
    heads: PositiveInt = Field(4, le=65_536, description="attention heads per layer")
    ffn: PositiveInt = Field(
        1024, le=2**20, description="inner width of the feed-forward layers and of the aggregation head"
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
    activation_checkpointing: Recompute = Field("none", description=RECOMPUTE)
    compile: bool | Literal["auto"] = Field(
        False,
        description="torch.compile the layers (needs a C++ compiler, or Triton on a GPU); auto = on GPUs only",
    )
    init: FolderOrId | None = Field(
        None,
        description="trained model to start from, which brings its architecture and sizes: a Hugging Face folder or"
        " USER/NAME[@REV]",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_arch(cls, value: Any, handler: Callable[[Any], Any]) -> Any:
        # `model` itself is no encoder: the class that its `arch` names takes over.
        if cls is not EncoderConfig or not isinstance(value, Mapping):
            return handler(value)
        arch = value.get("arch", "roberta")
        if not isinstance(arch, str):
            raise ValueError(f"arch: {shown(arch)} is not a name of an encoder")
        return encoder_class(arch).model_validate(value)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        size = values.get("size", "small")
        if isinstance(size, str) and size not in (*cls.presets, "custom"):
            arch = cls.model_fields["arch"].default if "arch" not in values else values["arch"]
            raise ValueError(
                f"size {shown(size)} is unknown to model.arch {shown(arch)}; valid: {', '.join(cls.presets)}, custom"
            )
        if values.get("init") is not None:
            return values  # which brings the sizes that are not given
        return with_preset(values, cls.presets)

    @model_serializer(mode="wrap")
    def _omit_sizes_of_init(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        if self.init is None:
            return written
        # Fields that init decides are not written: they would read as set by the job, and bind other weights.
        omitted = {name for name in ("arch", *self.decided_by_init, "pooling") if name not in self.model_fields_set}
        return {key: value for key, value in written.items() if key not in omitted}

    @model_validator(mode="after")
    def _fits_together(self) -> EncoderConfig:
        check_heads(self.hidden, self.heads)
        if self.vocab_size is not None and self.pad_id >= self.vocab_size:
            raise ValueError(f"pad_id {self.pad_id} is outside the vocabulary of {self.vocab_size} rows")
        return self

    @property
    def vocab_rows(self) -> int:
        """Rows of the word embedding: ``classes`` rounded up to ``pad_vocab_to``."""
        return -(-self.classes // self.pad_vocab_to) * self.pad_vocab_to

    @property
    def classes(self) -> int:
        """Ids that are embedded and predicted: ``vocab_size``, once it is known."""
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size is not known yet: set it, or take it from the tokenizer first")
        return self.vocab_size

    def for_tokenizer(self, vocab_size: int, pad_id: int) -> EncoderConfig:
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

    def require_same_architecture(self, other: EncoderConfig, source: str) -> None:
        """Check that weights made under ``other`` (read from ``source``) fit this configuration.

        Raises:
            CheckpointError: a field that decides shapes or outputs differs; the message names it and both values.
        """
        fields = (name for name in self.decided_by_init if name not in self.free_of_init)
        for name in fields if self.arch == other.arch else ("arch",):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise CheckpointError(
                    f"{source}: model.{name} is {theirs} there but {mine} in this job; set it to {theirs}"
                )
        # Weights may be padded as here, or not at all: `with_rows` evens that out.
        if other.vocab_rows not in (self.classes, self.vocab_rows):
            raise CheckpointError(
                f"{source}: holds {other.vocab_rows} rows of vocabulary, this job's model {self.classes} "
                f"(padded to {self.vocab_rows}); set model.vocab_size to {other.vocab_rows}"
            )

    def with_sizes_of(self, other: EncoderConfig, source: str) -> EncoderConfig:
        """This configuration with the sizes of ``other``, read from ``source``, for those that the job does not set.

        Raises:
            CheckpointError: as `require_same_architecture`, for a size that the job does set.
            ConfigError: the job sets a key that the architecture of ``other`` cannot have.
        """
        if self.arch != other.arch:
            if "arch" in self.model_fields_set:
                self.require_same_architecture(other, source)
            mine = {name: getattr(self, name) for name in self.model_fields_set}
            try:
                # Validated anew, as the class of the other architecture: a key that it does not have is named.
                as_there = type(other).model_validate({**mine, "arch": other.arch})
            except ValidationError as error:
                raise ConfigError(f"model.init {source}: {error.errors()[0]['msg']}") from None
            return as_there.with_sizes_of(other, source)
        sizes = {name: getattr(other, name) for name in self.decided_by_init if name not in self.model_fields_set}
        if "pooling" not in self.model_fields_set:
            sizes["pooling"] = other.pooling
        # A job asks for the positions that it needs: a table that has them serves it.
        if "max_positions" not in self.free_of_init and self.max_positions < other.max_positions:
            sizes["max_positions"] = other.max_positions
        # custom: a preset must not be filled in over the sizes of init.
        completed = self.model_copy(update={**sizes, "size": "custom"})
        completed.require_same_architecture(other, source)
        return completed

    def fixed_by_weights(self) -> dict[str, Any]:
        """The fields that ``model.init`` decides, with their values; the size of the vocabulary is not among them."""
        return {name: getattr(self, name) for name in self.decided_by_init if name != "vocab_size"}

    def unused_positions(self) -> str | None:
        """Describe parameters that belong to no position of a sequence, in a sentence; None where there are few."""
        return None

    @property
    def period(self) -> int:
        """Layers after which a stack repeats itself: 1 where all are alike."""
        return 1

    @property
    @abstractmethod
    def elements(self) -> int:
        """Elements of the tables and of the layers' matrices: the model has at least this number of parameters."""

    @abstractmethod
    def flops(self, length: float, read: float, seen: float | None = None) -> float:
        """Forward FLOP of a sequence of ``length`` tokens through the encoder, its output read at ``read`` of them.

        Matrix products only, a multiply-add being 2. ``seen``: tokens that a token attends to on average (None = all).
        """

    @property
    def embedding_size(self) -> int:
        """Columns of the table of token embeddings."""
        return self.hidden

    def build_encoder(self) -> Encoder:
        """The encoder, of the class `module`."""
        return load_entry(self.module, _GROUP, f"model.arch {self.arch}")(self)  # type: ignore[no-any-return]

    def build_mlm_head(self, word: nn.Embedding, vocab_size: int) -> MLMHead:
        """The language-model head over the token embeddings ``word``, whose first ``vocab_size`` rows it predicts."""
        from capt.pretrain.models.heads import MLMHead

        return MLMHead(word, vocab_size, self.layer_norm_eps, self.hidden)

    def initialise(self, module: nn.Module) -> None:
        """Draw the weights of the encoder and of the heads, in place."""
        from capt.pretrain.models.layers import initialise_weights

        initialise_weights(module, self.initializer_range)

    def hf_names(self) -> dict[str, tuple[str, ...]]:
        """Every parameter of encoder and language-model head: our name and the names of its parts in transformers."""
        return dict(expand(self.hf.names, self.layers))

    def from_hf_tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of transformers under our names, in the shapes that our encoder has them."""
        return dict(state)

    def to_hf_tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our tensors under our names, in the shapes that transformers has them: undoes `from_hf_tensors`."""
        return dict(state)

    @classmethod
    @abstractmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> EncoderConfig:
        """The configuration that a Hugging Face ``config.json``, read from ``source``, describes.

        Raises:
            CheckpointError: a key is missing or has a value that this encoder cannot represent; the key is named.
        """

    @abstractmethod
    def to_hf(self, *, bos_id: int, eos_id: int) -> dict[str, Any]:
        """The ``config.json`` of the stock class of transformers that computes what this encoder does."""


# Floating-point operations of a training step, for MFU.


def flops_per_token(
    config: EncoderConfig, sequence_length: int, masked_fraction: float, views: int, seen: float | None = None
) -> float:
    """Model FLOP (forward and backward) of a training step divided by its packed tokens, each counted once.

    The encoder as in `EncoderConfig.flops`, the vocabulary only at masked positions; the backward pass costs twice the
    forward (Chowdhery et al. 2022, appendix B; recomputation is not counted).

    Args:
        config: the encoder.
        sequence_length: tokens a sequence.
        masked_fraction: masked positions / tokens, such as 0.15.
        views: 2 with contrast (original and corrupted), 1 for MLM alone.
        seen: tokens that a token attends to on average, where attention keeps within documents (None = all).
    """
    h, length = config.hidden, sequence_length
    masked = masked_fraction * length
    # The mean reads every position; otherwise only the masked ones, and the first of each view.
    read = views * length if config.pooling == "mean" and views == 2 else masked + (views if views == 2 else 0)
    encoder = views * config.flops(float(length), read / views, seen)
    width = config.embedding_size
    heads = masked * (2 * h * width + 2 * width * config.classes)
    if views == 2:
        # Two matrices of h x ffn, a multiply-add being 2.
        heads += views * 4 * h * config.ffn
    return 3.0 * (encoder + heads) / length

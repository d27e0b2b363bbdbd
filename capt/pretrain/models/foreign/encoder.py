"""The encoder in a Hugging Face folder of any known family, read and built with the model of `transformers`.

What a folder of somebody else says is not believed: ``config.json`` goes through the guards of
`capt.pretrain.models.hf_folder`, and only safetensors are opened.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, shown
from capt.pretrain.models.architecture import EncoderConfig
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.config import HEAD_KEYS, TransformersConfig
from capt.pretrain.models.foreign.families import family_of, own_encoder, read_description, require_known
from capt.pretrain.models.heads import take_rows
from capt.pretrain.models.hf_config import list_names
from capt.pretrain.models.hf_folder import read_tensors
from capt.pretrain.models.hf_map import OLD_NAMES, concatenate, renamed, under, with_first_names
from capt.pretrain.models.sentence_folder import encoder_folder
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)


_HEADS = re.compile(
    r"(cls|lm_head|mlm_head|mask_predictions|lm_predictions|generator_\w+|discriminator_predictions|classifier"
    r"|pre_classifier|predictions|sop_classifier|qa_outputs|vocab_\w+|activation|pooler|pooler_activation|score)(\..*|$)"
)
"""Names of modules that classes of transformers put beside the encoder, or on it."""

_WORDS = "embeddings.word_embeddings.weight"
_OUTPUT_MATRICES = (
    "lm_head.decoder.weight", "cls.predictions.decoder.weight", "predictions.decoder.weight", "vocab_projector.weight",
    "generator_lm_head.weight",
)  # fmt: skip
"""The second name of a tied word embedding in each class for masked language modelling."""

_BUFFERS = re.compile(r"embeddings\.(position|token_type)_ids")

_MAX_LAYERS = 1000


@dataclass(frozen=True)
class PretrainedEncoder:
    """Parts of an encoder in a folder or a checkpoint.

    Attributes:
        hf_config: the keys of a ``config.json`` from which the encoder can be built again.
        state: its weights under the names of the encoder that `build_encoder` makes of ``hf_config``.
        tokenizer: made of the vocabulary that it was pretrained with.
    """

    hf_config: dict[str, Any]
    state: dict[str, Tensor]
    tokenizer: TextTokenizer


def read_encoder(folder: Path) -> PretrainedEncoder:
    """Read a Hugging Face folder of a masked-language model, a classifier or an encoder; heads are left behind.

    Raises:
        CheckpointError: the family is not known, the folder is damaged or names code to run, it has no usable
            tokenizer, or model and tokenizer pad with different ids.
    """
    folder = encoder_folder(folder)
    hf_config, tokenizer = read_description(folder)
    # The tokenizer knows the padding id where the file leaves it out.
    hf_config = {**encoder_keys(hf_config), "pad_token_id": tokenizer.special.pad}
    tensors, own = read_tensors(folder), own_encoder(hf_config)
    if own is not None:
        tensors = with_first_names(tensors, own.hf.tied)
        tensors = {name: x for name, x in tensors.items() if not name.startswith(own.hf.heads)}
    state = _encoder_tensors(tensors, str(folder), tied=hf_config.get("tie_word_embeddings") is not False)
    layers = hf_config.get("num_hidden_layers", hf_config.get("n_layers", 1))
    # Before a table of names is made for this number of layers.
    if not isinstance(layers, int) or not 0 < layers <= _MAX_LAYERS:
        raise CheckpointError(
            f"{folder / 'config.json'}: num_hidden_layers is {shown(layers)}; 1 to {_MAX_LAYERS} are possible"
        )
    if own is not None:
        state = _rename_own(state, own.from_hf(hf_config, f"{folder}: config.json"), str(folder))
    return PretrainedEncoder(hf_config, state, tokenizer)


def encoder_keys(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a ``config.json`` without those of heads, training and file format."""
    return {key: value for key, value in hf_config.items() if key not in HEAD_KEYS}


def _encoder_tensors(tensors: Mapping[str, Tensor], source: str, *, tied: bool) -> dict[str, Tensor]:
    """Tensors under the names of a bare encoder: without the model's prefix, heads, pooler, old names and buffers.

    The word embedding may have the name of the output matrix that it is ``tied`` to alone.
    """
    names: dict[str, str] = {}
    # A class with heads writes `bert.embeddings. ...`, a bare encoder `embeddings. ...`.
    prefixes = {name.partition(".")[0] for name in tensors if re.match(r"\w+\.embeddings\.", name)}
    for name in tensors:
        first, _, rest = name.partition(".")
        bare = renamed(rest if first in prefixes else name, OLD_NAMES)
        if not _HEADS.fullmatch(bare) and not _BUFFERS.fullmatch(bare):
            names[name] = bare
    state = under(names, tensors, source)
    output = next((name for name in _OUTPUT_MATRICES if name in tensors), None)
    if tied and output is not None and _WORDS not in state:
        state[_WORDS] = tensors[output]
    return state


def _rename_own(tensors: Mapping[str, Tensor], config: EncoderConfig, source: str) -> dict[str, Tensor]:
    """Tensors under the names of our own encoder; what is not in the table keeps its own name."""
    rest, state = dict(tensors), {}
    for ours, theirs in config.hf_names().items():
        parts = [name.removeprefix(config.hf.prefix) for name in theirs]
        # Only whole parameters: of a part that is left over the comparison gives the name.
        if ours.startswith("encoder.") and all(part in rest for part in parts):
            state[ours.removeprefix("encoder.")] = concatenate(rest, parts, source, config.hf.what)
            for part in parts:
                del rest[part]
    return state | rest


# A transformers model behind the `Encoder` protocol.


class TransformersEncoder(Encoder):
    """An encoder of transformers without its pooler. Its parameters have the names that transformers gives them.

    Args:
        model: a bare encoder, such as ``BertModel``.
        hf_config: the keys of its ``config.json``, ``pad_token_id`` among them.
        source: where they come from, for error messages.
    """

    def __init__(self, model: nn.Module, hf_config: Mapping[str, Any], source: str) -> None:
        super().__init__()
        # Nothing reads its output, so its weights would never have a gradient.
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # type: ignore[assignment]
        self._transformers = (model,)  # in a tuple, which torch does not register: the parts are, under their own names
        for name, part in model.named_children():
            self.add_module(name, part)
        config: Any = model.config
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        self.pad_id = int(hf_config["pad_token_id"])
        unused_rows = self.pad_id + 1 if family_of(hf_config, source).counts_from_padding else 0
        self.max_positions = config.max_position_embeddings - unused_rows
        # MPNet's model takes no token types, whatever its configuration says.
        self.reads_types = getattr(config, "type_vocab_size", 0) > 1 and hf_config["model_type"] != "mpnet"
        self._layers = int(config.num_hidden_layers)

    @property
    def model(self) -> Any:
        """The transformers model itself."""
        return self._transformers[0]

    def train(self, mode: bool = True) -> TransformersEncoder:
        """Set training mode, of the transformers model as well."""
        self.model.train(mode)
        return super().train(mode)

    def forward(
        self,
        tokens: Int[Tensor, "b L"],
        types: Int[Tensor, "b L"] | None = None,
        *,
        padded: bool = False,
        documents: Int[Tensor, "b L"] | None = None,
        runs: int | None = None,
        rows: Int[Tensor, "b r"] | None = None,
    ) -> Float[Tensor, "b _ h"]:
        """Final hidden states; see `Encoder.forward`. All positions are computed, whatever ``rows``.

        Raises:
            ConfigError: ``documents`` are given: the masks of transformers' encoders differ by family.
            DataError: the sequence is longer than ``max_positions``.
        """
        if tokens.shape[1] > self.max_positions:
            raise DataError(
                f"a sequence of {tokens.shape[1]} tokens is longer than the encoder's {self.max_positions} positions"
            )
        if documents is not None:
            raise ConfigError(
                f"{type(self.model).__name__} of transformers cannot keep attention inside documents here; "
                "set data.cross_document_attention=true"
            )
        mask = (tokens != self.pad_id).long() if padded else None
        segments = {"token_type_ids": types} if types is not None and self.reads_types else {}
        hidden: Tensor = self.model(input_ids=tokens, attention_mask=mask, **segments).last_hidden_state
        return hidden if rows is None else take_rows(hidden, rows)

    @property
    def word_embedding(self) -> nn.Embedding:
        """The table of token embeddings."""
        return self.model.get_input_embeddings()  # type: ignore[no-any-return]

    def flops(self, length: float, read: float | None = None) -> float:
        """Twice the matrix elements outside the embeddings for each token, and the two products of the attention."""
        named = self.named_parameters()
        matrices = sum(p.numel() for name, p in named if p.ndim > 1 and "embeddings" not in name)
        return length * (2.0 * matrices + 4.0 * self._layers * length * self.hidden_size)


class RegisteredEncoder(TransformersEncoder):
    """The encoder that a row of the registry describes, with fresh weights."""

    def __init__(self, config: TransformersConfig) -> None:
        keys = config.to_hf(bos_id=0, eos_id=0)
        super().__init__(_model(keys, f"model.arch {config.arch}"), keys, config.arch)


# An encoder of any known family from the keys of its ``config.json``, and its weights into it.


def build_encoder(hf_config: Mapping[str, Any], *, dropout: float, attention_dropout: float, source: str) -> Encoder:
    """A freshly initialised encoder: ours for a family that can be pretrained, else transformers' model.

    Args:
        hf_config: the keys of a ``config.json``.
        dropout: probability, of hidden states.
        attention_dropout: probability, of attention weights.
        source: where the keys come from, for error messages.

    Raises:
        CheckpointError: the family is not known, or keys are missing or impossible.
    """
    require_known(hf_config, source)
    if (own := own_encoder(hf_config)) is not None:
        config = own.from_hf(hf_config, f"{source}: config.json")
        encoder = config.model_copy(update={"dropout": dropout, "attention_dropout": attention_dropout}).build_encoder()
        config.initialise(encoder)
        return encoder
    family = family_of(hf_config, source)
    keys = {**hf_config, family.dropout: dropout, family.attention_dropout: attention_dropout}
    return TransformersEncoder(_model(keys, source), hf_config, source)


def _model(hf_config: Mapping[str, Any], source: str) -> nn.Module:
    """The bare model of transformers that the keys of a ``config.json`` describe, freshly initialised."""
    from transformers import AutoConfig, AutoModel

    keys = {key: value for key, value in hf_config.items() if key != "model_type"}
    kind = hf_config["model_type"]
    try:
        return AutoModel.from_config(AutoConfig.for_model(kind, **keys))  # type: ignore[no-any-return]
    except Exception as error:  # each of its classes raises what it likes for a value that it does not
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{source}: config.json does not describe a {kind} encoder: {text}") from None


def load_encoder(
    pretrained: PretrainedEncoder,
    source: str,
    *,
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    allow_missing: bool = False,
) -> Encoder:
    """The encoder with the weights of ``pretrained``, built only once they are known to have the sizes it claims.

    Args:
        pretrained: weights, sizes and tokenizer, as `read_encoder` returns them.
        source: where they were read, for error messages.
        dropout: probability, of hidden states.
        attention_dropout: probability, of attention weights.
        allow_missing: warn of weights that are missing (they stay as initialised) or unknown, instead of refusing.

    Raises:
        CheckpointError: weights are missing, unknown or of another shape, or the tokenizer has more ids than the
            encoder embeds.
    """
    options: dict[str, Any] = {"dropout": dropout, "attention_dropout": attention_dropout, "source": source}
    with torch.device("meta"):
        empty = build_encoder(pretrained.hf_config, **options)
    shapes = {name: tensor.shape for name, tensor in empty.state_dict().items()}
    state = pretrained.state
    # Sizes are compared on the meta device, before an element is allocated.
    _compare(shapes, state, source, allow_missing)
    encoder = build_encoder(pretrained.hf_config, **options)
    encoder.load_state_dict({name: state[name] for name in shapes if name in state}, strict=False)
    ids = pretrained.tokenizer.vocab_size
    if ids > encoder.vocab_size:
        raise CheckpointError(f"{source}: the tokenizer has {ids} ids, the encoder {encoder.vocab_size} rows")
    return encoder


def _compare(shapes: Mapping[str, torch.Size], state: Mapping[str, Tensor], source: str, allow_missing: bool) -> None:
    """Compare the encoder's names and ``shapes`` with the weights in ``state``."""
    unequal = [
        f"{name} is {tuple(state[name].shape)}, not {tuple(shape)}"
        for name, shape in shapes.items()
        if name in state and state[name].shape != shape
    ]
    if unequal:
        raise CheckpointError(f"{source}: config.json and tensors disagree: {list_names(unequal)}")
    differences = {
        "missing": sorted(shapes.keys() - state.keys()),
        "unexpected": sorted(state.keys() - shapes.keys()),
    }
    if not any(differences.values()):
        return
    problem = "; ".join(f"{kind}: {list_names(names)}" for kind, names in differences.items() if names)
    if not allow_missing:
        # no such hint where weights are missing: the model would be trained from random ones in their place
        hint = "" if differences["missing"] else "; model.allow_missing=true leaves them out"
        raise CheckpointError(f"{source}: not the weights of its encoder ({problem}){hint}")
    logger.warning("%s: missing weights stay as initialised, unexpected ones are left out: %s", source, problem)

"""Read the encoder in a Hugging Face folder of any known family, whatever heads it has.

What a folder of somebody else says is not believed: ``config.json`` goes through the guards of
`capt.pretrain.models.hf_folder`, only safetensors are opened, and nothing is built here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from capt.pretrain.base.errors import CheckpointError, shown
from capt.pretrain.models.architecture import EncoderConfig
from capt.pretrain.models.foreign.config import HEAD_KEYS
from capt.pretrain.models.foreign.families import own_encoder, read_description
from capt.pretrain.models.hf_folder import read_tensors
from capt.pretrain.models.hf_map import OLD_NAMES, concatenate, renamed, with_first_names
from capt.tokenizer.encode import TextTokenizer

_HEADS = re.compile(
    r"(cls|lm_head|mlm_head|mask_predictions|lm_predictions|generator_\w+|discriminator_predictions|classifier"
    r"|pre_classifier|predictions|sop_classifier|qa_outputs|vocab_\w+|activation|pooler|pooler_activation|score)(\..*|$)"
)
"""What classes of transformers put beside the encoder, or on it."""

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
    """What a folder or a checkpoint holds of an encoder.

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
    hf_config, tokenizer = read_description(folder)
    hf_config = {**encoder_keys(hf_config), "pad_token_id": tokenizer.special.pad}
    tensors, own = read_tensors(folder), own_encoder(hf_config)
    if own is not None:
        tensors = with_first_names(tensors, own.hf.tied)
        tensors = {name: x for name, x in tensors.items() if not name.startswith(own.hf.heads)}
    state = _encoder_tensors(tensors, tied=hf_config.get("tie_word_embeddings") is not False)
    layers = hf_config.get("num_hidden_layers", hf_config.get("n_layers", 1))
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


def _encoder_tensors(tensors: Mapping[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
    """Tensors under the names of a bare encoder: without the model's prefix, heads, pooler, old names and buffers.

    The word embedding may have the name of the output matrix that it is ``tied`` to alone.
    """
    state: dict[str, Tensor] = {}
    prefixes = {name.partition(".")[0] for name in tensors if re.match(r"\w+\.embeddings\.", name)}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        bare = renamed(rest if first in prefixes else name, OLD_NAMES)
        if not _HEADS.fullmatch(bare) and not _BUFFERS.fullmatch(bare):
            state[bare] = tensor
    output = next((name for name in _OUTPUT_MATRICES if name in tensors), None)
    if tied and output is not None and _WORDS not in state:
        state[_WORDS] = tensors[output]
    return state


def _rename_own(tensors: Mapping[str, Tensor], config: EncoderConfig, source: str) -> dict[str, Tensor]:
    """Tensors under the names of our own encoder; what is not in the table keeps its own name."""
    rest, state = dict(tensors), {}
    for ours, theirs in config.hf_names().items():
        parts = [name.removeprefix(config.hf.prefix) for name in theirs]
        if ours.startswith("encoder.") and all(part in rest for part in parts):
            state[ours.removeprefix("encoder.")] = concatenate(rest, parts, source, config.hf.what)
            for part in parts:
                del rest[part]
    return state | rest

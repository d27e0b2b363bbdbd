"""Read the encoder in a Hugging Face folder of any known family, whatever heads stand on it.

What a folder of somebody else says is not believed: ``config.json`` goes through the guards of
`pretrain.models.hf_folder`, only safetensors are opened, and nothing is built here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pretrain.base.errors import CheckpointError, DataError, shown
from pretrain.models.foreign.families import ROBERTA_TYPES, family_of
from pretrain.models.hf_folder import TOKENIZER_CONFIGS, read_config, read_json, read_tensors
from pretrain.models.hf_map import parameter_names
from pretrain.models.name_table import concatenate
from tokenizer.encode import TextTokenizer, load_tokenizer

_HEADS = re.compile(
    r"(cls|lm_head|mlm_head|mask_predictions|lm_predictions|generator_\w+|discriminator_predictions|classifier"
    r"|pre_classifier|predictions|sop_classifier|qa_outputs|vocab_\w+|activation|pooler|pooler_activation|score)(\..*|$)"
)
"""What classes of transformers put beside the encoder, or on it."""

_BUFFERS = re.compile(r"embeddings\.(position|token_type)_ids")
_OLD_NAMES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
_HEAD_KEYS = (
    "architectures", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    "transformers_version", "_name_or_path", "torch_dtype", "dtype", "_num_labels",
)  # fmt: skip
"""Keys of ``config.json`` that do not concern the encoder."""

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
    hf_config = read_json(folder / "config.json")
    family_of(hf_config, str(folder / "config.json"))
    is_roberta = hf_config["model_type"] in ROBERTA_TYPES
    if is_roberta:
        hf_config = read_config(folder)
    for name in TOKENIZER_CONFIGS:
        if (folder / name).exists():
            read_json(folder / name)
    tokenizer = read_tokenizer(folder, folder)
    pad = hf_config.get("pad_token_id")
    if pad not in (None, tokenizer.special.pad):
        raise CheckpointError(f"{folder}: the model pads with {shown(pad)}, its tokenizer with {tokenizer.special.pad}")
    hf_config = {**encoder_keys(hf_config), "pad_token_id": tokenizer.special.pad}
    state = _encoder_tensors(read_tensors(folder))
    layers = hf_config.get("num_hidden_layers", hf_config.get("n_layers", 1))
    if not isinstance(layers, int) or not 0 < layers <= _MAX_LAYERS:
        raise CheckpointError(
            f"{folder / 'config.json'}: num_hidden_layers is {shown(layers)}; 1 to {_MAX_LAYERS} are possible"
        )
    if is_roberta:
        state = _rename_roberta(state, layers, str(folder))
    return PretrainedEncoder(hf_config, state, tokenizer)


def read_tokenizer(folder: Path, source: Path) -> TextTokenizer:
    """The tokenizer in ``folder``. Raises ``CheckpointError``, which names ``source``, where it cannot be read."""
    try:
        return load_tokenizer(folder)
    except DataError as error:
        raise CheckpointError(f"{source}: its tokenizer cannot be read: {error}") from None


def encoder_keys(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a ``config.json`` without those of heads, training and file format."""
    return {key: value for key, value in hf_config.items() if key not in _HEAD_KEYS}


def _encoder_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of a bare encoder: without the model's prefix, heads, pooler, old names and buffers."""
    state: dict[str, Tensor] = {}
    prefixes = {name.partition(".")[0] for name in tensors if re.match(r"\w+\.embeddings\.", name)}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        bare = rest if first in prefixes else name
        for old, new in _OLD_NAMES.items():
            bare = bare.replace(old, new)
        if not _HEADS.fullmatch(bare) and not _BUFFERS.fullmatch(bare):
            state[bare] = tensor
    return state


def _rename_roberta(tensors: Mapping[str, Tensor], layers: int, source: str) -> dict[str, Tensor]:
    """Tensors of RoBERTa under the names of `RobertaEncoder`; what is not in the table keeps its own name."""
    rest, state = dict(tensors), {}
    for ours, theirs in parameter_names(layers):
        parts = [name.removeprefix("roberta.") for name in theirs]
        if ours.startswith("encoder.") and all(part in rest for part in parts):
            state[ours.removeprefix("encoder.")] = concatenate(rest, parts, source)
            for part in parts:
                del rest[part]
    return state | rest

"""A Hugging Face RoBERTa or XLM-R folder in memory: its weights under our names, its tokenizer, its configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from pretrain.config.load import job_from_mapping
from pretrain.language.config import LanguageJob
from pretrain.language.restore import Restored
from pretrain.models.build import build_model
from pretrain.models.config import RobertaConfig
from pretrain.models.hf_folder import read_config, read_json, read_tensor_file, read_tensors
from pretrain.models.hf_map import HEAD, HEAD_FILE, from_hf
from tokenizer.encode import TextTokenizer, load_tokenizer
from tokenizer.errors import CheckpointError

_LAYER = re.compile(r"roberta\.encoder\.layer\.(\d+)\.")
_SIZES = {
    "vocab_size": ("encoder.embeddings.word.weight", 0),
    "hidden_size": ("encoder.embeddings.word.weight", 1),
    "max_position_embeddings": ("encoder.embeddings.position.weight", 0),
    "intermediate_size": ("encoder.layers.0.ffn_in.weight", 0),
}
"""Key of ``config.json`` -> the tensor (our name) and the axis that have this size."""


@dataclass(frozen=True)
class HFModel:
    """What a folder holds. ``state`` is that of a :class:`CaptModel`, with an aggregation head where there was one."""

    state: dict[str, Tensor]
    config: RobertaConfig
    tokenizer: TextTokenizer

    @property
    def has_head(self) -> bool:
        """True where the folder has ``capt_head.safetensors``, as our own exports do."""
        return any(name.startswith(HEAD) for name in self.state)


def is_hf(folder: Path) -> bool:
    """True for a folder with a ``config.json``, which our checkpoints and runs do not have."""
    return (folder / "config.json").is_file()


def read_hf(folder: Path) -> HFModel:
    """Read ``folder`` without running or following anything in it, and without believing the sizes it claims.

    Raises:
        CheckpointError: ``folder`` is not a RoBERTa or XLM-R with its head, is damaged or hostile.
        DataError: its tokenizer cannot be read.
        ConfigError: tokenizer and model do not fit.
    """
    described = read_config(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            read_json(folder / name)
    tokenizer = load_tokenizer(folder)
    config = RobertaConfig.from_hf(described).for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    tensors = read_tensors(folder)
    layers = {match[1] for name in tensors if (match := _LAYER.match(name))}
    _require_sizes(described, {"num_hidden_layers": len(layers)}, folder)
    state = from_hf(tensors, config.layers, str(folder))
    _require_sizes(described, {key: _size(state[name], axis) for key, (name, axis) in _SIZES.items()}, folder)
    if (folder / HEAD_FILE).exists():
        state |= {HEAD + name: tensor for name, tensor in read_tensor_file(folder / HEAD_FILE).items()}
        with safe_open(folder / HEAD_FILE, framework="pt") as file:
            pooling = (file.metadata() or {}).get("pooling", "cls")
        if pooling not in ("cls", "mean"):
            raise CheckpointError(
                f"{folder / HEAD_FILE}: pooling is {pooling!r} in its metadata; cls or mean is possible"
            )
        config = config.model_copy(update={"pooling": pooling})
    return HFModel(state, config, tokenizer)


def load_hf(folder: Path) -> Restored:
    """The masked-language model in ``folder``, in evaluation mode; its windows are as long as its position table.

    It has an aggregation head only where ``capt_head.safetensors`` (our own exports) brings one: nothing is made up.

    Raises:
        UserError: as :func:`read_hf` does, or a tensor has the wrong shape.
    """
    found = read_hf(folder)
    model = build_model(found.state, found.config, str(folder))
    mapping = {
        "task": {"type": "capt_language"},
        "data": {"sequence_length": found.config.max_positions},
        "model": found.config.model_dump(mode="json", by_alias=True),
        "contrast": {"weight": float(found.has_head)},
    }
    job = job_from_mapping(mapping, str(folder))
    assert isinstance(job, LanguageJob)
    return Restored(folder, model, found.tokenizer, job)


def _require_sizes(described: Mapping[str, Any], sizes: Mapping[str, int], folder: Path) -> None:
    """A model is built only once the tensors are known to have its size: a number alone cannot ask for terabytes."""
    for key, size in sizes.items():
        if described[key] != size:
            raise CheckpointError(f"{folder / 'config.json'}: {key} is {described[key]!r}, but the tensors have {size}")


def _size(tensor: Tensor, axis: int) -> int:
    return tensor.shape[axis] if tensor.ndim == 2 else -1

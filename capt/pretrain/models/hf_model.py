"""Read an encoder of the registry from a Hugging Face folder or the hub: weights under our names, tokenizer, sizes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.architecture import EncoderConfig
from capt.pretrain.models.capt import CaptModel, load_weights
from capt.pretrain.models.heads import with_rows
from capt.pretrain.models.hf_config import list_names, local_folder
from capt.pretrain.models.hf_folder import open_tensors, read_description, read_tensor_file, read_tensors
from capt.pretrain.models.hf_map import HEAD, HEAD_FILE, MLM, TIED, from_hf, layers_in, with_prefix
from capt.pretrain.models.sentence_folder import encoder_folder
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HFModel:
    """Contents of a folder. ``state`` is that of a `CaptModel`, with an aggregation head where the folder has one."""

    state: dict[str, Tensor]
    config: EncoderConfig
    tokenizer: TextTokenizer

    @property
    def has_head(self) -> bool:
        """True where the folder has ``capt_head.safetensors``, as our own exports do."""
        return any(name.startswith(HEAD) for name in self.state)

    @property
    def has_mlm(self) -> bool:
        """False for a bare encoder, which brings no masked-language-model head."""
        return any(name.startswith(MLM) and name not in TIED for name in self.state)


def read_hf(folder: Path) -> HFModel:
    """Read ``folder``, or the hub model it names, running and following nothing in it and believing no size it claims.

    Raises:
        CheckpointError: no encoder that can be pretrained, damaged or hostile files, or the hub has no such model.
        DataError: its tokenizer cannot be read.
        ConfigError: tokenizer and model do not fit.
    """
    folder = encoder_folder(local_folder(folder))
    path = folder / "config.json"
    claimed, tokenizer = read_description(folder)
    config = claimed.for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    given = read_tensors(folder)
    tensors = with_prefix(given, config, str(folder))
    # Sizes go under the keys of config.json, for the messages.
    claims = claimed.to_hf(bos_id=tokenizer.special.bos, eos_id=tokenizer.special.eos)
    # First the number of layers, by which the table of names is made.
    if (layers := layers_in(tensors, config)) == 0:
        raise CheckpointError(
            f"{folder}: no tensor has the name of a layer of {config.hf.what}; rename them as transformers does, they "
            f"are {list_names(sorted(given))}"
        )
    if layers is not None:
        _require_sizes(claims, {"num_hidden_layers": layers}, path)
    state = from_hf(tensors, config, str(folder))
    _require_sizes(claims, {key: _size(state[name], axis) for key, (name, axis) in config.hf.sizes.items()}, path)
    _require_shapes(state, config, path)
    if (folder / HEAD_FILE).exists():
        state |= {HEAD + name: tensor for name, tensor in read_tensor_file(folder / HEAD_FILE).items()}
        with open_tensors(folder / HEAD_FILE) as file:
            pooling = (file.metadata() or {}).get("pooling", "cls")
        if pooling not in ("cls", "mean"):
            raise CheckpointError(
                f"{folder / HEAD_FILE}: pooling is {pooling!r} in its metadata; cls or mean is possible"
            )
        config = config.model_copy(update={"pooling": pooling})
    return HFModel(state, config, tokenizer)


def start_from(model: CaptModel, source: HFModel, name: str, *, head: Literal["random", "identity"] = "random") -> None:
    """Copy the weights of ``source``, read from ``name``, into ``model``; heads that it lacks stay freshly initialised.

    With ``head`` ``identity`` a language-model head that it lacks begins near the identity. The log says which. An
    aggregation head for which ``model`` has no place is left out.

    Raises:
        CheckpointError: a tensor has another shape.
    """
    own = model.state_dict()
    # An aggregation head stays behind where the model has none; an unknown tensor is kept, to be named.
    state = {key: tensor for key, tensor in source.state.items() if key in own or not key.startswith(HEAD)}
    for what, prefix, file in (
        ("masked-language-model", MLM, "no lm_head"),
        ("aggregation", HEAD, f"no {HEAD_FILE}"),
    ):
        if prefix == MLM and head == "identity" and not source.has_mlm:
            model.mlm.begin_near_identity()
        fresh = {key: tensor for key, tensor in own.items() if key.startswith(prefix) and key not in TIED}
        if fresh and not fresh.keys() & state.keys():
            begins = "starts from random weights"
            if prefix == MLM:
                near = "begins near the identity (mlm.head=identity)"
                begins = near if head == "identity" else f"{begins} (mlm.head=identity begins near the identity)"
            logger.warning("%s has %s: the %s head %s", name, file, what, begins)
            state |= fresh
    load_weights(model, with_rows(state, model.config.vocab_rows), name)


def _require_sizes(claims: Mapping[str, object], sizes: Mapping[str, int], path: Path) -> None:
    """Compare the sizes that ``config.json`` claims with those of the tensors, before a model is built.

    Otherwise a number alone could make this process ask for terabytes of memory.
    """
    for key, size in sizes.items():
        if claims[key] != size:
            raise CheckpointError(f"{path}: {key} is {claims[key]!r}, but the tensors have {size}")


def _require_shapes(state: Mapping[str, Tensor], config: EncoderConfig, path: Path) -> None:
    """Compare every shape with that of the model which ``config.json`` describes, of which no element is allocated."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in CaptModel(config, contrast=False).state_dict().items()}
    unequal = [
        f"{name} is {tuple(tensor.shape)}, not {tuple(shapes[name])}"
        for name, tensor in state.items()
        if name in shapes and tensor.shape != shapes[name]
    ]
    if unequal:
        raise CheckpointError(f"{path}: its tensors have other shapes: {list_names(unequal)}")


def _size(tensor: Tensor, axis: int) -> int:
    return tensor.shape[axis] if tensor.ndim == 2 else -1

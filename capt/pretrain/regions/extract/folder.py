"""A vision model from a Hugging Face folder that somebody else made, without running anything in it.

``config.json`` is read here, and the class is one of ours to choose (`families`); transformers gets keys and tensors,
and never the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from capt.pretrain.base.errors import CheckpointError, shown
from capt.pretrain.base.quiet import quiet_transformers
from capt.pretrain.base.verification import sha256 as sha256_of
from capt.pretrain.models.hf_config import list_names, local_folder
from capt.pretrain.models.hf_folder import read_json, read_tensors
from capt.pretrain.regions.extract.families import BACKBONES, Family, family_of

FILES = ("config.json", "preprocessor_config.json", "model.safetensors", "model-*-of-*.safetensors", "*.index.json")
"""The files that are read, as patterns of the hub client."""

_NOT_OURS = (
    "model_type", "transformers_weights", "fusion_config", "dtype", "torch_dtype", "_name_or_path",
    "return_dict", "output_hidden_states", "output_attentions",
)  # fmt: skip
"""Keys that say nothing about the architecture, some of which would make transformers open files, rewrite models, or
give its output in another form."""

_HEADS = ("pooler.", "head.")
"""Parts after the last hidden state, which may be missing."""


@dataclass(frozen=True)
class VisionModel:
    """A model that is ready to run, and what it was made of.

    Attributes:
        network: the model of transformers, in evaluation mode.
        config: its configuration object.
        family: how its output is read.
        folder: where it was read.
        weights: SHA-256 of ``model.safetensors``; of the names and digests of the shards where there are several.
        config_sha256: SHA-256 of ``config.json``.
    """

    network: nn.Module
    config: Any
    family: Family
    folder: Path
    weights: str
    config_sha256: str


def load_vision_model(source: Path, backend: str) -> VisionModel:
    """Read the model that ``backend`` runs.

    Raises:
        CheckpointError: the folder is missing, names code to run, holds no safetensors, is of another family, or its
            weights are not all there.
    """
    folder = local_folder(source, FILES)
    if not folder.is_dir():
        raise CheckpointError(f"{source}: no such folder; --model is a Hugging Face folder or a hub id")
    keys = read_json(folder / "config.json")
    family = family_of(backend, keys, folder / "config.json")
    keys, kind = _own_keys(keys, family, folder / "config.json")
    tensors = read_tensors(folder)
    # Only the vision part of a model of texts and pictures is read.
    if family.prefix and any(name.startswith(family.prefix) for name in tensors):
        tensors = {n.removeprefix(family.prefix): t for n, t in tensors.items() if n.startswith(family.prefix)}
    _refuse_more_layers(keys, len(tensors), folder / "config.json")
    network = _build(family, kind, keys, tensors, folder)
    config_sha256 = sha256_of(folder / "config.json")
    return VisionModel(network, network.config, family, folder, _digest(folder), config_sha256)


def _own_keys(keys: dict[str, Any], family: Family, path: Path) -> tuple[dict[str, Any], str]:
    """The keys of the vision model itself, and its ``model_type``."""
    kind = keys["model_type"]
    if family.part is not None:
        part = keys.get(family.part)
        if not isinstance(part, dict):
            raise CheckpointError(f"{path}: {family.part} is {shown(part)}; expected the keys of the vision model")
        keys, kind = part, family.part_type
    if keys.get("quantization_config") is not None:
        raise CheckpointError(f"{path}: quantization_config: quantized weights cannot be read here")
    if "ObjectDetection" in family.model:
        backbone = keys.get("backbone_config")
        name = backbone.get("model_type") if isinstance(backbone, dict) else keys.get("backbone")
        if not isinstance(backbone, dict) or name not in BACKBONES:
            raise CheckpointError(
                f"{path}: the backbone is {shown(name)} of another package (timm); one of {', '.join(BACKBONES)} under "
                "backbone_config is read, as in facebook/detr-resnet-50@no_timm"
            )
        # The backbone would otherwise be looked up, or fetched, by the name in its keys.
        clean = {key: value for key, value in backbone.items() if key not in _NOT_OURS[1:]}
        keys = {**keys, "backbone_config": clean, "backbone": None, "use_timm_backbone": False}
        keys |= {"use_pretrained_backbone": False, "backbone_kwargs": None}
    return {key: value for key, value in keys.items() if key not in _NOT_OURS}, kind


def _refuse_more_layers(keys: Mapping[str, Any], tensors: int, path: Path) -> None:
    """Refuse a number of layers that the weights cannot have, before they are made: a million take hours."""
    for key, value in keys.items():
        if isinstance(value, dict):
            _refuse_more_layers(value, tensors, path)
        elif key.endswith(("layers", "depths")):
            counts = [count for count in (value if isinstance(value, list) else [value]) if isinstance(count, int)]
            if sum(counts) > tensors:
                raise CheckpointError(f"{path}: {key} is {shown(value)}, and the weights have only {tensors} tensors")


def _build(family: Family, kind: str, keys: Mapping[str, Any], tensors: dict[str, Tensor], folder: Path) -> Any:
    import transformers

    model_class = getattr(transformers, family.model)
    with quiet_transformers():
        try:
            # No path is given: transformers opens no file of the folder.
            network, report = model_class.from_pretrained(
                *(None,),
                config=transformers.AutoConfig.for_model(kind, **keys),
                state_dict=tensors,
                output_loading_info=True,
                dtype=torch.float32,
                **dict(family.arguments),
            )
        except Exception as error:  # each of its classes raises what it likes for keys and shapes that it does not
            text = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{folder}: not a {family.model}: {text}") from None
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(_HEADS))
    if missing or report["mismatched_keys"]:
        wrong = missing or sorted(str(name) for name in report["mismatched_keys"])
        raise CheckpointError(f"{folder}: weights of {family.model} missing or of another shape: {list_names(wrong)}")
    return network.eval().requires_grad_(False)


def _digest(folder: Path) -> str:
    single = folder / "model.safetensors"
    if single.exists():  # of a folder that has both forms `read_tensors` reads this one
        return sha256_of(single)
    shards = sorted({*read_json(folder / "model.safetensors.index.json")["weight_map"].values()})
    return sha256("".join(f"{name} {sha256_of(folder / name)}\n" for name in shards).encode()).hexdigest()

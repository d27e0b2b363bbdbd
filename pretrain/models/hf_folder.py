"""Read a Hugging Face folder that somebody else wrote, without running or following anything in it.

``trust_remote_code=False`` was no boundary in several releases (CVE-2026-4372, CVE-2026-5241), and shard names and
FIFOs in a folder were (CVE-2026-69112). So ``config.json`` is read here and never handed to ``transformers``; only
safetensors are opened; only regular files with plain names inside the folder are read.
"""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tokenizer.errors import CheckpointError

_MAX_JSON_BYTES = 4_000_000
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*\.safetensors")

TO_SAFETENSORS = (
    'python -c "import torch, safetensors.torch as s; s.save_file({k: v.clone().contiguous() for k, v in '
    "torch.load('FILE', weights_only=True).items()}, 'model.safetensors')\""
)
"""The command that turns a pickle of tensors, and of nothing else, into safetensors: every tensor under its name."""

_RUNS_CODE = re.compile(r"auto_map|trust_remote_code|custom_(pipelines|generate)|_?(attn|experts)_implementation.*")
"""Keys through which a configuration names code to import, a kernel to download, or a wish to be trusted."""

_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("roberta", "xlm-roberta"),
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "tie_word_embeddings": (True, None),
    "quantization_config": (None,),
    "pruned_heads": ({}, None),
}
"""Values that decide the architecture. Any other value is another model, which our encoder would compute wrongly."""


def read_config(folder: Path) -> dict[str, Any]:
    """The keys of ``folder/config.json``, of a RoBERTa or XLM-R encoder and nothing else.

    Raises:
        CheckpointError: the file is missing, not plain JSON, names code to run, or describes another architecture.
    """
    path = folder / "config.json"
    config = read_json(path)
    for key, allowed in _FIXED.items():
        if key in config and config[key] not in allowed:
            expected = " or ".join(repr(value) for value in allowed)
            raise CheckpointError(f"{path}: {key} is {config[key]!r}; a RoBERTa or XLM-R encoder has {expected}")
    if "model_type" not in config:
        raise CheckpointError(f"{path}: model_type is missing; expected 'roberta' or 'xlm-roberta'")
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a regular file of a sane size.

    Raises:
        CheckpointError: the file is missing, not such a file, or a key in it names code to run.
    """
    _require_regular(path)
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {path.stat().st_size} bytes; such a file is at most {_MAX_JSON_BYTES}")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    _refuse_code(value, path, "")
    return value


def _refuse_code(value: Any, path: Path, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if _RUNS_CODE.fullmatch(key):
                raise CheckpointError(
                    f"{path}: key {where + key!r} names code to run or to fetch; this is refused, remove the key"
                )
            _refuse_code(inner, path, f"{where}{key}.")
    elif isinstance(value, list):
        for item in value:
            _refuse_code(item, path, where)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names.

    Raises:
        CheckpointError: no safetensors (pickles are never opened), a shard that is not a regular file of this folder,
            a damaged file, or an index that disagrees with its shards.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_tensor_file(folder / "model.safetensors")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise CheckpointError(
                f"{index}: weight_map[{key!r}] is {name!r}; a shard is a plain *.safetensors file name"
            )
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        tensors.update(read_tensor_file(folder / name))
    if tensors.keys() != weight_map.keys():
        odd = sorted(tensors.keys() ^ weight_map.keys())
        raise CheckpointError(f"{index}: the index and its shards name different tensors: {', '.join(odd[:10])}")
    return tensors


def read_tensor_file(path: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file. Raises ``CheckpointError`` as :func:`read_tensors` does."""
    pickles = sorted(p.name for p in path.parent.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    if not path.exists() and pickles:
        raise CheckpointError(
            f"{path.parent}: holds no {path.name} but {pickles[0]}, a pickle, which could run code when it is opened; "
            f"in that folder: {TO_SAFETENSORS.replace('FILE', pickles[0])}"
        )
    _require_regular(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from None


def _require_regular(path: Path) -> None:
    """Refuse FIFOs, devices and links, but for the links into ``blobs/`` that make up a hub cache's snapshot folder."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a Hugging Face folder needs it") from None
    if stat.S_ISLNK(mode):
        target, cache = path.resolve(), path.parent.absolute().parent
        if cache.name != "snapshots" or target.parent != cache.parent.resolve() / "blobs":
            raise CheckpointError(f"{path}: is a link out of the folder; copy the file it means into the folder")
        mode = target.stat().st_mode if target.exists() else 0
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: is not a regular file")

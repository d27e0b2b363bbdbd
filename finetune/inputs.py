"""A look at what every fine-tuning job starts from, without torch: for dry runs and ``capt config validate``."""

from __future__ import annotations

from pathlib import Path

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.foreign.families import read_description
from capt.pretrain.models.hf_config import hub_id
from capt.pretrain.models.hf_folder import is_hf

_MARKS = ("config.json", "manifest.json", "checkpoints")
"""One of these lies in a Hugging Face folder, in a checkpoint and in a run."""


def describe_initial_model(init: Path) -> str:
    """Where the model of ``model.init`` comes from, in one line; no tensor is read.

    Raises:
        CheckpointError: ``model.init`` is neither a run or checkpoint of ours nor a Hugging Face folder, or its encoder
            or tokenizer is one that the job would refuse.
    """
    if hub_id(init) is not None:
        return f"the hub's model {init}, fetched at the start"
    if not init.is_dir():
        raise CheckpointError(f"model.init: no folder {init}; name a run, a checkpoint or a Hugging Face folder")
    if is_hf(init):
        read_description(init)
        if not any((init / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
            raise CheckpointError(f"model.init {init}: no model.safetensors")
    if not any((init / mark).exists() for mark in _MARKS):
        raise CheckpointError(f"model.init {init}: neither a run or checkpoint of ours nor a Hugging Face folder")
    return str(init)

"""Folders that transformers wrote and somebody changed: both readers refuse what would be another model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.foreign.encoder import read_encoder
from capt.pretrain.models.hf_model import read_hf
from tests.finetune import write_encoder

_READERS = [read_hf, read_encoder]


def _change(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in change(load_file(path)).items()}, path)


def _old_names_beside(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {
        name.replace("Norm.weight", "Norm.gamma"): 2 * x for name, x in state.items() if "Norm.weight" in name
    }


@pytest.mark.parametrize("read", _READERS)
def test_two_names_of_one_tensor_are_not_chosen_from(read: Callable[[Path], object], tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "BertForMaskedLM")
    _change(folder, _old_names_beside)
    with pytest.raises(CheckpointError, match=r"LayerNorm.(weight|gamma), .* two names of one tensor, with different"):
        read(folder)
    _change(folder, lambda state: {name: x / 2 if "gamma" in name else x for name, x in state.items()})
    read(folder)


@pytest.mark.parametrize("read", _READERS)
def test_ids_without_rows_and_another_padding_are_the_folder_s(read: Callable[[Path], object], tmp_path: Path) -> None:
    """No key of the job would mend them."""
    few = write_encoder(tmp_path / "few", "BertForMaskedLM", vocab_size=9)
    with pytest.raises(CheckpointError, match=r"few: its tokenizer has \d+ ids, and the model 9 rows .*none for '"):
        read(few)
    pads = write_encoder(tmp_path / "pads", "BertForMaskedLM", pad_token_id=3)
    with pytest.raises(CheckpointError, match="pads: the model pads with 3, its tokenizer with 0"):
        read(pads)
    read(write_encoder(tmp_path / "padded", "BertForMaskedLM", vocab_size=512))


def test_a_table_of_positions_that_is_none_is_named(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "BertForMaskedLM")
    name = "bert.embeddings.position_embeddings.weight"
    _change(folder, lambda state: state | {name: torch.ones(5)})
    with pytest.raises(CheckpointError, match=r"position.weight is \(5,\), not \(65, 32\)"):
        read_hf(folder)

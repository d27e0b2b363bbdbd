"""Folders that ``safetensors.torch.save_model`` wrote, or another tool: a tied tensor under either of its names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from capt.finetune.load import load_backbone
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.foreign.families import FAMILIES
from tests.unit.convert.models import tokenizer

SIZES = {
    "hidden_size": 12, "dim": 12, "embedding_size": 12, "num_hidden_layers": 1, "n_layers": 1, "intermediate_size": 16,
    "hidden_dim": 16, "num_attention_heads": 2, "n_heads": 2, "max_position_embeddings": 40,
}  # fmt: skip


def _write(family: str, folder: Path) -> Any:
    used = tokenizer()
    config = transformers.AutoConfig.for_model(family)
    for key, value in SIZES.items():
        if hasattr(config, key):
            setattr(config, key, value)
    config.vocab_size, config.pad_token_id = used.vocab_size, used.special.pad
    if family in ("roberta", "xlm-roberta"):
        config.type_vocab_size, config.layer_norm_eps = 1, 1e-5
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    model.save_pretrained(folder)
    used.save(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_tensor_is_read_under_either_name(family: str, tmp_path: Path) -> None:
    model = _write(family, tmp_path)
    whole = load_backbone(tmp_path).encoder.state_dict()
    ties = {second: first for second, first in model._tied_weights_keys.items()}
    assert any(first.endswith("word_embeddings.weight") for first in ties.values())
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {next((second for second, first in ties.items() if first == name), name): x for name, x in stored.items()}
    assert renamed.keys() != stored.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    found = load_backbone(tmp_path).encoder.state_dict()
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_an_untied_matrix_is_no_word_embedding(tmp_path: Path) -> None:
    """The refusal does not advise to train on random weights."""
    _write("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    stored = load_file(tmp_path / "model.safetensors")
    stored["cls.predictions.decoder.weight"] = stored.pop("bert.embeddings.word_embeddings.weight")
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: embeddings\.word_embeddings\.weight") as raised:
        load_backbone(tmp_path)
    assert "allow_missing" not in str(raised.value)

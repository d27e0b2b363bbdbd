"""Weights that were read somewhere go into a model whole, or every misfit is named."""

from __future__ import annotations

import pytest
import torch

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.capt import build_model, load_weights
from capt.pretrain.models.hf_map import HEAD, from_hf, to_hf
from tests.unit.models.support import small_config, small_model

WORD = "encoder.embeddings.word.weight"


def test_through_hugging_face_and_back() -> None:
    source = small_model()
    there = to_hf(source.state_dict(), small_config())
    head = {name: tensor for name, tensor in source.state_dict().items() if name.startswith(HEAD)}
    target = build_model(from_hf(there, small_config()) | head, small_config(), "a folder")
    assert not target.training
    assert target.mlm.weight is target.encoder.embeddings.word.weight
    for name, tensor in source.state_dict().items():
        torch.testing.assert_close(target.state_dict()[name], tensor.float(), rtol=0, atol=0)
    assert build_model(from_hf(there, small_config()), small_config(), "a folder").aggregation is None


def test_every_misfit_is_named() -> None:
    state = dict(small_model().state_dict())
    del state["aggregation.outer.bias"]
    state["temperature"] = torch.zeros(1)
    state[WORD] = state[WORD][:-1]
    with pytest.raises(CheckpointError) as caught:
        load_weights(small_model(), state, "a folder")
    for part in (
        "a folder: not the weights of this model",
        "aggregation.outer.bias is missing",
        "temperature is unknown",
        f"{WORD} has shape (96, 32), not (97, 32)",
        f"mlm.weight differs from {WORD}",
    ):
        assert part in str(caught.value)

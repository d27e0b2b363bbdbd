"""Weights that were read somewhere go into a model whole, or every misfit is named."""

from __future__ import annotations

import pytest
import torch

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.capt import load_weights
from tests.unit.models.support import small_model

WORD = "encoder.embeddings.word.weight"


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

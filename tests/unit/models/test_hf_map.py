from __future__ import annotations

import pytest
import torch

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.hf_map import HEAD, TIED, from_hf, to_hf
from tests.unit.models.support import small_config, small_model

WORD, DECODER = "roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"
CONFIG = small_config()


def test_table_covers_the_model() -> None:
    model = small_model()
    table = list(model.config.hf_names())
    state = [name for name in model.state_dict() if not name.startswith(HEAD)]
    assert len(table) == len(set(table))
    assert set(table) | TIED == set(state)
    theirs = [name for parts in model.config.hf_names().values() for name in parts]
    assert len(theirs) == len(set(theirs))


def test_round_trip_is_lossless() -> None:
    state = small_model().state_dict()
    there = to_hf(state, CONFIG)
    assert DECODER not in there
    back = from_hf(there, CONFIG)
    assert back.keys() == {name for name in state if not name.startswith(HEAD)}
    assert all(torch.equal(back[name], state[name]) for name in back)
    pointers = {tensor.data_ptr() for tensor in there.values()}
    assert len(pointers) == len(there), "safetensors refuses shared memory"


def test_equal_ties_and_unused_tensors_are_accepted() -> None:
    there = to_hf(small_model().state_dict(), CONFIG)
    there[DECODER] = there[WORD].clone()
    there["lm_head.decoder.bias"] = there["lm_head.bias"].clone()
    there["roberta.embeddings.position_ids"] = torch.arange(5)
    there["roberta.pooler.dense.weight"] = torch.zeros(2, 2)
    assert from_hf(there, CONFIG).keys() == from_hf(to_hf(small_model().state_dict(), CONFIG), CONFIG).keys()


def test_broken_ties_are_refused() -> None:
    there = to_hf(small_model().state_dict(), CONFIG)
    there[DECODER] = there[WORD] + 1
    with pytest.raises(CheckpointError, match=r"folder: lm_head\.decoder\.weight differs from roberta\.embeddings"):
        from_hf(there, CONFIG, "folder")
    state = small_model().state_dict()
    state["mlm.weight"] = state["mlm.weight"] + 1
    with pytest.raises(CheckpointError, match=r"mlm\.weight differs"):
        to_hf(state, CONFIG)


def test_missing_and_unexpected_tensors_are_named() -> None:
    there = to_hf(small_model().state_dict(), CONFIG)
    del there["lm_head.bias"]
    there["extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.bias; unexpected: extra"):
        from_hf(there, CONFIG)
    with pytest.raises(CheckpointError, match=r"unexpected: roberta\..* and 11 more"):
        from_hf(to_hf(small_model().state_dict(), CONFIG), small_config(layers=1))
    with pytest.raises(CheckpointError, match="unexpected: temperature"):
        to_hf({**small_model().state_dict(), "temperature": torch.zeros(1)}, CONFIG)

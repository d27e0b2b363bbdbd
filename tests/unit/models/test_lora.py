"""Adapters of our encoders and of transformers': they begin at nothing, are all that learns, and merge exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.lora import LoraSection
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.encoder import load_encoder, read_encoder
from capt.pretrain.models.foreign.families import FAMILIES
from tests.finetune import write_encoder

pytest.importorskip("peft", reason="peft (the extra lora) is not installed")

CLASSES: dict[str, dict[str, Any]] = {
    "RobertaModel": {}, "ModernBertModel": {}, "BertModel": {}, "MPNetModel": {}, "CamembertModel": {},
    "ElectraModel": {"embedding_size": 16}, "DistilBertModel": {}, "AlbertModel": {"embedding_size": 16},
    "DebertaV2Model": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
}  # fmt: skip
TOKENS = torch.tensor([[2, 7, 9, 11, 6, 8, 3], [2, 10, 12, 6, 9, 3, 3]])


def _encoder(folder: Path, cls: str) -> Encoder:
    write_encoder(folder, cls, **CLASSES[cls])
    return load_encoder(read_encoder(folder), str(folder), dropout=0.0, attention_dropout=0.0)


def _read(encoder: Encoder) -> Tensor:
    hidden: Tensor = encoder(TOKENS)
    return hidden


def test_every_family_is_looked_at() -> None:
    kinds = {cls.removesuffix("Model").lower().replace("debertav2", "deberta-v2") for cls in CLASSES}
    assert kinds == {*FAMILIES, "roberta", "modernbert"}


@pytest.mark.parametrize("cls", CLASSES)
def test_an_adapter_is_merged_as_its_equation_says(cls: str, tmp_path: Path) -> None:
    from capt.pretrain.models.lora import add_lora, merge_lora, merged_weights

    encoder = _encoder(tmp_path, cls)
    plain, before = _read(encoder), {name: p.clone() for name, p in encoder.named_parameters()}
    section = LoraSection(rank=3, alpha=5.0)
    add_lora(encoder, section)
    assert torch.equal(_read(encoder), plain), "B is 0"
    adapters = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
    assert adapters
    assert all(".lora_" in name for name in adapters)
    with torch.no_grad():
        for p in adapters.values():
            p.normal_(0, 0.3)
    _read(encoder).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in adapters.values())
    assert all(p.grad is None for name, p in encoder.named_parameters() if name not in adapters)
    trained, state = _read(encoder), {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    merge_lora(encoder)
    after = dict(encoder.named_parameters())
    assert after.keys() == before.keys(), "no adapter is left"
    for name, weight in before.items():
        own = name.removesuffix(".weight")
        if (a := state.get(f"{own}.lora_A.default.weight")) is not None:
            b = state[f"{own}.lora_B.default.weight"]
            weight = (weight.double() + 5.0 / 3 * b.double() @ a.double()).float()
            assert not torch.equal(weight, before[name])
        torch.testing.assert_close(after[name], weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(_read(encoder), trained, rtol=1e-5, atol=1e-5)
    assert (trained - plain).abs().max() > 1e-2
    read = merged_weights(state, section)
    for name, weight in after.items():
        torch.testing.assert_close(read[name], weight, rtol=1e-5, atol=1e-6)


def test_targets_are_chosen_by_name_and_refused_where_there_are_none(tmp_path: Path) -> None:
    from capt.pretrain.models.lora import add_lora

    encoder = _encoder(tmp_path, "RobertaModel")
    with pytest.raises(ConfigError, match=r"called value; there are ffn_in, ffn_out, key_value, output, query"):
        add_lora(encoder, LoraSection(targets=["query", "value"]))
    with pytest.raises(ConfigError, match=r"model\.lora\.targets: .* no linear layer inside numbered layers"):
        add_lora(torch.nn.Linear(2, 2), LoraSection())
    with pytest.raises(ConfigError, match=r"model\.lora\.rank 33: a matrix of this encoder has a rank of 32 at most"):
        add_lora(encoder, LoraSection(rank=33))
    add_lora(encoder, LoraSection(targets=["query"]))
    adapters = [name for name, p in encoder.named_parameters() if p.requires_grad]
    assert len(adapters) == 4
    assert all(".query." in name for name in adapters)

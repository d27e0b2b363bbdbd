"""Our RoBERTa against transformers': outputs, loss, gradients and files, in both directions."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import RobertaConfig as HFConfig
from transformers import RobertaForMaskedLM, XLMRobertaForMaskedLM

from capt.pretrain.models.capt import CaptModel, load_weights
from capt.pretrain.models.config import RobertaConfig
from capt.pretrain.models.heads import take_rows
from capt.pretrain.models.hf_map import HEAD, from_hf, to_hf
from tests.unit.models.support import assert_same, batch, small_model


@pytest.fixture(scope="module")
def theirs() -> RobertaForMaskedLM:
    torch.manual_seed(1)
    config = HFConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=72,
        max_position_embeddings=15, type_vocab_size=1, layer_norm_eps=1e-5,
    )  # fmt: skip
    model = RobertaForMaskedLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def _ours(theirs: RobertaForMaskedLM) -> CaptModel:
    hf = theirs.config.to_dict()
    config = RobertaConfig.from_hf(hf)
    model = CaptModel(config)
    own_head = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(HEAD)}
    load_weights(model, own_head | from_hf(theirs.state_dict(), config), "theirs")
    return model.eval()


@pytest.mark.parametrize("padded", [False, True])
def test_logits_of_their_weights(theirs: RobertaForMaskedLM, padded: bool) -> None:
    ours = _ours(theirs)
    tokens, *_ = batch(padded=padded)
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=tokens != 1).logits
        logits = ours.mlm.logits(ours.encode(tokens, padded))
    real = tokens != 1
    torch.testing.assert_close(logits[real], expected[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # at padding as well


@pytest.mark.parametrize("padded", [False, True])
def test_loss_and_gradients(theirs: RobertaForMaskedLM, padded: bool) -> None:
    ours = _ours(theirs)
    tokens, corrupted, positions, labels = batch(padded=padded)
    everywhere = torch.full_like(tokens, -100).scatter(1, positions[:, :-1], labels[:, :-1])
    for i, (position, label) in enumerate(zip(positions[:, -1].tolist(), labels[:, -1].tolist(), strict=True)):
        if label != -100:
            everywhere[i, position] = label
    theirs, ours = copy.deepcopy(theirs).double(), ours.double()
    reference = theirs(input_ids=corrupted, attention_mask=corrupted != 1, labels=everywhere)
    reference.loss.backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}

    out = ours(tokens, corrupted, positions, labels, padded=padded)
    loss = out.mlm_loss_sum / out.mlm_count
    loss.backward()
    torch.testing.assert_close(loss, reference.loss, rtol=1e-12, atol=0)
    mine = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert_same(to_hf(mine, ours.config), expected, 1e-9)


@pytest.mark.parametrize("cls", [RobertaForMaskedLM, XLMRobertaForMaskedLM])
def test_our_weights_in_their_class(tmp_path: Path, cls: type[RobertaForMaskedLM]) -> None:
    ours = small_model(dtype=torch.float32).eval()
    hf = ours.config.to_hf(bos_id=0, eos_id=2)
    if cls is XLMRobertaForMaskedLM:
        hf |= {"model_type": "xlm-roberta", "architectures": [cls.__name__]}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    save_file(to_hf(ours.state_dict(), ours.config), tmp_path / "model.safetensors", {"format": "pt"})
    loaded, report = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.lm_head.decoder.weight is loaded.roberta.embeddings.word_embeddings.weight
    tokens, *_ = batch(padded=True)
    with torch.no_grad():
        expected = loaded.eval()(input_ids=tokens, attention_mask=(tokens != 1).long()).logits
        logits = ours.mlm.logits(ours.encode(tokens, True))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_saved_by_them_and_read_by_us(theirs: RobertaForMaskedLM, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    theirs.save_pretrained(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    config = RobertaConfig.from_hf(hf)
    state = from_hf(load_file(tmp_path / "model.safetensors"), config)
    model = CaptModel(config)
    model.load_state_dict(state, strict=False)
    tokens, *_ = batch()
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval().mlm.logits(model.encode(tokens, False)), theirs(input_ids=tokens).logits, rtol=1e-5, atol=1e-5
        )


def test_configuration_is_read_back_by_them() -> None:
    ours = RobertaConfig(size="base", vocab_size=50_265)
    config = HFConfig(**ours.to_hf(bos_id=0, eos_id=2))
    stock = {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1,
        "bos_token_id": 0, "eos_token_id": 2, "vocab_size": 50_265, "hidden_act": "gelu",
    }  # fmt: skip
    assert {key: getattr(config, key) for key in stock} == stock


def test_masked_rows_alone_have_their_logits(theirs: RobertaForMaskedLM) -> None:
    ours = _ours(theirs)
    _, corrupted, positions, _ = batch()
    with torch.no_grad():
        hidden: Tensor = ours.encoder(corrupted, rows=positions)
        expected = take_rows(theirs(input_ids=corrupted).logits, positions)
    torch.testing.assert_close(ours.mlm.logits(hidden), expected, rtol=1e-5, atol=1e-5)

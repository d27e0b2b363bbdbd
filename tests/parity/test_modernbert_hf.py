"""Our ModernBERT against transformers': outputs, loss, gradients, files and configurations, in both directions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    ModernBertConfig as HFConfig,
)
from transformers import ModernBertForMaskedLM, ModernBertForSequenceClassification, ModernBertModel

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.convert.huggingface import encoder_tensors
from capt.pretrain.language.load import load_backbone
from capt.pretrain.models.capt import CaptModel, load_weights
from capt.pretrain.models.hf_folder import read_config
from capt.pretrain.models.hf_map import HEAD, from_hf, to_hf
from capt.pretrain.models.hf_model import read_hf
from capt.pretrain.models.modernbert.config import ModernBertConfig
from tests.finetune import write_encoder
from tests.unit.models.support import assert_same

PAD, VOCABULARY = 1, 97
_IDS = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}


def _theirs(seed: int, **keys: Any) -> ModernBertForMaskedLM:
    """A model of random sizes: heads, windows, kinds of layers and bases of both positions."""
    draw = random.Random(seed)
    heads, layers = draw.choice([1, 2, 4]), draw.randint(1, 6)
    torch.manual_seed(seed)
    config = HFConfig(
        vocab_size=VOCABULARY, hidden_size=heads * draw.choice([4, 6, 10]), intermediate_size=draw.choice([20, 31]),
        num_hidden_layers=layers, num_attention_heads=heads, local_attention=draw.choice([2, 3, 4, 8, 16, 128]),
        max_position_embeddings=64, global_attn_every_n_layers=draw.choice([1, 2, 3, layers]),
        global_rope_theta=draw.choice([500.0, 160_000.0]), local_rope_theta=draw.choice([100.0, 10_000.0]),
        **_IDS, **keys,
    )  # fmt: skip
    model = ModernBertForMaskedLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def _ours(theirs: ModernBertForMaskedLM) -> CaptModel:
    config = ModernBertConfig.from_hf(theirs.config.to_dict())
    model = CaptModel(config)
    own_head = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(HEAD)}
    load_weights(model, own_head | from_hf(theirs.state_dict(), config), "theirs")
    return model.eval()


def _tokens(seed: int, side: str) -> Tensor:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    length = draw.choice([2, 3, 5, 9, 17, 33, 60])
    tokens = torch.randint(5, VOCABULARY, (5, length), generator=generator)
    for row in tokens[1:]:
        missing = draw.randint(0, length - 1) if side != "none" else 0
        row[length - missing :] = PAD
        row.copy_(row.roll(missing if side == "left" else 0))
    return tokens


@pytest.mark.parametrize("seed", range(12))
def test_logits_both_ways(seed: int, tmp_path: Path) -> None:
    """Their weights in our model, and that model's export in their class; every kind of padding."""
    theirs = _theirs(seed)
    ours = _ours(theirs)
    (tmp_path / "config.json").write_text(json.dumps(ours.config.to_hf(bos_id=0, eos_id=2)))
    from safetensors.torch import save_file

    save_file(to_hf(ours.state_dict(), ours.config), tmp_path / "model.safetensors", {"format": "pt"})
    loaded, report = ModernBertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.decoder.weight is loaded.model.embeddings.tok_embeddings.weight
    for side in ("none", "right", "left"):
        tokens = _tokens(seed, side)
        real = tokens != PAD
        with torch.no_grad():
            logits = ours.mlm.logits(ours.encode(tokens, side != "none")[real])
            for other in (theirs, loaded.eval()):
                expected = other(input_ids=tokens, attention_mask=real.long()).logits[real]
                torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_twenty_steps_are_theirs() -> None:
    """Masked-language modelling on mixed lengths under one AdamW: the losses, and the gradients of the first step."""
    theirs = _theirs(3).train()
    ours = _ours(theirs).train()
    mine = [p for name, p in ours.named_parameters() if not name.startswith(HEAD)]
    optimizers = [torch.optim.AdamW(parameters, lr=3e-3) for parameters in (mine, theirs.parameters())]
    for step in range(20):
        tokens = _tokens(step % 5, "right")
        generator = torch.Generator().manual_seed(step)
        chosen = (torch.rand(tokens.shape, generator=generator) < 0.3) & (tokens != PAD)
        chosen[:, 0] = True
        corrupted, labels = tokens.masked_fill(chosen, 4), tokens.masked_fill(~chosen, -100)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        hidden = ours.encoder(corrupted, padded=True, rows=positions)
        out = ours.mlm(hidden, labels)
        loss = out.loss_sum / out.masked
        reference = theirs(input_ids=corrupted, attention_mask=(tokens != PAD).long(), labels=labels).loss
        torch.testing.assert_close(loss, reference, rtol=2e-5, atol=1e-5)
        for value, optimizer in zip((loss, reference), optimizers, strict=True):
            optimizer.zero_grad()
            value.backward()
        if step == 0:
            grads = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
            assert_same(to_hf(grads, ours.config), {n: p.grad for n, p in theirs.named_parameters()}, 2e-4)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("cls", [ModernBertForMaskedLM, ModernBertModel, ModernBertForSequenceClassification])
def test_folders_of_every_class_are_read(tmp_path: Path, cls: Any) -> None:
    """By pretraining (but for the classifier, whose head is not a language model's) and by fine-tuning."""
    write_encoder(tmp_path, cls.__name__, local_attention=4, **{**_IDS, "pad_token_id": 0, "bos_token_id": 2})
    theirs = cls.from_pretrained(tmp_path).eval()
    tokens = torch.randint(5, 60, (3, 12))
    tokens[1, 7:] = 0
    real = tokens != 0
    with torch.no_grad():
        expected = theirs.base_model(input_ids=tokens, attention_mask=real.long()).last_hidden_state[real]
        backbone = load_backbone(tmp_path)
        found = backbone.encoder.eval()(tokens, padded=True)[real]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        back = encoder_tensors(backbone.encoder, backbone.hf_config)
        assert back.keys() == dict(theirs.base_model.named_parameters()).keys()
        if cls is ModernBertForSequenceClassification:
            return
        source = read_hf(tmp_path)
        assert source.has_mlm == (cls is ModernBertForMaskedLM)


def _keys(**changes: Any) -> dict[str, Any]:
    return {
        **_theirs(0).config.to_dict(),
        "num_hidden_layers": 5,
        "layer_types": None,
        "rope_parameters": None,
    } | changes


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ({}, (3, 160_000.0, 10_000.0)),
        ({"global_attn_every_n_layers": 2, "global_rope_theta": 80_000, "local_rope_theta": 5e3}, (2, 80_000.0, 5e3)),
        ({"global_rope_theta": 80_000.0, "local_rope_theta": None}, (3, 80_000.0, 80_000.0)),
        ({"layer_types": [FULL, SLIDING, FULL, SLIDING, FULL]}, (2, 160_000.0, 10_000.0)),
        ({"layer_types": [FULL] * 5}, (1, 160_000.0, 10_000.0)),
        ({"layer_types": [FULL, *[SLIDING] * 4]}, (5, 160_000.0, 10_000.0)),
        ({"layer_types": [FULL, *[SLIDING] * 4], "global_attn_every_n_layers": 9}, (9, 160_000.0, 10_000.0)),
        (
            {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 7e4}}, "global_rope_theta": 1.0},
            (3, 7e4, 10_000.0),
        ),
    ],
)  # fmt: skip
def test_both_generations_of_keys_are_read(keys: dict[str, Any], fields: tuple[int, float, float]) -> None:
    base = _keys()
    for key in ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"):
        base.pop(key, None)
    config = ModernBertConfig.from_hf(base | keys)
    assert (config.global_every, config.global_rope_theta, config.local_rope_theta) == fields
    written = config.to_hf(bos_id=0, eos_id=2)
    assert ModernBertConfig.from_hf(written) == config
    theirs = HFConfig(**written)
    assert theirs.layer_types == written["layer_types"]
    assert {kind: rope["rope_theta"] for kind, rope in theirs.rope_parameters.items()} == {
        FULL: fields[1], SLIDING: fields[2],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'; a ModernBERT encoder has 'gelu'"),
        ({"norm_bias": True}, "norm_bias is True; a ModernBERT encoder has False or None"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"classifier_bias": True}, "classifier_bias is True"),
        ({"decoder_bias": False}, "decoder_bias is False"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling is {'type': 'linear'}"),
        ({"layer_types": [SLIDING] * 5}, "layer_types is ['sliding_attention'"),
        ({"layer_types": [FULL] * 4}, "layer_types is ['full_attention'"),
        ({"layer_types": 3}, "layer_types is 3"),
        ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0}}}, "rope_parameters.full_attention is"),
        ({"rope_parameters": {"rope_theta": 3.0}}, "rope_parameters is"),
        ({"rope_parameters": {SLIDING: {"rope_theta": "x"}}}, "rope_parameters.sliding_attention.rope_theta is 'x'"),
        ({"global_rope_theta": -1}, "global_rope_theta is -1"),
        ({"local_attention": 0}, "local_attention is 0"),
        ({"hidden_size": "8"}, "hidden_size is '8'"),
        ({"num_attention_heads": 3, "hidden_size": 16}, "heads 3 does not divide hidden 16"),
    ],
)
def test_odd_configurations_are_refused_by_name(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_keys(global_attn_every_n_layers=3) | keys))
    with pytest.raises(CheckpointError) as error:
        ModernBertConfig.from_hf(read_config(tmp_path), str(path))
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)

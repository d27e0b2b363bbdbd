"""CAPT's model on encoders of other families: the protocol holds, losses and gradients are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.models.capt import CaptModel
from capt.pretrain.models.config import RobertaConfig
from capt.pretrain.models.foreign.encoder import build_encoder, load_encoder, read_encoder
from capt.pretrain.models.foreign.families import FAMILIES
from capt.pretrain.models.heads import take_rows
from tests.finetune import write_encoder
from tests.language import language_mapping

FAMILY_CLASSES: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "MPNetModel": {},
    "DebertaV2Model": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    "RobertaModel": {},
}
TOKENS = torch.tensor([[2, 7, 9, 11, 6, 8, 3], [2, 10, 12, 6, 9, 3, 3], [2, 13, 5, 9, 8, 7, 3]])
CORRUPTED = TOKENS.masked_fill(torch.arange(7) % 3 == 1, 4)
POSITIONS = torch.tensor([[1, 4]] * 3)
LABELS = TOKENS.gather(1, POSITIONS)


def _model(folder: Path, cls: str, pooling: str = "cls", **changes: Any) -> tuple[CaptModel, Any]:
    """Our model on the encoder of a folder that transformers wrote, and transformers' own; without dropout."""
    write_encoder(folder, cls, **FAMILY_CLASSES.get(cls, {}), **changes)
    encoder = load_encoder(read_encoder(folder), str(folder), dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(3)
    model = CaptModel(
        RobertaConfig(size="custom", layers=2, hidden=32, heads=2, ffn=48, pooling=pooling), True, encoder
    )
    return model, transformers.AutoModel.from_pretrained(folder).eval()


def _padded(tokens: Tensor, pad: int) -> Tensor:
    tokens = tokens.clone()
    tokens[1, 5:] = pad
    return tokens


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("cls", FAMILY_CLASSES)
def test_losses_are_those_of_transformers_hidden_states(cls: str, pooling: str, padded: bool, tmp_path: Path) -> None:
    model, theirs = _model(tmp_path, cls, pooling)
    pad = model.encoder.pad_id
    tokens, corrupted = (_padded(x, pad) if padded else x for x in (TOKENS, CORRUPTED))
    out = model.train()(tokens, corrupted, POSITIONS, LABELS, padded=padded)
    assert out.s is not None
    assert out.s_hat is not None
    (out.mlm_loss_sum + (out.s @ out.s_hat.T).logsumexp(0).sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
    moved = [name for name, p in model.encoder.named_parameters() if p.grad is not None and bool(p.grad.any())]
    assert any(".1." in name for name in moved), "the last layer learns"
    assert any("word" in name for name in moved), "so does the embedding"

    with torch.no_grad():
        hidden = [theirs(input_ids=x, attention_mask=(x != pad).long()).last_hidden_state for x in (tokens, corrupted)]
        real = [(x != pad).unsqueeze(-1) for x in (tokens, corrupted)]
        pools = [h[:, 0] if pooling == "cls" else (h * r).sum(1) / r.sum(1) for h, r in zip(hidden, real, strict=True)]
        assert model.aggregation is not None
        for ours, pool in zip((out.s, out.s_hat), pools, strict=True):
            head = model.aggregation.outer(F.gelu(model.aggregation.inner(pool)))
            torch.testing.assert_close(ours, F.normalize(head, dim=1), rtol=1e-4, atol=1e-5)
        logits = model.mlm.logits(take_rows(hidden[1], POSITIONS))
        assert logits.shape[-1] == theirs.config.vocab_size
        loss = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="sum")
        torch.testing.assert_close(out.mlm_loss_sum, loss, rtol=1e-4, atol=1e-4)


def test_pretrained_weights_stay_and_heads_are_drawn(tmp_path: Path) -> None:
    model, theirs = _model(tmp_path, "BertModel")
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if not name.startswith("pooler.")}
    ours = model.encoder.state_dict()
    assert ours.keys() == weights.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in weights.items())
    assert model.mlm.weight is dict(model.encoder.named_parameters())["embeddings.word_embeddings.weight"]
    assert model.mlm.dense.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_training_mode_reaches_the_whole_model(tmp_path: Path) -> None:
    model, _ = _model(tmp_path, "BertModel")
    for training in (False, True):
        model.train(training)
        assert {part.training for part in model.encoder.model.modules()} == {training}


def test_what_an_encoder_cannot_do_is_refused(tmp_path: Path) -> None:
    model, _ = _model(tmp_path / "bert", "BertModel")
    documents = torch.zeros_like(TOKENS)
    with pytest.raises(ConfigError, match=r"BertModel .* data\.cross_document_attention=true"):
        model(TOKENS, CORRUPTED, POSITIONS, LABELS, documents)
    with pytest.raises(DataError, match="65 tokens is longer than the encoder's 64 positions"):
        model.encode(TOKENS.new_full((1, 65), 7), False)
    narrow, _ = _model(tmp_path / "albert", "AlbertModel", embedding_size=16)
    assert narrow.mlm.logits(narrow.encode(TOKENS, False)).shape == (3, 7, narrow.encoder.vocab_size)
    with pytest.raises(ConfigError, match=r"mlm.head=identity: the encoder embeds tokens in 16 columns"):
        narrow.mlm.begin_near_identity()
    with pytest.raises(ConfigError, match="compile is for our own encoders, and mpnet runs on transformers'"):
        job_from_mapping(language_mapping(tmp_path) | {"model": {"arch": "mpnet", "compile": True}}, "test")


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_has_the_attributes_of_the_protocol(kind: str) -> None:
    """Sizes as the ``config.json`` gives them, whatever each family calls them."""
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
        "vocab_size": 70, "max_position_embeddings": 40, "type_vocab_size": 1, "pad_token_id": 1,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-5,
        "initializer_range": 0.02, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "embedding_size": 32,
    }  # fmt: skip
    encoder = build_encoder({**sizes, "model_type": kind}, dropout=0.0, attention_dropout=0.0, source="test")
    skipped = 2 if kind in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0
    assert (encoder.hidden_size, encoder.vocab_size, encoder.pad_id) == (32, 70, 1)
    assert encoder.max_positions == 40 - skipped
    assert not encoder.reads_types
    assert encoder.word_embedding.weight.shape == (70, 32)
    tokens = torch.randint(5, 70, (2, 11))
    assert encoder(tokens).shape == (2, 11, 32)
    assert encoder(tokens, rows=torch.tensor([[0], [3]])).shape == (2, 1, 32)
    assert encoder.flops(20.0) > 2 * encoder.flops(10.0) > 0
    assert encoder.flops(20.0, read=1.0) <= encoder.flops(20.0)

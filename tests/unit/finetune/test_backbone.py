"""``model.init``: every kind of folder gives the encoder that transformers gives, and nothing is made up silently."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from capt.finetune.load import load_backbone
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.heads import take_rows
from capt.pretrain.models.roberta import RobertaEncoder
from tests.finetune import drop_key, write_encoder

OURS = ("RobertaForMaskedLM", "RobertaForSequenceClassification", "RobertaModel", "XLMRobertaForMaskedLM")
THEIRS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": {},
    "BertModel": {},
    "BertForPreTraining": {},
    "ElectraForPreTraining": {"embedding_size": 16},
    "DistilBertForMaskedLM": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    "AlbertForMaskedLM": {"embedding_size": 16},
    "MPNetForMaskedLM": {},
    "CamembertForMaskedLM": {},
    "DebertaV2ForMaskedLM": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
}


def _tokens(pad: int) -> torch.Tensor:
    return torch.tensor([[2, 7, 9, 11, 3, 8, 3], [2, 10, 3, 6, 3, pad, pad]])


@pytest.mark.parametrize("cls", [*OURS, *THEIRS])
def test_output_is_that_of_transformers(cls: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, cls, **THEIRS.get(cls, {}))
    backbone = load_backbone(folder)
    encoder = backbone.encoder.eval()
    assert isinstance(encoder, RobertaEncoder) == (cls in OURS)
    assert encoder.max_positions == 64
    pad = backbone.tokenizer.special.pad
    tokens, types = _tokens(pad), torch.tensor([[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0, 0]])
    loaded = transformers.AutoModel.from_pretrained(folder).eval()
    mask = (tokens != pad).long()
    chosen = torch.tensor([[0, 4], [2, 0]])
    for padded, texts in ((True, slice(None)), (False, slice(0, 1))):
        inputs, real = (tokens[texts], types[texts]), mask[texts].bool()
        segments = {"token_type_ids": types[texts]} if encoder.reads_types else {}
        with torch.no_grad():
            expected = loaded(input_ids=tokens[texts], attention_mask=mask[texts], **segments).last_hidden_state
            hidden = encoder(*inputs, padded=padded)
            torch.testing.assert_close(hidden[real], expected[real], rtol=1e-5, atol=1e-5)
            at_rows = encoder(*inputs, padded=padded, rows=chosen[texts])
            torch.testing.assert_close(at_rows, take_rows(expected, chosen[texts]), rtol=1e-5, atol=1e-5)
    assert encoder.reads_types == cls.startswith(("Bert", "Electra", "Albert"))


def test_dropouts_are_the_jobs(tmp_path: Path) -> None:
    for cls in ("RobertaForMaskedLM", "BertModel", "DistilBertForMaskedLM"):
        folder = write_encoder(tmp_path / cls, cls, **THEIRS.get(cls, {}))
        tokens = _tokens(load_backbone(folder).tokenizer.special.pad)
        still = load_backbone(folder, dropout=0.0, attention_dropout=0.0).encoder.train()
        assert torch.equal(still(tokens, padded=True), still(tokens, padded=True))
        for only in ({"dropout": 0.3, "attention_dropout": 0.0}, {"dropout": 0.0, "attention_dropout": 0.3}):
            moving = load_backbone(folder, **only).encoder.train()
            assert not torch.equal(moving(tokens, padded=True), moving(tokens, padded=True)), (cls, only)


def test_names_of_old_releases_are_read(tmp_path: Path) -> None:
    """bert-base-uncased itself calls LayerNorm's parameters gamma and beta."""
    folder = write_encoder(tmp_path, "BertForMaskedLM")
    expected = load_backbone(folder).encoder.state_dict()
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert any("gamma" in name for name in tensors)
    save_file(tensors, folder / "model.safetensors")
    found = load_backbone(folder).encoder.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def _edit(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("cls", ["RobertaForMaskedLM", "BertForMaskedLM"])
def test_missing_and_unexpected_weights_are_errors(cls: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = cls.partition("For")[0].lower()
    folder = write_encoder(tmp_path, cls)
    whole = load_backbone(folder).encoder.state_dict()
    _edit(folder, **{f"{prefix}__encoder__layer__1__output__dense__bias": None})
    with pytest.raises(CheckpointError, match=r"missing: .*1\.(ffn_out|output\.dense)\.bias") as raised:
        load_backbone(folder)
    assert "allow_missing" not in str(raised.value)  # random weights are nothing to advise
    with caplog.at_level(logging.WARNING):
        found = load_backbone(folder, allow_missing=True).encoder.state_dict()
    assert "stay as initialised" in caplog.text
    different = [name for name, tensor in whole.items() if not torch.equal(found[name], tensor)]
    assert len(different) <= 1
    _edit(folder, **{f"{prefix}__encoder__layer__1__output__dense__bias": torch.zeros(32)})
    _edit(folder, **{f"{prefix}__encoder__layer__7__output__dense__bias": torch.zeros(32)})
    with pytest.raises(CheckpointError, match=r"unexpected: .*layer\.7\.output\.dense\.bias.*model\.allow_missing"):
        load_backbone(folder)
    load_backbone(folder, allow_missing=True)


@pytest.mark.parametrize("cls", ["RobertaForMaskedLM", "BertForMaskedLM"])
def test_sizes_are_not_believed(cls: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, cls)
    config = json.loads((folder / "config.json").read_text())
    for key, value in (("vocab_size", 10**12), ("hidden_size", 64), ("intermediate_size", 10**10)):
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(CheckpointError, match=r"config\.json(: | and tensors disagree)"):
            load_backbone(folder)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        load_backbone(folder)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "good", "BertForMaskedLM")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder, tmp_path / name))

    bare = copy("bare")
    (bare / "vocab.txt").unlink()
    with pytest.raises(CheckpointError, match=r"bare: its tokenizer cannot be read: .*no tokenizer in it"):
        load_backbone(bare)
    pickled = copy("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a pickle"):
        load_backbone(pickled)
    config = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"auto_map": {"AutoModel": "evil.Model"}}, "names code to run"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; there are encoders of modernbert, roberta"),
        ({"pad_token_id": 9}, "the model pads with 9, its tokenizer with 0"),
        ({"num_attention_heads": 5}, "does not describe a bert encoder"),
    ):
        other = copy(f"changed-{next(iter(changes))}")
        (other / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=message):
            load_backbone(other)
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        load_backbone(tmp_path / "nowhere")
    unknown = write_encoder(tmp_path / "roberta")
    drop_key(unknown / "config.json", "type_vocab_size")
    with pytest.raises(CheckpointError, match="type_vocab_size"):
        load_backbone(unknown)

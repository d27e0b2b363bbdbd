"""DeBERTa-v3 as it lies on the hub: ``spm.model`` without ``tokenizer.json``, and its weights in a pickle."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoModel, DebertaV2Config, DebertaV2Model

from capt.finetune.encoding import encode_texts
from capt.finetune.load import load_backbone
from capt.pretrain.base.errors import CheckpointError, DataError
from capt.tokenizer.encode import load_tokenizer
from tests.finetune import sentence

_V3 = {
    "model_type": "deberta-v2", "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
    "hidden_size": 32, "initializer_range": 0.1, "intermediate_size": 48, "max_position_embeddings": 64,
    "relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "pos_att_type": "p2c|c2p", "layer_norm_eps": 1e-7, "max_relative_positions": -1, "position_biased_input": False,
    "num_attention_heads": 2, "num_hidden_layers": 2, "type_vocab_size": 0, "vocab_size": 200,
}  # fmt: skip
"""The keys of microsoft/deberta-v3-base's ``config.json``; it has no ``pad_token_id``."""


@pytest.fixture(scope="module")
def lines() -> list[str]:
    generator = random.Random(0)
    return [sentence(generator) for _ in range(400)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    pieces = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]"}
    named = {f"{role}_id": number for number, role in enumerate(pieces)} | {f"{r}_piece": p for r, p in pieces.items()}
    prefix = str(folder / "spm")
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=prefix, vocab_size=150, model_type="unigram", minloglevel=3,
        hard_vocab_limit=False, required_chars="[]ACKLMS", **named,
    )  # fmt: skip
    (folder / "spm.vocab").unlink()
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false, "vocab_type": "spm"}')
    (folder / "config.json").write_text(json.dumps(_V3))
    torch.manual_seed(0)
    model = DebertaV2Model(DebertaV2Config(**{k: v for k, v in _V3.items() if k != "model_type"}))
    weights = {f"deberta.{name}": tensor for name, tensor in model.state_dict().items()}
    heads = {"lm_predictions.lm_head.bias": torch.zeros(200), "mask_predictions.classifier.bias": torch.zeros(1)}
    torch.save(weights | heads, folder / "pytorch_model.bin")
    return folder


def test_ids_are_sentencepieces_own(hub: Path, lines: list[str]) -> None:
    tokenizer, reference = load_tokenizer(hub), SentencePieceProcessor(model_file=str(hub / "spm.model"))
    awkward = ["", " ", "The  river.", "[CLS] a [MASK]", "½ día \uff21", "a\tb\nc", "no!" * 30]
    for line, ids in zip([*lines, *awkward], tokenizer.encode_batch([*lines, *awkward]), strict=True):
        assert ids.tolist() == reference.encode(line), line
    special = tokenizer.special
    assert (special.pad, special.bos, special.eos, special.unk) == (0, 1, 2, 3)
    assert special.mask == reference.get_piece_size(), "the class of transformers appends it"
    (row,) = [encode_texts([lines[0]], [lines[1]], tokenizer, 64, source="x")]
    a, b = (reference.encode(line) for line in lines[:2])
    assert row.ids.tolist() == [1, *a, 2, *b, 2]


def test_weights_in_a_pickle_are_refused_with_a_command_that_works(hub: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no model\.safetensors but pytorch_model\.bin") as refused:
        load_backbone(hub)
    assert "\n" not in str(refused.value)
    _, _, command = str(refused.value).partition("in that folder: python ")
    subprocess.run([sys.executable, *shlex.split(command)], cwd=hub, check=True)
    backbone = load_backbone(hub, dropout=0.0, attention_dropout=0.0)
    tokens = torch.tensor([[1, 7, 9, 11, 2, 0], [1, 8, 2, 12, 13, 2]])
    ours = backbone.encoder.eval()(tokens, torch.zeros_like(tokens), padded=True)
    theirs = AutoModel.from_pretrained(hub).eval()(tokens, attention_mask=(tokens != 0).long())
    torch.testing.assert_close(ours[:, 0], theirs.last_hidden_state[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer_config.json", '{"do_lower_case": true}', "sets do_lower_case"),
        ("tokenizer_config.json", '{"split_by_punct": true}', "sets split_by_punct"),
        ("added_tokens.json", '{"[MASK]": 7}', "added tokens follow the vocabulary"),
        ("added_tokens.json", '{"x": []}', "expected an object of tokens and their ids"),
        ("spm.model", "not a model", "not a SentencePiece model"),
        ("spm.model", "", "not a SentencePiece model"),
    ],
)
def test_what_spm_model_alone_does_not_say(hub: Path, tmp_path: Path, name: str, content: str, said: str) -> None:
    for path in ("spm.model", "tokenizer_config.json"):
        (tmp_path / path).write_bytes((hub / path).read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=said):
        load_tokenizer(tmp_path)

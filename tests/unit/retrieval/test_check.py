"""``capt check``: kinds of folders whose vectors are right, and folders that were broken on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.retrieval.check import Finding, check
from tests.finetune import write_encoder
from tests.support import Capt

pytestmark = pytest.mark.filterwarnings("ignore")


def _sentence(folder: Path, cls: str, pooling: str = "mean", *, more: tuple[Any, ...] = (), **settings: Any) -> Path:
    """A folder that sentence-transformers wrote, of a small encoder with random weights."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertTokenizerFast

    source = write_encoder(folder.with_name(f"{folder.name}-encoder"), cls, **IDS.get(cls, {}))
    if (source / "vocab.txt").is_file():
        BertTokenizerFast(str(source / "vocab.txt")).save_pretrained(source)
    encoder = Transformer(str(source), max_seq_length=48)
    modules = [encoder, Pooling(encoder.get_embedding_dimension(), pooling_mode=pooling), *more]
    SentenceTransformer(modules=modules, device="cpu", **settings).save(str(folder), create_model_card=False)
    return folder


IDS: dict[str, dict[str, int]] = {
    "ModernBertModel": {"bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
}
"""Numbers of special tokens that a family has in a vocabulary of its own."""


def _dense() -> tuple[Any, ...]:
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize

    return Dense(32, 16, activation_function=torch.nn.Tanh()), Normalize()


PROMPTS = {"query": "no ", "document": "yes "}
GOOD: dict[str, Callable[[Path], Path]] = {
    "plain": lambda folder: write_encoder(folder, "BertModel"),
    "mean, prompts": lambda folder: _sentence(folder, "BertModel", prompts=PROMPTS),
    "roberta, cls": lambda folder: _sentence(folder, "RobertaModel", "cls"),
    "xlm-roberta": lambda folder: _sentence(folder, "XLMRobertaModel"),
    "mpnet": lambda folder: _sentence(folder, "MPNetModel"),
    "electra, last": lambda folder: _sentence(folder, "ElectraModel", "lasttoken"),
    "camembert": lambda folder: _sentence(folder, "CamembertModel"),
    "albert": lambda folder: _sentence(folder, "AlbertModel"),
    "modernbert": lambda folder: _sentence(folder, "ModernBertModel"),
    "dense": lambda folder: _sentence(folder, "BertModel", more=_dense()),
}


def _faults(found: list[Finding]) -> dict[str, str]:
    return {each.name: each.text for each in found if each.verdict == "fault"}


@pytest.mark.parametrize("kind", GOOD)
def test_folders_whose_vectors_are_right_pass(kind: str, tmp_path: Path) -> None:
    found = check(GOOD[kind](tmp_path / "model"))
    assert not _faults(found)
    names = {each.name for each in found if each.verdict == "ok"}
    assert {"alone", "dimensions", "truncation", "bf16"} <= names
    if kind != "dense":
        assert sum(each.name == "transformers" and each.verdict == "ok" for each in found) == 2, "padded and packed"


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _without_mask(folder: Path) -> Path:
    _edit(_sentence(folder, "BertModel") / "tokenizer_config.json", model_input_names=["input_ids"])
    return folder


def _shifted(folder: Path) -> Path:
    """RoBERTa whose positions begin behind another row than its tokenizer's padding."""
    _edit(_sentence(folder, "RobertaModel") / "config.json", pad_token_id=0)
    return folder


def _other_pooling(folder: Path) -> Path:
    (_sentence(folder, "BertModel", "cls") / "modules.json").unlink()
    return folder


def _collapsed(folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    path = next(_sentence(folder, "BertModel", more=_dense()).glob("*_Dense")) / "model.safetensors"
    tensors = load_file(path)
    weight = tensors["linear.weight"]
    save_file({**tensors, "linear.weight": weight[:1].repeat(len(weight), 1) * torch.rand(len(weight), 1)}, path)
    return folder


def _cuts_the_beginning(folder: Path) -> Path:
    _edit(_sentence(folder, "BertModel") / "tokenizer_config.json", truncation_side="left")
    return folder


def _keeps_capitals(folder: Path) -> Path:
    path = _sentence(folder, "BertModel") / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"]["lowercase"] = False
    path.write_text(json.dumps(content))
    _edit(folder / "tokenizer_config.json", do_lower_case=False)
    return folder


BROKEN: dict[str, tuple[Callable[[Path], Path], set[str], str]] = {
    "no mask": (_without_mask, {"alone", "transformers"}, "a short text alone and beside one"),
    "positions": (_shifted, {"loading", "transformers"}, "pad"),
    "pooling": (_other_pooling, {"loading"}, "modules.json"),
    "collapsed": (_collapsed, {"dimensions"}, "they have collapsed"),
    "truncation": (_cuts_the_beginning, {"truncation"}, "another end of a text"),
    "normalisation": (_keeps_capitals, {"tokenizer"}, "the normalisation keeps capitals"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_folders_that_are_broken_fail(kind: str, tmp_path: Path) -> None:
    break_, names, says = BROKEN[kind]
    faults = _faults(check(break_(tmp_path / "model")))
    assert faults
    assert faults.keys() <= names
    assert any(says in text for text in faults.values())


def test_a_reranker_is_checked_by_its_scores(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    source = write_encoder(tmp_path / "bert", "BertForSequenceClassification", num_labels=1)
    model = CrossEncoder(str(source), device="cpu", max_length=24)
    model.save_pretrained(str(tmp_path / "good"))
    found = check(tmp_path / "good")
    assert [(each.name, each.verdict) for each in found] == [
        ("alone", "ok"), ("alone", "ok"), ("scores", "ok"), ("truncation", "ok"),
    ]  # fmt: skip
    torch.nn.init.zeros_(model[0].auto_model.classifier.weight)
    model.save_pretrained(str(tmp_path / "bad"))
    assert list(_faults(check(tmp_path / "bad"))) == ["scores"]


def test_a_classifier_is_sent_to_the_command_for_its_answers(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert", "BertForSequenceClassification", num_labels=3)
    with pytest.raises(ConfigError, match=r"a classifier of 3 classes.*capt predict"):
        check(folder)


def test_the_command_exits_with_1_for_a_fault(tmp_path: Path, capt: Capt) -> None:
    code, out, _ = capt("check", _sentence(tmp_path / "good", "BertModel"))
    assert code == 0
    assert "ok        alone" in out
    code, out, _ = capt("check", _collapsed(tmp_path / "bad"), "--json")
    assert code == 1
    (fault,) = [each for each in json.loads(out) if each["verdict"] == "fault"]
    assert fault["name"] == "dimensions"
    assert np.isfinite(fault["value"])

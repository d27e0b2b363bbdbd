from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.lxmert.hf_config import hf_keys, parse_hf_config
from capt.pretrain.models.lxmert.model import build_model, load_weights, start_from
from capt.pretrain.models.lxmert.read import (
    HEADS,
    TIED,
    PretrainedLxmert,
    from_hf,
    hugging_face_names,
    parameter_names,
    read_lxmert,
    to_hf,
)
from tests.families.pictures.lxmert.support import ANSWERS, small_config, small_model
from tests.unit.convert.models import tokenizer

GROUPS = tuple(HEADS)
FIELDS: dict[str, Any] = {"hidden": 64, "heads": 1, "dtype": torch.float32, "contrast": False}


def _keys(**changes: Any) -> dict[str, Any]:
    keys = hf_keys(small_config(**_sizes()), architecture="LxmertForPreTraining", bos_id=2, eos_id=3, answers=None)
    return keys | changes


def _sizes() -> dict[str, Any]:
    return {"hidden": 64, "heads": 1}


def _tensors() -> dict[str, Tensor]:
    model = small_model(**FIELDS)
    return to_hf(model.state_dict(), model.config, GROUPS)


def _folder(path: Path, keys: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(keys))
    save_file(tensors, path / "model.safetensors")
    return path


def test_table_covers_the_model() -> None:
    model = small_model()
    table = parameter_names(model.config, GROUPS)
    state = [name for name in model.state_dict() if not name.startswith("aggregation.")]
    assert set(table) | set(TIED) == set(state)
    theirs = [name for parts in table.values() for name in parts]
    assert len(theirs) == len(set(theirs))


def test_round_trip_is_lossless() -> None:
    state = small_model(contrast=False).state_dict()
    there = to_hf(state, small_config(), GROUPS)
    back = from_hf(there, small_config(), "there")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert len({tensor.data_ptr() for tensor in there.values()}) == len(there)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("encoder.x_layers.1.lang_inter.dense.weight", "lxmert.encoder.x_layers.1.lang_inter.dense.weight"),
        ("cls.predictions.bias", "cls.predictions.bias"),
        ("somebody.else", "somebody.else"),
    ],
)
def test_names_of_others(given: str, expected: str) -> None:
    assert list(hugging_face_names({given: torch.zeros(1)}, "file")) == [expected]


def test_a_tied_tensor_may_have_its_second_name_alone() -> None:
    first, second = "lxmert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    assert list(hugging_face_names({second: torch.zeros(1)}, "file")) == [first]
    assert set(hugging_face_names({first: torch.zeros(1), second: torch.zeros(1)}, "file")) == {first, second}


def test_two_names_of_one_tensor_are_refused() -> None:
    twice = {"pooler.dense.bias": torch.zeros(1), "lxmert.pooler.dense.bias": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"two tensors mean lxmert\.pooler\.dense\.bias"):
        hugging_face_names(twice, "file")


def test_a_file_is_not_opened_and_the_way_to_a_folder_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(_tensors(), tmp_path / "model_LXRT.pth")
    with pytest.raises(CheckpointError, match="could run code when it is opened") as caught:
        read_lxmert(tmp_path / "model_LXRT.pth")
    command = shlex.split(str(caught.value).partition("released weights: ")[2])
    assert command[:2] == ["python", "-c"]
    stock = transformers.LxmertForPreTraining(transformers.LxmertConfig(**_keys()))
    stock.save_pretrained(tmp_path / "hub")
    tokenizer("wordpiece").save(tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    exec(command[2].replace("unc-nlp/lxmert-base-uncased", "hub"))
    assert read_lxmert(tmp_path / "lxmert").config.hidden == 64


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    tensors = _tensors()
    del tensors["lxmert.pooler.dense.bias"]
    tensors["extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"missing: lxmert\.pooler\.dense\.bias; unexpected: extra"):
        read_lxmert(_folder(tmp_path / "folder", _keys(), tensors))
    del tensors["lxmert.embeddings.word_embeddings.weight"]
    with pytest.raises(CheckpointError, match=r"missing: lxmert\.embeddings\.word_embeddings\.weight"):
        read_lxmert(_folder(tmp_path / "other", _keys(), tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"l_layers": 4}, "says language_layers 4, but the tensors have 3"),
        ({"intermediate_size": 1 << 19}, "says ffn 524288, but the tensors have 40"),
        ({"num_qa_labels": 9500}, f"says answers 9500, but the tensors have {ANSWERS}"),
        ({"model_type": "bert"}, "model_type is 'bert', which describes no LXMERT"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"visual_pos_dim": 5}, "visual_pos_dim is 5"),
        ({"l_layers": "3"}, "l_layers is '3'"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob is 1.5"),
        ({"num_attention_heads": 7}, "sizes do not fit"),
        ({"auto_map": {"AutoModel": "evil.py"}}, "names code to run"),
    ],
)
def test_what_a_config_claims_is_checked(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = _folder(tmp_path / "folder", _keys(**change), _tensors())
    with pytest.raises(CheckpointError, match=message):
        read_lxmert(folder)


def test_a_key_that_is_missing_is_named() -> None:
    keys = _keys()
    del keys["l_layers"]
    with pytest.raises(CheckpointError, match=r"config\.json: l_layers is missing"):
        parse_hf_config(keys, "config.json")


def test_a_pickle_in_a_folder_is_not_opened(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "folder", _keys(), _tensors())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a pickle, which could run code"):
        read_lxmert(folder)


def test_a_folder_without_a_model_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="give a Hugging Face folder"):
        read_lxmert(tmp_path)


def test_labels_that_name_nothing_are_no_answers() -> None:
    default = {str(i): f"LABEL_{i}" for i in range(ANSWERS)}
    assert parse_hf_config(_keys(id2label=default), "x")[1] is None
    assert parse_hf_config(_keys(id2label={"0": "yes"}), "x")[1] is None
    named = {str(i): f"word {i}" for i in range(ANSWERS)}
    assert parse_hf_config(_keys(id2label=named), "x")[1] == tuple(named.values())
    config = small_config()
    with pytest.raises(CheckpointError, match=f"2 answers are given for an answer head of {ANSWERS}"):
        hf_keys(config, architecture="LxmertForPreTraining", bos_id=2, eos_id=3, answers=["a", "b"])


def test_weights_of_another_model_are_refused() -> None:
    model = small_model(contrast=False)
    state = dict(model.state_dict())
    state["pooler.dense.bias"] = torch.zeros(3)
    state["unknown"] = torch.zeros(1)
    del state["matching.bias"]
    with pytest.raises(CheckpointError, match=r"matching.bias is missing; unknown is unknown; pooler.dense.bias has"):
        load_weights(model, state, "file")
    state = dict(model.state_dict())
    state["mlm.weight"] = state["mlm.weight"] + 1
    with pytest.raises(CheckpointError, match=r"mlm\.weight differs from encoder\.words\.word\.weight"):
        load_weights(model, state, "file")


def test_an_encoder_that_is_not_whole_starts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    source = small_model(contrast=False, seed=1)
    state = {name: x for name, x in source.state_dict().items() if not name.startswith(("mlm.", "region_heads."))}
    model = small_model()
    start_from(model, PretrainedLxmert(source.config, state, None, None), "file")
    assert torch.equal(
        model.encoder.cross_layers[0].cross.query.weight, state["encoder.cross_layers.0.cross.query.weight"]
    )
    assert "random weights: aggregation.inner, aggregation.outer, mlm" in caplog.text
    del state["encoder.regions.box.bias"]
    with pytest.raises(CheckpointError, match=r"encoder\.regions\.box\.bias is missing"):
        start_from(model, PretrainedLxmert(source.config, state, None, None), "file")


def test_build_follows_the_weights() -> None:
    model = small_model(activation_checkpointing="full")
    built = build_model(model.state_dict(), model.config, "file")
    assert built.aggregation is not None
    assert built.config.activation_checkpointing == "none"
    assert not built.training

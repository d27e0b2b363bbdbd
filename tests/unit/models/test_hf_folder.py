"""Hostile and broken Hugging Face folders: one line that names file and key, in no time, with nothing run."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.hf_folder import is_hf, read_config, read_json, read_tensors

GOOD = {"model_type": "roberta", "hidden_size": 8, "hidden_act": "gelu", "id2label": {"0": "x"}}


def write(path, value):
    path.write_text(json.dumps(value))
    return path


def refused(call, *mentions):
    with pytest.raises(CheckpointError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for mention in mentions:
        assert mention in text


def test_a_plain_configuration_is_read(tmp_path):
    write(tmp_path / "config.json", GOOD)
    assert read_config(tmp_path) == GOOD


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ({"_attn_implementation_internal": "evil/kernel"}, "_attn_implementation_internal"),
        ({"_attn_implementation": "evil/kernel"}, "_attn_implementation"),
        ({"attn_implementation": "evil/kernel"}, "attn_implementation"),
        ({"text_config": {"auto_map": {}}}, "text_config.auto_map"),
        ({"parts": [{"deep": [{"trust_remote_code": True}]}]}, "trust_remote_code"),
        ({"custom_pipelines": {"x": {"impl": "evil.py"}}}, "custom_pipelines"),
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"is_decoder": True}, "is_decoder"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"quantization_config": {"quant_method": "x"}}, "quantization_config"),
    ],
)
def test_keys_that_run_code_or_mean_another_model_are_named(tmp_path, extra, key):
    write(tmp_path / "config.json", GOOD | extra)
    refused(lambda: read_config(tmp_path), "config.json", key)


@pytest.mark.parametrize("place", [(), ("text_config",), ("parts", "deep")])
@pytest.mark.parametrize(
    "value", [None, False, True, "eager", "sdpa", "kernels/attention", "flash_attention_2", {}, ["x.py"]]
)
@pytest.mark.parametrize(
    "key",
    ["auto_map", "trust_remote_code", "custom_generate", "_attn_implementation", "_attn_implementation_autoset",
     "attn_implementation", "_experts_implementation_internal"],
)  # fmt: skip
def test_a_key_is_refused_where_its_value_can_name_code(tmp_path, key, value, place):
    extra = {key: value}
    for name in place:
        extra = {name: extra}
    write(tmp_path / "config.json", GOOD | extra)
    harmless = value in (None, False, "eager", "sdpa") or (value is True and key != "trust_remote_code")
    if harmless and not (key == "trust_remote_code" and value):
        assert read_config(tmp_path) == GOOD | extra
    else:
        refused(lambda: read_config(tmp_path), key, "names code to run or to fetch")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe{}", b'"x"', b"[" * 100_000])
def test_broken_json_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    refused(lambda: read_config(tmp_path), "config.json")


def test_missing_configuration_and_model_type(tmp_path):
    refused(lambda: read_config(tmp_path), "config.json", "no such file")
    write(tmp_path / "config.json", {"hidden_size": 8})
    refused(lambda: read_config(tmp_path), "model_type")


def test_a_huge_json_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(10**9)
    refused(lambda: read_json(tmp_path / "config.json"), "config.json", "bytes")


@pytest.mark.timeout(10)
def test_fifos_and_links_are_not_opened(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    os.mkfifo(folder / "config.json")
    refused(lambda: read_config(folder), "not a regular file")
    os.mkfifo(folder / "model.safetensors")
    refused(lambda: read_tensors(folder), "not a regular file")
    (folder / "model.safetensors").unlink()
    save_file({"w": torch.ones(2)}, tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    refused(lambda: read_tensors(folder), "link")


def test_the_links_of_a_hub_cache_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "models--x--y" / "snapshots" / "abc", tmp_path / "models--x--y" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"w": torch.ones(2)}, blobs / "hash")
    (snapshot / "model.safetensors").symlink_to("../../blobs/hash")
    assert torch.equal(read_tensors(snapshot)["w"], torch.ones(2))
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../blobs/gone")
    refused(lambda: read_tensors(snapshot), "not a regular file")


def index(folder, weight_map):
    write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def test_shards_are_joined(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    assert {name: float(x) for name, x in read_tensors(tmp_path).items()} == {"a": 0.0, "b": 1.0}
    index(tmp_path, {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"})
    refused(lambda: read_tensors(tmp_path), "b, c")
    both = {"a": torch.ones(1), "b": torch.ones(1)}
    save_file(both, tmp_path / "model-00002-of-00002.safetensors")
    index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    refused(lambda: read_tensors(tmp_path), "a are in another shard too, and differ")
    save_file(both | {"a": torch.zeros(1)}, tmp_path / "model-00002-of-00002.safetensors")
    assert float(read_tensors(tmp_path)["a"]) == 0.0


@pytest.mark.parametrize("wrapped", ["module.{}", "_orig_mod.{}", "_orig_mod.module.{}", "module._orig_mod.{}"])
def test_names_of_a_model_that_was_saved_wrapped(tmp_path, wrapped):
    names = ("encoder.layer.0.weight", "pooler.bias")
    save_file({wrapped.format(name): torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    assert set(read_tensors(tmp_path)) == set(names)
    # A layer that was compiled alone, and a part of a model that is called so.
    save_file({"layer.0._orig_mod.weight": torch.zeros(1), "module.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert set(read_tensors(tmp_path)) == {"layer.0.weight", "module.x"}
    # Two tensors of one name would be one.
    save_file({"x": torch.zeros(1), "_orig_mod.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert set(read_tensors(tmp_path)) == {"x", "_orig_mod.x"}


def test_one_file_comes_before_shards_as_transformers_has_it(tmp_path, caplog):
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    for layout in ({}, {"max_shard_size": "2KB"}):  # the second save leaves the file of the first where it is
        model = BertModel(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes))
        model.save_pretrained(tmp_path / ("sharded" if layout else "whole"), **layout)
    for path in (tmp_path / "sharded").iterdir():
        (tmp_path / "whole" / path.name).write_bytes(path.read_bytes())
    expected = BertModel.from_pretrained(tmp_path / "whole").state_dict()
    found = read_tensors(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert found.keys() == read_tensors(tmp_path / "sharded").keys()
    assert "model.safetensors.index.json beside it is not" in caplog.text


def test_adapters_of_peft_are_no_model(tmp_path, caplog):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="adapters of peft without their model; merge them into it"):
        is_hf(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert is_hf(tmp_path)
    assert list(read_tensors(tmp_path)) == ["x"]
    assert "the adapters of peft beside the weights are not read" in caplog.text


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", ".hidden.safetensors", "", 7, None]
)
def test_shard_names_that_leave_the_folder_or_are_pickles(tmp_path, name):
    index(tmp_path, {"w": name})
    refused(lambda: read_tensors(tmp_path), "weight_map['w']", "plain *.safetensors")


def test_only_a_pickle(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    refused(lambda: read_tensors(tmp_path), "pytorch_model.bin", "pickle", "safetensors")


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (["optimizer.pt", "pytorch_model.bin", "rng_state_0.pth", "training_args.bin"], "'pytorch_model.bin'"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"], "'pytorch_model-*.bin'"),
        (["model.pt", "optimizer.pt"], "'model.pt'"),
    ],
)
def test_the_pickles_that_are_converted_are_the_weights(tmp_path, names, files):
    """A trainer writes its states beside them, whose names sort first; of shards each is one part."""
    for name in names:
        (tmp_path / name).touch()
    refused(lambda: read_tensors(tmp_path), f"glob.glob({files})")


def test_states_of_a_trainer_are_no_weights(tmp_path):
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin"):
        (tmp_path / name).touch()
    refused(lambda: read_tensors(tmp_path), "model.safetensors: no such file")


def test_weights_that_zero_3_has_left_empty(tmp_path):
    save_file({"a": torch.zeros(2), "b": torch.empty(0)}, tmp_path / "model.safetensors")
    refused(lambda: read_tensors(tmp_path), "tensors without elements (b)", "stage3_gather_16bit_weights_on_model_save")


def header(length, content):
    return struct.pack("<Q", length) + content


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 8, header(2**40, b"{}"), header(2, b"[]"), header(10, b'{"w":1}'), header(7, b'{"w":1}')]
)
def test_damaged_safetensors(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(lambda: read_tensors(tmp_path), "model.safetensors")


def test_truncated_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    refused(lambda: read_tensors(tmp_path), "model.safetensors")


def test_the_name_of_a_pickle_becomes_no_code_in_the_command_that_is_told(tmp_path):
    (tmp_path / "a'); print('b.bin").touch()
    with pytest.raises(CheckpointError) as caught:
        read_tensors(tmp_path)
    assert "rename it" in str(caught.value)
    assert "python -c" not in str(caught.value)


def test_shards_without_their_index_are_said(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    refused(lambda: read_tensors(tmp_path), "its shards lack model.safetensors.index.json")

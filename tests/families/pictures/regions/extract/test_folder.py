"""Model folders that others made: what is in them is not run, and not guessed at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.regions.extract.families import FAMILIES
from capt.pretrain.regions.extract.folder import load_vision_model
from capt.pretrain.regions.extract.prepare import Preparation


def _changed(folder: Path, out: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(folder, out)
    keys = json.loads((out / name).read_text())
    change(keys)
    (out / name).write_text(json.dumps(keys))
    return out


@pytest.mark.parametrize(
    ("kind", "backend", "change", "error"),
    [
        ("vit", "vit", {"auto_map": {"AutoModel": "modeling_evil.Evil"}}, "'auto_map' names code to run"),
        ("vit", "vit", {"_attn_implementation": "someone/kernel"}, "names code to run or to fetch"),
        ("vit", "vit", {"model_type": "my_vit"}, "model_type is 'my_vit'; --backend vit reads vit, "),
        ("vit", "vit", {"model_type": ["vit"]}, r"model_type is \['vit'\]"),
        ("vit", "grid", {}, "model_type is 'vit'; --backend vit reads it"),
        ("vit", "vit", {"quantization_config": {"quant_method": "gptq"}}, "quantized weights cannot be read"),
        ("vit", "vit", {"hidden_size": 48}, "not a ViTModel|of another shape"),
        ("vit", "vit", {"num_hidden_layers": 3}, "weights of ViTModel missing"),
        ("vit", "vit", {"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000, and the weights have only \d+"),
        ("vit", "vit", {"num_attention_heads": "two"}, "not a ViTModel"),
        ("clip", "vit", {"vision_config": "elsewhere"}, "vision_config is 'elsewhere'"),
        ("detr", "detr", {"backbone_config": {"model_type": "resnet", "depths": [10**9]}}, r"depths is \[1000000000\]"),
        ("detr", "detr", {"backbone_config": None, "backbone": "resnet50"}, r"'resnet50' of another package \(timm\)"),
        ("detr", "detr", {"backbone_config": {"model_type": "timm_backbone"}}, "of another package"),
    ],
)
def test_what_is_refused(models: Path, tmp_path: Path, kind: str, backend: str, change: Any, error: str) -> None:
    folder = _changed(models / kind, tmp_path / "model", "config.json", lambda keys: keys.update(change))
    with pytest.raises(CheckpointError, match=error):
        load_vision_model(folder, backend)


def test_the_digest_is_that_of_the_weights_that_are_read(models: Path, tmp_path: Path) -> None:
    """Whole weights beside an index are read, and nothing else is asked for."""
    folder = _changed(models / "vit", tmp_path / "model", "config.json", lambda keys: None)
    index = {"metadata": {}, "weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_vision_model(folder, "vit").weights == load_vision_model(models / "vit", "vit").weights


def test_keys_that_change_the_form_of_the_output_are_not_followed(models: Path, tmp_path: Path) -> None:
    keys = {"return_dict": False, "output_hidden_states": True}
    folder = _changed(models / "vit", tmp_path / "model", "config.json", lambda config: config.update(keys))
    output = load_vision_model(folder, "vit").network(pixel_values=torch.zeros(1, 3, 32, 32))
    assert output.last_hidden_state.shape == (1, 17, 32)
    assert output.hidden_states is None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"auto_map": {"AutoImageProcessor": "evil.Evil"}}, "'auto_map' names code to run"),
        ({"image_processor_type": "EvilProcessor"}, "image_processor_type is 'EvilProcessor'; known: ViT"),
        ({"size": {"height": 10**9, "width": 32}}, r"size is .*; at most 4096 pixels are possible"),
        ({"pad_size": {"height": 60000, "width": 60000}}, "pad_size is .*; at most 4096 pixels"),
        ({"size": "large"}, "not a ViTImageProcessor|does not say"),
    ],
)
def test_what_is_refused_of_the_preprocessing(models: Path, tmp_path: Path, change: Any, error: str) -> None:
    folder = _changed(models / "vit", tmp_path / "model", "preprocessor_config.json", lambda keys: keys.update(change))
    with pytest.raises(CheckpointError, match=error):
        Preparation(folder, FAMILIES["vit"]["vit"], "whole")


def test_pickles_are_not_opened(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "vit", tmp_path / "model")
    state = load_file(tmp_path / "model/model.safetensors")
    (tmp_path / "model/model.safetensors").unlink()
    torch.save(state, tmp_path / "model/pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a pickle, which could run code"):
        load_vision_model(tmp_path / "model", "vit")
    with pytest.raises(CheckpointError, match="no such folder"):
        load_vision_model(tmp_path / "absent", "vit")


def test_old_names_and_shards_give_the_same_model(models: Path, tmp_path: Path) -> None:
    """A vision tower alone, its names with the prefix of the whole model or without, in one file or in two."""
    whole = load_vision_model(models / "clip", "vit")
    state = load_file(models / "clip/model.safetensors")
    tower = {name: tensor for name, tensor in state.items() if name.startswith("vision_model.")}
    assert tower
    keys = json.loads((models / "clip/config.json").read_text())["vision_config"]
    for case, names in enumerate((list(tower), [name.removeprefix("vision_model.") for name in tower])):
        folder = tmp_path / str(case)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**keys, "model_type": "clip_vision_model"}))
        tensors = dict(zip(names, tower.values(), strict=True))
        half = len(names) // 2
        shards = {"model-1-of-2.safetensors": names[:half], "model-2-of-2.safetensors": names[half:]}
        for file, held in shards.items():
            save_file({name: tensors[name] for name in held}, folder / file)
        index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        loaded = load_vision_model(folder, "vit")
        for name, tensor in whole.network.state_dict().items():
            assert torch.equal(loaded.network.state_dict()[name], tensor), name
        assert loaded.weights != whole.weights

"""Mixed models: the formulas, what transformers loads of them, and what does not fit together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.config.load import load_job
from capt.pretrain.convert.merge import command
from capt.pretrain.engine.checkpoint import find_checkpoint, read_weights
from capt.pretrain.engine.checkpoint.merge import mix
from capt.pretrain.engine.checkpoint.save import partial_folder, write_weights_only
from capt.pretrain.engine.step_folders import step_folder
from tests.finetune import write_encoder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two models of transformers with the same vocabulary and other weights."""
    made = [write_encoder(tmp_path / "a"), tmp_path / "b"]
    shutil.copytree(*made)
    tensors = load_file(made[0] / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    others = {name: torch.randn(t.shape, generator=generator) * 0.05 for name, t in tensors.items()}
    save_file(others, made[1] / "model.safetensors", metadata={"format": "pt"})
    (made[0] / "README.md").write_text("figures of a")
    return made


def test_tensors_are_mixed_as_the_formulas_say() -> None:
    a, b = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mix([a, b], [0.3, 0.7]), 0.3 * a + 0.7 * b)
    unit = [x.double() / x.double().norm() for x in (a, b)]
    omega = torch.acos((unit[0] * unit[1]).sum())
    arc = (torch.sin(0.3 * omega) * a.double() + torch.sin(0.7 * omega) * b.double()) / torch.sin(omega)
    torch.testing.assert_close(mix([a, b], [0.3, 0.7], "slerp"), arc.float())
    half = mix([unit[0].float(), unit[1].float()], [0.5, 0.5], "slerp")
    assert half.norm() == pytest.approx(1.0), "the arc stays on the sphere, the line does not"
    torch.testing.assert_close(mix([a, 2 * a], [0.5, 0.5], "slerp"), 1.5 * a)
    assert torch.equal(mix([torch.zeros(3), torch.zeros(3)], [0.5, 0.5], "slerp"), torch.zeros(3))


def test_stock_transformers_loads_a_merged_folder(folders: list[Path], tmp_path: Path) -> None:
    from transformers import RobertaForMaskedLM

    compared = command(folders, tmp_path / "out", weights=[0.25, 0.75])
    assert compared.endswith(f"capt evaluate {tmp_path / 'out'} --text HELD_OUT.txt")
    merged, *models = (RobertaForMaskedLM.from_pretrained(each) for each in (tmp_path / "out", *folders))
    parameters: list[dict[str, Any]] = [dict(model.named_parameters()) for model in (merged, *models)]
    for name, found in parameters[0].items():
        expected = 0.25 * parameters[1][name].double() + 0.75 * parameters[2][name].double()
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-8, msg=name)
    assert merged.lm_head.decoder.weight is merged.roberta.embeddings.word_embeddings.weight
    assert not (tmp_path / "out" / "README.md").exists(), "it tells of another model"
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_folders_of_other_releases_are_mixed(folders: list[Path], tmp_path: Path) -> None:
    """A release leaves out keys at their defaults, writes buffers, or another file of the same vocabulary."""
    old, new = folders
    config = json.loads((old / "config.json").read_text())
    del config["layer_norm_eps"], config["type_vocab_size"]  # neither is at its default
    (old / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"has layer_norm_eps 1e-05, .* has 1e-12"):
        command(folders, tmp_path / "out")
    config = json.loads((new / "config.json").read_text())
    del config["hidden_act"]
    (old / "config.json").write_text(json.dumps({**config, "gradient_checkpointing": False}))
    tensors = load_file(old / "model.safetensors")
    buffers = {"roberta.embeddings.position_ids": torch.arange(4)}
    save_file(tensors | buffers, old / "model.safetensors", metadata={"format": "pt"})
    (old / "vocab.txt").write_text("words")
    command(folders, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    (old / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="no file of its vocabulary has the name of one"):
        command(folders, tmp_path / "none")
    (old / "vocab.txt").unlink()
    (new / "tokenizer.json").unlink()
    command(folders, tmp_path / "bare")


def _checkpoint(run: Path, seed: int, tokenizer: str = "0" * 32, **shape: int) -> Path:
    torch.manual_seed(seed)
    module = torch.nn.Sequential(
        torch.nn.Embedding(7, shape.get("width", 4)), torch.nn.Linear(4, 7, bias=shape.get("bias", 1) > 0)
    )
    if "width" not in shape:
        module[1].weight = module[0].weight
    target = step_folder(run, 0)
    (partial_folder(target) / "tokenizer").mkdir(parents=True)
    (partial_folder(target) / "tokenizer" / "vocabulary").write_text("words")
    job = load_job("capt_tiny", [f"run.dir={run}"])
    return write_weights_only(target, job, {"model": module}, {"tokenizer": tokenizer, "queue": 5})


def test_checkpoints_become_a_run(tmp_path: Path) -> None:
    sources = [_checkpoint(tmp_path / name, seed) for seed, name in enumerate("abc")]
    told = command([tmp_path / "a", *sources[1:]], tmp_path / "out", weights=[0.5, 0.25, 0.25], validate=False)
    assert told.startswith("compare it with what it is made of:")
    merged = find_checkpoint(tmp_path / "out")
    found, each = read_weights(merged), [read_weights(source) for source in sources]
    for name in each[0]:
        torch.testing.assert_close(found[name], 0.5 * each[0][name] + 0.25 * (each[1][name] + each[2][name]))
    assert found["1.weight"] is found["0.weight"]
    assert (merged / "tokenizer" / "vocabulary").read_text() == "words"
    assert json.loads((merged / "state.json").read_text())["task"] == {"tokenizer": "0" * 32, "queue": 0}
    assert load_job(tmp_path / "out" / "config.yaml", resolved=True).run.dir == tmp_path / "out"


def test_what_does_not_fit_is_refused(folders: list[Path], tmp_path: Path) -> None:
    one = _checkpoint(tmp_path / "one", 0)
    bare, out = _checkpoint(tmp_path / "bare", 0, bias=0), tmp_path / "out"
    lacks = r"bare/.*: no 1\.bias, which .*one/.* has; merge models of one architecture"
    cases: list[tuple[list[Path], dict[str, Any], str]] = [
        ([one, one], {"weights": [0.5]}, "names 1 shares of 2 models"),
        ([one, one], {"weights": [0.5, 0.6]}, "add up to 1.1, not to 1"),
        ([one, one, one], {"method": "slerp"}, "between two models, not 3"),
        ([one], {}, "two models or more, not 1"),
        ([one, folders[0]], {}, "capt convert .* OUT --to hf"),
        ([one, _checkpoint(tmp_path / "words", 0, "1" * 32)], {}, "trained with tokenizer 111111111111"),
        ([one, _checkpoint(tmp_path / "wide", 0, width=8)], {}, r"0\.weight has shape \[7, 8\], in .* \[7, 4\]"),
        ([one, bare], {}, lacks),
        ([bare, one], {}, lacks),
    ]
    for sources, options, message in cases:
        with pytest.raises((CheckpointError, ConfigError), match=message):
            command(sources, out, **options)
        assert not out.exists()
    for name, change, message in (
        ("config.json", lambda text: text.replace('"num_attention_heads": 2', '"num_attention_heads": 4'), "num_att"),
        ("tokenizer.json", lambda text: text.replace('"▁re"', '"▁er"'), "another vocabulary"),
    ):
        path = folders[1] / name
        before = path.read_text()
        path.write_text(change(before))
        assert path.read_text() != before
        with pytest.raises(CheckpointError, match=message):
            command(folders, out)
        path.write_text(before)


def test_models_that_pool_differently_are_refused(folders: list[Path], tmp_path: Path) -> None:
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in (("", "Transformer"), ("1_Pooling", "Pooling"))
    ]
    old = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    for folder, config in zip(folders, (old, {"pooling_mode": "mean"}), strict=True):
        (folder / "1_Pooling").mkdir()
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"pools otherwise than .*vectors are others"):
        command(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    new = {"pooling_mode": "cls", "include_prompt": True}
    (folders[1] / "1_Pooling" / "config.json").write_text(json.dumps(new))
    command(folders, tmp_path / "out")

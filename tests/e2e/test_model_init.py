"""``model.init``: starting from a Hugging Face RoBERTa folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants

from capt.finetune.load import load_backbone
from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.convert.dispatch import convert
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.language.task import LanguageTask
from capt.pretrain.models.config import RobertaConfig
from capt.tokenizer.encode import load_tokenizer
from capt.tokenizer.train import train
from tests.language import language_mapping
from tests.unit.models.test_hub import COMMIT, cached


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A job, and a folder that transformers wrote with a random RoBERTa of its shape and the job's tokenizer."""
    from transformers import RobertaConfig as TheirConfig
    from transformers import RobertaForMaskedLM

    folder = tmp_path_factory.mktemp("init")
    job = language_mapping(folder)
    task = LanguageTask(job_from_mapping(job, "test"), folder / "run")
    tokenizer = load_tokenizer(task.prepared.tokenizer_folder)
    config = TheirConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=34, type_vocab_size=1, layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(7)
    model = RobertaForMaskedLM(config)
    model.save_pretrained(folder / "hf")
    tokenizer.save(folder / "hf")
    return {**job, "model": {**job["model"], "init": str(folder / "hf")}}, folder / "hf"


@pytest.mark.parametrize("multiple", [1, 64])
def test_training_starts_from_the_weights_and_the_tokenizer_of_the_folder(start: Any, multiple: int) -> None:
    from transformers import RobertaForMaskedLM

    job, hf = start
    job = {**job, "model": {**job["model"], "pad_vocab_to": multiple}}
    task = LanguageTask(job_from_mapping(job, "test"), hf.parent / "run")
    assert task.prepared.tokenizer_folder == hf
    module: Any = task.build_modules()["model"]
    assert len(module.capt.mlm.bias) % multiple == 0
    tokens = torch.randint(5, 300, (3, 32))
    tokens[:, 0], tokens[:, -1] = 0, 2
    theirs = RobertaForMaskedLM.from_pretrained(hf).eval()
    with torch.no_grad():
        ours = module.capt.eval().encode(tokens, False)
        torch.testing.assert_close(ours, theirs.roberta(tokens).last_hidden_state, rtol=1e-5, atol=1e-5)


def test_a_hub_id_brings_sizes_and_tokenizer(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the hub client's own cache layout, offline; no size is given, and the job then knows them all."""
    job, hf = start
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = cached(tmp_path / "hub", "them/roberta", hf)
    mapping = {**job, "model": {"init": "them/roberta"}}
    task = LanguageTask(job_from_mapping(mapping, "test"), tmp_path / "run")
    assert task.prepared.tokenizer_folder == snapshot
    assert isinstance(task.job, LanguageJob)
    model = task.job.model
    assert (model.layers, model.hidden, model.heads, model.ffn, model.max_positions) == (2, 32, 2, 48, 32)
    assert job_from_mapping(yaml.safe_load(job_to_yaml(task.job)), "run").model == model
    assert load_backbone(Path("them/roberta")).encoder.hidden_size == 32
    run = convert(Path("them/roberta"), tmp_path / "imported", from_="hf")
    assert json.loads((run / "imported.json").read_text()) == {"source": f"them/roberta@{COMMIT}"}
    longer = {**mapping, "data": {**job["data"], "sequence_length": 64}}
    with pytest.raises(ConfigError, match="at most 32"):
        LanguageTask(job_from_mapping(longer, "test"), tmp_path / "run")


def test_another_tokenizer_is_refused(start: Any, tmp_path: Path) -> None:
    job, hf = start
    lines = (hf.parent / "text.txt").read_text().splitlines()
    train(lines, tmp_path / "other", vocab_size=400, type="bpe")
    mapping = {**job, "model": {"init": str(hf)}, "tokenizer": {"path": str(tmp_path / "other")}}
    with pytest.raises(ConfigError, match=r"not the vocabulary of model\.init"):
        LanguageTask(job_from_mapping(mapping, "test"), tmp_path / "run")


def test_another_architecture_is_named(start: Any) -> None:
    job, hf = start
    other = {**job, "model": {**job["model"], "layers": 3}}
    with pytest.raises(CheckpointError, match=r"model\.layers is 2 there but 3 in this job; set it to 2"):
        LanguageTask(job_from_mapping(other, "test"), hf.parent / "run")


def test_a_job_for_fewer_positions_takes_the_whole_table() -> None:
    there = RobertaConfig(size="custom", vocab_size=300, layers=2, hidden=32, heads=2, ffn=48, max_positions=512)
    assert RobertaConfig(init="x", max_positions=128).with_sizes_of(there, "x") == there.model_copy(
        update={"init": Path("x")}
    )
    with pytest.raises(CheckpointError, match=r"model\.max_positions is 512 there but 513"):
        RobertaConfig(init="x", max_positions=513).with_sizes_of(there, "x")


def test_a_folder_that_names_code_is_refused(start: Any, tmp_path: Path) -> None:
    job, hf = start
    hostile = tmp_path / "hf"
    hostile.mkdir()
    for path in hf.iterdir():
        (hostile / path.name).write_bytes(path.read_bytes())
    config = json.loads((hostile / "config.json").read_text())
    (hostile / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(CheckpointError, match="auto_map"):
        LanguageTask(job_from_mapping({**job, "model": {**job["model"], "init": str(hostile)}}, "test"), tmp_path)

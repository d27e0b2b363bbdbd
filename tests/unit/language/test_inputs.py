"""The check that needs no torch refuses what the start of the job refuses, for the same reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capt.finetune.config import describe_initial_model
from capt.finetune.load import load_backbone
from capt.pretrain.base.errors import CheckpointError, UserError
from capt.pretrain.config.load import load_job
from capt.pretrain.convert.encoder import export_encoder
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.language.inputs import check_hf_folder
from capt.pretrain.language.prepare import prepare
from capt.pretrain.models.lxmert.read import read_lxmert
from capt.pretrain.vision_language.config import describe_inputs as describe_pictures
from tests.unit.convert.models import config, model, tokenizer

TINY = {"layers": 1, "hidden": 12, "heads": 1, "ffn": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cfg = config(**TINY)
    export_encoder("hf", model(cfg).state_dict(), cfg, tokenizer(), tmp_path / "hf", "", check=False)
    (tmp_path / "text.txt").write_text("\n".join(["a cat sat on the mat"] * 60))
    return tmp_path / "hf"


def _reason(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _job(folder: Path, *changes: str) -> LanguageJob:
    overrides = [
        f"data.files=[{folder.parent / 'text.txt'}]", f"data.cache={folder.parent / 'cache'}",
        f"run.dir={folder.parent}/r", "data.sequence_length=16", "contrast.queue=0", "validate.every=0", *changes,
    ]  # fmt: skip
    job = load_job("capt_continue", overrides)
    assert isinstance(job, LanguageJob)
    return job


EDITS: dict[str, dict[str, Any]] = {
    "another family": {"model_type": "gpt2"},
    "unknown family": {"model_type": "t5"},
    "activation": {"hidden_act": "relu"},
    "untied": {"tie_word_embeddings": False},
    "code": {"auto_map": {"AutoModel": "x.Y"}},
    "padding": {"pad_token_id": 0},
    "heads": {"num_attention_heads": 5},
    "type": {"hidden_size": "12"},
    "few rows": {"vocab_size": 20},
}


@pytest.mark.parametrize("what", [*EDITS, "too long", "other size", "other vocabulary", "nothing"])
def test_what_a_language_job_refuses_is_refused_before(what: str, folder: Path) -> None:
    changes = [f"model.init={folder}"]
    if what in EDITS:
        keys = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(keys | EDITS[what]))
    elif what == "too long":
        changes += ["data.sequence_length=64"]
    elif what == "other size":
        changes += ["model.layers=2"]
    elif what == "other vocabulary":
        tokenizer("wordpiece").save(folder.parent / "other")
        changes += [f"tokenizer.path={folder.parent / 'other'}"]
    job = _job(folder, *changes)
    before, at_start = _reason(job.check_inputs), _reason(lambda: prepare(job))
    assert before == at_start
    assert (before is None) == (what == "nothing")


@pytest.mark.parametrize("what", ["unknown family", "activation", "code", "padding"])
def test_what_fine_tuning_refuses_is_refused_before(what: str, folder: Path) -> None:
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(keys | EDITS[what]))
    before = _reason(lambda: describe_initial_model(folder))
    assert before is not None
    assert before == _reason(lambda: load_backbone(folder))


@pytest.mark.family
def test_an_encoder_of_texts_is_no_model_of_pictures(folder: Path) -> None:
    from capt.pretrain.models.tokenizer import TokenizerSection
    from capt.pretrain.vision_language.config import VisionLanguageData

    data = VisionLanguageData(source="microworld")
    before = _reason(lambda: describe_pictures(data, folder, TokenizerSection()))
    assert before is not None
    assert before == _reason(lambda: read_lxmert(folder))


def test_a_padding_id_behind_the_vocabulary_is_said(folder: Path) -> None:
    """RoBERTa's positions begin behind the padding id, so that the rows up to it belong to no token."""
    used = tokenizer()
    spec = json.loads(used.backend.to_str())
    assert config().unused_positions() is None
    (folder.parent / "late").mkdir()
    used.save(folder.parent / "late")
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": used.vocab_size, "content": "<late>"})
    (folder.parent / "late" / "tokenizer.json").write_text(json.dumps(spec))
    keys = json.loads((folder.parent / "late" / "tokenizer_config.json").read_text())
    (folder.parent / "late" / "tokenizer_config.json").write_text(json.dumps(keys | {"pad_token": "<late>"}))
    job = _job(folder, "model.init=null", f"tokenizer.path={folder.parent / 'late'}", f"model.pad_id={used.vocab_size}")
    assert any(f"{used.vocab_size + 1:,} of the" in line and "position" in line for line in job.check_inputs())


def test_a_run_as_the_start_is_told_its_conversion(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"no Hugging Face folder; capt convert .*run OUT --to hf makes one"):
        check_hf_folder(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no Hugging Face folder; name one"):
        check_hf_folder(tmp_path / "empty")


def test_a_pickle_as_the_start_is_told_its_conversion(folder: Path) -> None:
    """Before the job starts as well as at its start, whichever reader comes first."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for read in (check_hf_folder, describe_initial_model, load_backbone):
        with pytest.raises(CheckpointError, match=r"pytorch_model.bin, a pickle, .*: python -c .*safetensors"):
            read(folder)
    (folder / "pytorch_model.bin").unlink()
    for read in (check_hf_folder, describe_initial_model, load_backbone):
        with pytest.raises(CheckpointError, match=r"model.safetensors: no such file; a Hugging Face folder needs it"):
            read(folder)

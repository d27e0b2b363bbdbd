"""A bottleneck from training to the next one: resumed, exported beside the plain encoder, and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.bottleneck.config import POOLED
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.language.export import command as export
from capt.pretrain.language.load import load_model
from capt.pretrain.language.task import LanguageTask
from capt.pretrain.pairs.load import pooling_of_init
from capt.pretrain.retrieval.encoders import load_text_encoder
from capt.pretrain.retrieval.options import EncoderOptions
from tests.bottleneck import WORDS, ragged_mapping
from tests.finetune import write_encoder
from tests.runs import training_rows
from tests.support import run_ranks, stopped_at, train_job

_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0, "position_buckets": 16}
_FAMILIES: dict[str, tuple[str, dict[str, Any], bool, str, str]] = {
    "roberta": ("", {}, False, "corrupted", "mean"),
    "bert": ("BertForMaskedLM", {}, False, "crop", "cls"),
    "mpnet": ("MPNetForMaskedLM", {}, True, "crop", "mean"),
    "electra": ("ElectraForMaskedLM", {"embedding_size": 16}, True, "corrupted", "cls"),
    "deberta": ("DebertaV2ForMaskedLM", _DEBERTA, True, "neighbour", "cls"),
    "modernbert": ("ModernBertForMaskedLM", {"cls_token_id": 2, "sep_token_id": 3}, False, "crop", "mean"),
}
"""The class of a start, or none for random weights; its keys; whether attention goes across documents; the view and the
vector that is trained."""


def _job(
    folder: Path, init: Path | None, cross: bool, view: str = "corrupted", pooling: str = "mean", **changes: Any
) -> dict[str, Any]:
    mapping = ragged_mapping(
        folder,
        data={"cross_document_attention": cross, "view": view},
        schedule={"max_steps": 2, "warmup_steps": 1},
        checkpoint={"every": 1},
        bottleneck={"head": "both", "pooling": pooling},
        **changes,
    )
    if init is not None:
        mapping |= {"model": {"init": str(init), "dropout": 0.1}, "tokenizer": {}}
    return mapping


@pytest.mark.parametrize("name", _FAMILIES)
def test_it_is_resumed_exported_and_continued(name: str, tmp_path: Path) -> None:
    cls, keys, cross, view, pooling = _FAMILIES[name]
    init = write_encoder(tmp_path / "start", cls, initializer_range=0.3, **keys) if cls else None
    job = _job(tmp_path, init, cross, view, pooling)
    assert run_ranks(train_job, 1, stopped_at(job, 1), False) == [75]
    assert run_ranks(train_job, 1, job, True) == [0]
    straight = {**job, "run": {**job["run"], "dir": str(tmp_path / "straight")}}
    assert run_ranks(train_job, 1, straight, False) == [0]
    resumed, whole = load_model(tmp_path / "run"), load_model(tmp_path / "straight")
    assert resumed.bottleneck is not None
    assert whole.bottleneck is not None
    for ours, theirs in ((resumed.model, whole.model), (resumed.bottleneck, whole.bottleneck)):
        assert all(torch.equal(x, theirs.state_dict()[key]) for key, x in ours.state_dict().items())

    # Each export compares itself with its library, and is the plain encoder but for two files.
    for to in ("hf", "sentence-transformers"):
        out = export(tmp_path / "run", tmp_path / to, to=to)
        assert {"bottleneck.json", "bottleneck.safetensors"} <= {path.name for path in out.iterdir()}
        assert POOLED[pooling] in (out / "README.md").read_text()
        # From either the next job has the heads, the decoder's language-model head among them.
        following = _job(tmp_path, out, cross, view, pooling, run={"dir": str(tmp_path / "next")})
        module: Any = LanguageTask(job_from_mapping(following, "test"), tmp_path / "next").build_modules()["model"]
        for ours, theirs in ((module.bottleneck, resumed.bottleneck), (module.capt.mlm, resumed.model.mlm)):
            assert all(torch.equal(x, theirs.state_dict()[key]) for key, x in ours.state_dict().items()), to
    # Pairs that start from any of them, and what measures them, pool what was trained.
    starts = [tmp_path / each for each in ("run", "hf", "sentence-transformers")]
    assert [pooling_of_init(start) for start in starts] == [pooling] * 3
    ours, *others = (load_text_encoder(start, EncoderOptions()) for start in starts)
    texts = ["river stone house", "fire", " ".join(WORDS * 2)]
    expected = ours.encode(texts, "text")
    for other in others:
        np.testing.assert_allclose(_unit(other.encode(texts, "text")), _unit(expected), atol=1e-5)


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_two_ranks_are_one(tmp_path: Path) -> None:
    """A run of two ranks continues with one, and has the losses of one from the start."""
    job = _job(tmp_path, None, False)
    job["schedule"]["max_steps"] = 3
    assert run_ranks(train_job, 2, stopped_at(job, 2), False) == [75, 75]
    assert run_ranks(train_job, 1, job, True) == [0]
    alone = {**job, "run": {**job["run"], "dir": str(tmp_path / "alone")}}
    assert run_ranks(train_job, 1, alone, False) == [0]
    ours, theirs = (training_rows(each["run"]["dir"]) for each in (job, alone))
    for one, other in zip(ours, theirs, strict=True):
        for key in ("loss", "loss/mlm", "loss/capt", "loss/bow", "loss/decoder"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key


def test_heads_of_another_form_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = _job(tmp_path, None, False)
    job["schedule"]["max_steps"] = 1
    assert run_ranks(train_job, 1, job, False) == [0]
    out = export(tmp_path / "run", tmp_path / "out", to="hf")
    for changes, message in (
        ({"bow_matrix": "own"}, "bottleneck.bow_matrix is tied there but own in this job; set it to tied"),
        ({}, "bow.dense.weight"),
    ):
        following = _job(tmp_path, out, False, run={"dir": str(tmp_path / "next")})
        following["bottleneck"] = {**following["bottleneck"], **changes}
        task = LanguageTask(job_from_mapping(following, "test"), tmp_path / "next")
        if not changes:
            tensors = dict(task.prepared.heads.tensors)  # type: ignore[union-attr]
            tensors["bow.dense.weight"] = tensors["bow.dense.weight"][:-1]
            object.__setattr__(task.prepared.heads, "tensors", tensors)
        with pytest.raises(CheckpointError, match=message):
            task.build_modules()
    (out / "bottleneck.json").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        LanguageTask(job_from_mapping(following, "test"), tmp_path / "next")
    # A job without a bottleneck does not need them.
    following["bottleneck"] = {"head": "none"}
    task = LanguageTask(job_from_mapping(following, "test"), tmp_path / "next")
    assert task.prepared.heads is None
    assert "bottleneck.head is none, and the heads are left out" in caplog.text


def test_another_vector_after_a_resume_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = LanguageTask(job_from_mapping(_job(tmp_path, None, False, pooling="cls"), "test"), tmp_path / "run")
    for pooling in (None, "cls", "mean"):
        state = {"tokenizer": task.fingerprint, "queue": 0, "pooling": pooling}
        task.compare(task.State.model_validate(state), tmp_path)
    assert caplog.text.count("bottleneck.pooling was mean up to here and is cls from now on") == 1

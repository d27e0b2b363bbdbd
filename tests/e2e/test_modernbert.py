"""ModernBERT in every task: pretrained and resumed over a change of phase, exported, tuned on pairs and on labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from capt.finetune.glue.export import command as export_glue
from capt.pretrain.language.evaluate import evaluate
from capt.pretrain.language.export import command as export
from capt.pretrain.language.import_hf import command as import_hf
from capt.pretrain.language.load import load_model
from capt.pretrain.pairs.export import command as export_pairs
from tests.finetune import glue_mapping, write_task
from tests.gradients import gradients, relative
from tests.language import language_mapping, write_corpus
from tests.pairs import pairs_mapping, write_pairs
from tests.runs import rows_of
from tests.support import run_ranks, stopped_at, train_job

_MODEL = {"arch": "modernbert", "layers": 4, "local_attention": 8, "global_rope_theta": 10_000.0}


def _mapping(folder: Path, **changes: Any) -> dict[str, Any]:
    mapping = language_mapping(folder, **changes)
    mapping["model"] = {**mapping["model"], **_MODEL, **changes.get("model", {})}
    mapping["data"]["cross_document_attention"] = False
    return mapping


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modernbert")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run on two ranks: CAPT in windows of documents, and from step 3 on in longer ones with another base."""
    job = _mapping(folder)
    first = stopped_at(job, 3)
    assert run_ranks(train_job, 2, first) == [75, 75]
    longer = {**job, "model": {**job["model"], "max_positions": 64, "global_rope_theta": 160_000.0}}
    longer["data"] = {**job["data"], "sequence_length": 64}
    (refused, *_) = run_ranks(train_job, 2, longer, True)
    assert "trained on windows of 32 tokens, this job has data.sequence_length 64; data.allow_change=true" in refused
    longer["data"]["allow_change"] = True
    narrower = {**longer, "model": {**longer["model"], "local_attention": 4}}
    (refused, *_) = run_ranks(train_job, 2, narrower, True)
    assert "model.local_attention is 8 there but 4 in this job; set it to 8" in refused
    assert run_ranks(train_job, 2, longer, True) == [0, 0]
    return folder / "run"


def test_a_run_goes_on_with_longer_windows_and_another_base(run: Path) -> None:
    assert [row["step"] for row in rows_of(run) if "loss/capt" in row] == [1, 2, 3, 4, 5, 6]
    config = load_model(run).model.config
    assert config.fixed_by_weights().items() >= {"max_positions": 64, "global_rope_theta": 160_000.0}.items()


def test_it_is_exported_imported_and_evaluated(run: Path, tmp_path: Path) -> None:
    """The exports compare themselves with transformers, sentence-transformers and onnxruntime."""
    folder = export(run, tmp_path / "hf", to="hf")
    assert type(AutoModelForMaskedLM.from_pretrained(folder)).__name__ == "ModernBertForMaskedLM"
    card = (folder / "README.md").read_text()
    assert "ModernBertModel" in card
    assert "oberta" not in card
    assert "pooler" not in card
    export(run, tmp_path / "st", to="sentence-transformers", pooling="head")
    export(run, tmp_path / "onnx", to="onnx", pooling="mean")
    import_hf(folder, tmp_path / "imported")
    ours, again = load_model(run).model, load_model(tmp_path / "imported").model
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0)
    text = write_corpus(tmp_path / "held_out.txt", seed=3)
    section, *_ = evaluate(run, text=[text], samples=8, poolers=["mean"])["sections"]
    assert section["metrics"]["loss/mlm"] > 0


def test_it_is_tuned_on_pairs_and_on_labels(run: Path, tmp_path: Path) -> None:
    """From the run, and from its export; the exports of both compare themselves."""
    hf = export(run, tmp_path / "hf", to="hf")
    write_pairs(tmp_path / "pairs.jsonl")
    pairs = pairs_mapping(tmp_path, model={"init": str(run)}, schedule={"max_steps": 2})
    write_task(tmp_path / "glue", "rte", train=16)
    glue = glue_mapping(
        tmp_path, run={"dir": str(tmp_path / "glue_run")}, model={"init": str(hf)}, schedule={"epochs": 1}
    )
    assert run_ranks(_both, 1, pairs, glue) == [(0, 0)]
    export_pairs(tmp_path / "run", tmp_path / "st", to="sentence-transformers")
    folder = export_glue(tmp_path / "glue_run", tmp_path / "classifier", to="hf")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(model).__name__ == "ModernBertForSequenceClassification"
    assert (model.config.classifier_pooling, model.head.dense.bias) == ("cls", None)


def _both(*mappings: dict[str, Any]) -> tuple[int | str, ...]:
    return tuple(train_job(mapping) for mapping in mappings)


def test_one_process_is_two_ranks_under_zero_0_and_3(folder: Path) -> None:
    """Gradients of three steps of MLM and CAPT; the first job is one process with one micro-batch."""

    def job(micro: int, stage: int) -> dict[str, Any]:
        return _mapping(
            folder, batch={"global": 16, "micro": micro}, engine={"zero_stage": stage, "precision": "fp32"},
            optimizer={"lr": 1e-9}, model={"initializer_range": 0.2}, contrast={"queue": 41},
        )  # fmt: skip

    (whole,) = run_ranks(gradients, 1, job(16, 0))
    for first in (run_ranks(gradients, 2, job(4, stage))[0] for stage in (0, 3)):
        for ours, expected in zip(first["gradients"], whole["gradients"], strict=True):
            assert relative(ours, expected) < 2e-6

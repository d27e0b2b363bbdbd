"""A ``labels`` job from file to export: it learns, repeats itself, and transformers computes what it says."""

from __future__ import annotations

import csv
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sk
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from capt.finetune import new_rows
from capt.finetune.labels.config import LabelsJob
from capt.finetune.labels.data import read_splits
from capt.finetune.load import load_fine_tuned
from capt.finetune.text_training import build_classifier
from capt.launcher.cli import app
from capt.pretrain.engine.checkpoint import find_checkpoint, read_job
from capt.pretrain.models.hf_folder import read_tensors
from capt.pretrain.retrieval.work import perform
from tests.finetune import glue_mapping, sentence, write_encoder
from tests.runs import training_rows, validations
from tests.support import run_ranks, stopped_at, train_job

KINDS = ("classification", "regression", "multi_label")


def _mapping(folder: Path, kind: str, run: str, **data: Any) -> dict[str, Any]:
    mapping = glue_mapping(
        folder, run={"dir": str(folder / run)}, schedule={"epochs": 8}, batch={"global": 8, "micro": 8},
        validate={"per_epoch": None, "every": 48}, checkpoint={"per_epoch": None},
    )  # fmt: skip
    data = {"train": str(folder / f"{kind}.csv"), "cache": str(folder / "cache"), **data}
    return {**mapping, "task": {"type": "labels"}, "data": data}


LABELS = {
    "classification": {"Yes": "accepted", "No": "refused"},
    "regression": {"Yes": "200", "No": "225.5"},
    "multi_label": {"Yes": '["first"]', "No": '["second"]', "Perhaps": '["second", "first"]'},
}
"""The label of a text by its first word."""


def _write(path: Path, kind: str, count: int, seed: int) -> None:
    """Labelled texts; for regression pairs."""
    generator, pair = random.Random(f"{kind}/{seed}"), kind == "regression"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", *(["text2"] if pair else []), "label"])
        for _ in range(count):
            word, label = generator.choice(list(LABELS[kind].items()))
            second = [sentence(generator, 6)] if pair else []
            writer.writerow([f"{word} {sentence(generator, 6)}", *second, label])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    write_encoder(folder / "encoder")
    for kind in KINDS:
        _write(folder / f"{kind}.csv", kind, 160, 0)
        _write(folder / f"{kind}.more.csv", kind, 25, 1)
        assert run_ranks(train_job, 1, _mapping(folder, kind, f"run_{kind}")) == [0]
    return folder


def _losses(run: Path) -> list[Any]:
    return [(row["step"], row["loss"]) for row in training_rows(run)]


def _reference(kind: str, logits: np.ndarray, job: LabelsJob, labels: np.ndarray) -> dict[str, float]:
    """The metrics as scikit-learn and scipy compute them of the exported model's logits."""
    if kind == "regression":
        scores = logits[:, 0]
        return {
            "pearson": stats.pearsonr(scores, labels).statistic,
            "spearman": stats.spearmanr(scores, labels).statistic,
            "loss": float(np.mean(((scores - labels) / (job.data.scale or 0)) ** 2)),
        }
    predicted = (logits > 0).astype(int) if kind == "multi_label" else logits.argmax(1)
    gold = labels.astype(int)
    result = {"accuracy": sk.accuracy_score(gold, predicted), "macro_f1": sk.f1_score(gold, predicted, average="macro")}
    if kind == "multi_label":
        return {**result, "micro_f1": sk.f1_score(gold, predicted, average="micro")}
    return {**result, "matthews": sk.matthews_corrcoef(gold, predicted)}


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_the_stock_class_of_the_export_computes_the_same(kind: str, folder: Path, tmp_path: Path) -> None:
    run, out = folder / f"run_{kind}", tmp_path / "out"
    trained = load_fine_tuned(run, LabelsJob, "labels", build_classifier)
    best = json.loads((run / "best.json").read_text())
    assert best["metric"] == {"classification": "accuracy", "regression": "pearson", "multi_label": "micro_f1"}[kind]
    assert best["value"] > 0.8
    runner = CliRunner()
    measured = json.loads(runner.invoke(app, ["evaluate", str(run), "--json"]).stdout)
    row = next(row for row in validations(run) if row["step"] == best["step"])
    assert measured["metrics"] == pytest.approx({name: row[name] for name in measured["metrics"]}, abs=1e-6)

    assert runner.invoke(app, ["convert", str(run), str(out), "--to", "hf"]).exit_code == 0
    config = json.loads((out / "config.json").read_text())
    names, problem = {
        "classification": (["accepted", "refused"], "single_label_classification"),
        "regression": (["score"], "regression"),
        "multi_label": (["first", "second"], "multi_label_classification"),
    }[kind]
    assert config["id2label"] == {str(i): name for i, name in enumerate(names)}
    assert config["problem_type"] == problem
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    rows = read_splits(trained.job.data).validation
    given = tokenizer(rows.first, rows.second, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        theirs = model(**given).logits
        ours = trained.model(given["input_ids"], None, padded=True)
    scale, offset = trained.job.data.scale or 1.0, trained.job.data.offset or 0.0
    torch.testing.assert_close((theirs - offset) / scale, ours, atol=1e-5, rtol=1e-5)
    assert rows.labels is not None
    expected = _reference(kind, theirs.numpy().astype(float), trained.job, rows.labels)
    assert {name: measured["metrics"][name] for name in expected} == pytest.approx(expected, abs=1e-4)
    card = (out / "README.md").read_text()
    assert "the labels of" in card
    assert all(name in card for name in names if kind != "regression")
    code = card.split("```python\n")[1].split("```")[0].replace("PATH", str(out))
    exec(code, names_of_card := {"print": lambda _: None})
    assert torch.isfinite(names_of_card["logits"]).all()

    new = tmp_path / "new.csv"
    with new.open("w", newline="") as file:
        columns = ["text"] if rows.second is None else ["text", "text2"]
        csv.writer(file).writerows([columns, *zip(*filter(None, (rows.first, rows.second)), strict=True)])
    predicted = [tmp_path / "run.jsonl", tmp_path / "folder.jsonl"]
    for source, file in zip((run, out), predicted, strict=True):
        done = runner.invoke(app, ["predict", str(source), str(new), "--out", str(file)])
        assert done.exit_code == 0, done.output
    for line, other, logits in zip(*(path.read_text().splitlines() for path in predicted), theirs, strict=True):
        found, again = json.loads(line), json.loads(other)
        if kind == "regression":
            assert found["score"] == pytest.approx(again["score"], rel=1e-5) == pytest.approx(float(logits), rel=1e-5)
            continue
        shares = logits.softmax(0) if kind == "classification" else logits.sigmoid()
        for values in (found, again):
            assert [values[f"probability_{name}"] for name in names] == pytest.approx(shares.tolist(), abs=1e-5)
        labels = [name for name, x in zip(names, logits.tolist(), strict=True) if x > 0]
        expected_label = names[int(logits.argmax())] if kind == "classification" else labels
        assert found["label" if kind == "classification" else "labels"] == expected_label


def _predict(run: Path, file: Path, out: Path) -> int:
    new_rows.WINDOW = 4
    work = {"model": str(run), "file": str(file), "out": str(out), "options": {}}
    predicted: int = perform({"call": "capt.pretrain.retrieval.work:predict_rows", **work})["predicted"]
    return predicted


def test_two_ranks_predict_what_one_does(folder: Path, tmp_path: Path) -> None:
    outs = [tmp_path / f"{world}.csv" for world in (1, 2)]
    for world, out in zip((1, 2), outs, strict=True):
        predicted = run_ranks(_predict, world, folder / "run_classification", folder / "classification.more.csv", out)
        assert predicted == [25] * world
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert len(outs[0].read_text().splitlines()) == 26


@pytest.mark.parametrize("kind", KINDS)
def test_another_file_is_measured(kind: str, folder: Path) -> None:
    command = ["evaluate", str(folder / f"run_{kind}"), "--json", "--data", str(folder / f"{kind}.more.csv")]
    found = json.loads(CliRunner().invoke(app, command).stdout)
    assert found["rows"] == {"dev": 25}
    assert found["metrics"][{"regression": "pearson"}.get(kind, "macro_f1")] > 0.7


def test_other_data_is_refused_at_a_resume(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "multi_label.csv", tmp_path / "multi_label.csv")
    shutil.copytree(folder / "encoder", tmp_path / "encoder")
    mapping = _mapping(tmp_path, "multi_label", "run")
    assert run_ranks(train_job, 1, stopped_at(mapping, 1)) == [75]
    job = read_job(find_checkpoint(tmp_path / "run"))
    assert isinstance(job, LabelsJob)
    assert (job.data.kind, job.data.labels) == ("multi_label", ["first", "second"])
    _write(tmp_path / "multi_label.csv", "multi_label", 160, 2)
    refused = run_ranks(train_job, 1, mapping, True)[0]
    assert "this job's data.train and data.validation is" in str(refused)


def test_adapters_on_modernbert_resume_and_are_merged(tmp_path: Path) -> None:
    """At ZeRO 3, stopped and resumed on another number of ranks. What is measured and exported is the merged encoder,
    whose frozen weights are those of ``model.init``."""
    pytest.importorskip("peft", reason="peft (the extra lora) is not installed")
    init = write_encoder(tmp_path / "encoder", "ModernBertForMaskedLM")
    _write(tmp_path / "classification.csv", "classification", 60, 0)
    mapping = _mapping(tmp_path, "classification", "run")
    mapping["model"] |= {"lora": {"rank": 4, "dropout": 0.2}}
    mapping |= {"engine": {"zero_stage": 3}, "schedule": {"epochs": 3}, "optimizer": {"lr": 1e-2}}
    mapping["validate"] = {"per_epoch": None, "every": 0}
    whole = {**mapping, "run": {**mapping["run"], "dir": str(tmp_path / "whole")}}
    assert run_ranks(train_job, 1, whole) == [0]
    stopped = stopped_at(mapping, 10)
    assert run_ranks(train_job, 1, stopped) == [75]
    assert run_ranks(train_job, 1, mapping, True) == [0]
    assert _losses(tmp_path / "run") == _losses(tmp_path / "whole")
    assert _losses(tmp_path / "run")[-1][1] < _losses(tmp_path / "run")[0][1]

    runner, out = CliRunner(), tmp_path / "out"
    measured = json.loads(runner.invoke(app, ["evaluate", str(tmp_path / "run"), "--json"]).stdout)
    (row,) = validations(tmp_path / "run")
    assert measured["metrics"] == pytest.approx({name: row[name] for name in measured["metrics"]}, abs=1e-5)
    done = runner.invoke(app, ["convert", str(tmp_path / "run"), str(out), "--to", "hf"])
    assert done.exit_code == 0, done.output
    exported, began = read_tensors(out), read_tensors(init)
    assert not [name for name in exported if "lora" in name or "base_layer" in name]
    changed = {name for name, tensor in began.items() if name in exported and not torch.equal(exported[name], tensor)}
    assert {name.rpartition(".layers.")[2][2:] for name in changed if ".layers." in name} == {
        "attn.Wqkv.weight", "attn.Wo.weight", "mlp.Wi.weight", "mlp.Wo.weight",
    }  # fmt: skip
    assert all(".layers." in name or name.startswith("head.") for name in changed)


def test_bad_data_is_exit_code_2_and_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("text,label\na,x\nb\n")
    message = run_ranks(train_job, 1, {**_mapping(folder, "classification", "bad", train=str(tmp_path / "bad.csv"))})[0]
    assert message == (
        f"DataError: {tmp_path / 'bad.csv'}, line 3: 1 cells, and 2 in the first line ('text', 'label'); put a "
        'text with a separator or a quote between double quotes, each quote in it doubled: "He said ""no"""'
    )

"""Predictions of new rows: transformers' own for every family, whole after any kill, in the order of the file."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from capt.finetune import new_rows
from capt.finetune.batches import TextRows
from capt.finetune.encoding import encode_texts
from capt.finetune.new_rows import RowWindow
from capt.finetune.text_export import _Logits, _onnx
from capt.finetune.text_predictor import TextPredictor, command, load_text_classifier
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError
from capt.pretrain.convert.onnx import write_graph
from capt.pretrain.data.tables import read_file
from capt.tokenizer.encode import load_tokenizer
from tests.finetune import sentence, write_encoder
from tests.support import Capt

NAMES = {0: "bad", 1: "so so", 2: "good"}
FAMILIES: list[tuple[str, dict[str, Any], bool]] = [
    ("BertForSequenceClassification", {"id2label": NAMES}, False),
    ("BertForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}, True),
    ("RobertaForSequenceClassification", {"id2label": NAMES, "problem_type": "multi_label_classification"}, True),
    ("XLMRobertaForSequenceClassification", {"num_labels": 1}, True),
    ("DistilBertForSequenceClassification", {"id2label": NAMES, "dim": 32, "hidden_dim": 48, "n_heads": 2}, False),
    ("ElectraForSequenceClassification", {"num_labels": 1, "embedding_size": 32}, True),
    ("AlbertForSequenceClassification", {"id2label": NAMES, "embedding_size": 32}, True),
    ("MPNetForSequenceClassification", {"id2label": NAMES}, False),
    ("CamembertForSequenceClassification", {"id2label": NAMES}, True),
    ("DebertaV2ForSequenceClassification", {"id2label": NAMES, "problem_type": "multi_label_classification"}, False),
    ("ModernBertForSequenceClassification", {"num_labels": 1}, True),
]
"""A class, what its head says, and whether it is given pairs."""


def texts(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [sentence(generator) for _ in range(count)]


@pytest.mark.parametrize("case", FAMILIES, ids=[f"{cls}-{n}" for n, (cls, *_) in enumerate(FAMILIES)])
def test_a_folder_of_each_family_predicts_what_the_pipeline_of_transformers_does(
    case: tuple[str, dict[str, Any], bool], tmp_path: Path
) -> None:
    cls, head, pair = case
    folder = write_encoder(tmp_path / "model", cls, **head)
    first, second = texts(9), texts(9, 1) if pair else None
    types = cls.startswith(("Bert", "Electra", "Albert", "DebertaV2"))
    # One file for both: of a vocabulary alone some classes of transformers make another tokenizer.
    load_tokenizer(folder).save(folder, model_max_length=64, types=types)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    classifier = load_text_classifier(folder)
    given = tokenizer(first, second, padding=True, truncation=True, max_length=classifier.length, return_tensors="pt")
    with torch.no_grad():
        theirs = model(**given).logits
    ours, _ = classifier.logits(first, second, batch=4)
    torch.testing.assert_close(torch.from_numpy(ours), theirs, atol=1e-5, rtol=1e-5)
    many = head.get("problem_type") == "multi_label_classification"
    shares = theirs.sigmoid() if many or theirs.shape[1] == 1 else theirs.softmax(1)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)
    for row, (found, logits) in enumerate(zip(classifier.predict(first, second, batch=4), theirs, strict=True)):
        if cls.startswith("DistilBert"):
            (piped,) = classify([first[row]])
            assert found.probabilities == pytest.approx({each["label"]: each["score"] for each in piped}, abs=1e-5)
        if theirs.shape[1] == 1:
            expected = logits if head.get("problem_type") == "regression" else logits.sigmoid()
            assert found.score == pytest.approx(float(expected), abs=1e-5)
            continue
        assert list(found.probabilities) == list(NAMES.values())
        assert list(found.probabilities.values()) == pytest.approx(shares[row].tolist(), abs=1e-5)
        chosen = [name for name, x in zip(NAMES.values(), logits.tolist(), strict=True) if x > 0]
        assert (found.labels, found.label) == ((tuple(chosen), None) if many else ((), NAMES[int(logits.argmax())]))


def test_the_score_of_a_reranker_is_that_of_its_own_library(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs the extra export")
    folder = write_encoder(tmp_path / "model", "BertForSequenceClassification", num_labels=1)
    pairs = list(zip(texts(7), texts(7, 1), strict=True))
    paths = {"Identity": "torch.nn.modules.linear.Identity", "Sigmoid": "torch.nn.modules.activation.Sigmoid"}
    cases = (("default", None), ("Identity", None), ("Sigmoid", "regression"), ("Identity", "regression"))
    for activation, problem in cases:
        keys = json.loads((folder / "config.json").read_text())
        keys["sentence_transformers"] = {"activation_fn": paths[activation]} if activation in paths else {}
        keys["problem_type"] = problem
        (folder / "config.json").write_text(json.dumps(keys))
        theirs = sentence_transformers.CrossEncoder(str(folder), device="cpu").predict(pairs)
        ours = [each.score for each in load_text_classifier(folder).predict(*map(list, zip(*pairs, strict=True)))]
        assert ours == pytest.approx(theirs.tolist(), abs=1e-5), (activation, problem)


def test_a_regression_with_several_outputs_is_that_of_the_pipeline(tmp_path: Path) -> None:
    head = {"id2label": NAMES, "problem_type": "regression"}
    folder = write_encoder(
        tmp_path / "model", "DistilBertForSequenceClassification", dim=32, hidden_dim=48, n_heads=2, **head
    )
    load_tokenizer(folder).save(folder, model_max_length=64, types=False)
    rows = write_rows(tmp_path / "new.csv", 5)
    command(folder, tmp_path / "new.csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert list(written[0]) == ["ID", "text", *(f"score_{name}" for name in NAMES.values())]
    classify = pipeline("text-classification", model=str(folder), tokenizer=str(folder), top_k=None)
    for row, text in zip(written, rows, strict=True):
        expected = {f"score_{each['label']}": each["score"] for each in classify([text])[0]}
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("bert") / "model", "BertForSequenceClassification", id2label=NAMES)


def write_rows(path: Path, count: int) -> list[str]:
    """A table with ids, texts and a column that nobody reads."""
    rows = texts(count)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["ID", "other", "text"], *([f"r{i}", i, row] for i, row in enumerate(rows))])
    return rows


def test_every_format_holds_the_same_rows_in_the_order_of_the_file(
    capt: Capt, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_rows, "WINDOW", 8)
    rows = write_rows(tmp_path / "new.csv", 21)
    columns = ["ID", "text", "label", *(f"probability_{name}" for name in NAMES.values())]
    tables = {}
    for suffix in ("csv", "jsonl", "parquet"):
        out = tmp_path / f"out.{suffix}"
        code, said, err = capt("predict", str(model), str(tmp_path / "new.csv"), "--out", str(out))
        assert (code, err) == (0, "")
        shares = sorted(Counter(row.cells["label"] for row in read_file(out)).items())
        counts = ", ".join(f"{name}: {count}" for name, count in shares)
        assert said == f"{out}: 21 rows ({counts})\n"
        tables[suffix] = [row.cells for row in read_file(out)]
        assert [row["text"] for row in tables[suffix]] == rows
        assert [row["ID"] for row in tables[suffix]] == [f"r{i}" for i in range(21)]
        assert all(list(row) == columns for row in tables[suffix])
    assert tables["jsonl"] == tables["parquet"]
    assert [{name: str(cell) for name, cell in row.items()} for row in tables["jsonl"]] == tables["csv"]
    expected = load_text_classifier(model).predict(rows)
    assert [row["label"] for row in tables["jsonl"]] == [each.label for each in expected]
    for row, each in zip(tables["jsonl"], expected, strict=True):
        assert [row[name] for name in columns[3:]] == pytest.approx(list(each.probabilities.values()), abs=1e-6)
    assert pyarrow.parquet.read_schema(tmp_path / "out.parquet").types[-1] == "double"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv", "out.csv", "out.jsonl", "out.parquet"]


def test_what_was_predicted_before_a_kill_is_not_predicted_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_rows, "WINDOW", 4)
    write_rows(tmp_path / "new.csv", 14)
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    command(model, tmp_path / "new.csv", whole)
    predict, calls = TextPredictor.predict, []

    def killed(self: TextPredictor, rows: Sequence[Any]) -> RowWindow:
        calls.append(len(rows))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return predict(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(TextPredictor, "predict", killed)
        with pytest.raises(KeyboardInterrupt):
            command(model, tmp_path / "new.csv", parts)
        assert not parts.exists()
        assert command(model, tmp_path / "new.csv", parts)["predicted"] == 6
        assert parts.read_bytes() == whole.read_bytes()
        # Another file under the same name begins again.
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            command(model, tmp_path / "new.csv", parts)
        write_rows(tmp_path / "new.csv", 13)
        assert command(model, tmp_path / "new.csv", parts)["predicted"] == 13
    assert len(parts.read_text().splitlines()) == 13


@pytest.mark.parametrize(
    ("table", "options", "says"),
    [
        ("text\na b\n\n", [], "line 3: 'text' is empty; every row needs its text"),
        ("first,b\nx,y\n", [], "none of its columns ('first', 'b') has a usual name of texts; --text NAME names it"),
        ("text\na\n", ["--text", "txt"], "no column 'txt', which --text names; did you mean 'text'?"),
        ("label\na\n", ["--text", "label"], "the column 'label' has the name of a prediction; rename it"),
        ("text\na\n", ["--regions", "store"], "--regions has no meaning for a checkpoint of task labels"),
        ("text\na\n", ["--out", "x.tsv"], "x.tsv: no writer of tables for such a name; end it in one of .jsonl"),
        ("text\na\n", ["--out", "x.csv.gz"], "x.csv.gz: no writer of tables"),
        ("text\na\n", ["--out", "new.csv"], "new.csv is read, and would be overwritten"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(
    capt: Capt, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, options: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.csv").write_text(table)
    words = options if "--out" in options else ["--out", "out.csv", *options]
    code, out, err = capt("predict", str(model), "new.csv", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_what_is_no_classifier_is_said(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder", "BertModel")
    with pytest.raises(CheckpointError, match="ForSequenceClassification, and predicts no labels"):
        load_text_classifier(encoder)
    modern = write_encoder(tmp_path / "modern", "ModernBertForSequenceClassification", classifier_pooling="mean")
    with pytest.raises(CheckpointError, match="classifier_pooling is 'mean'"):
        load_text_classifier(modern)
    classifier = load_text_classifier(write_encoder(tmp_path / "bert", "BertForSequenceClassification"))
    assert classifier.predict([]) == []
    long = classifier.logits(["the river " * 100])
    assert long[1] == 1
    with pytest.raises((ConfigError, DataError), match="no writer"):
        command(tmp_path / "bert", tmp_path / "encoder" / "vocab.txt", tmp_path / "out.npy")


def test_a_graph_reads_masks_and_token_types(model: Path, tmp_path: Path) -> None:
    """Pairs of several lengths with padding, one alone, and a row without any token."""
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    classifier = load_text_classifier(model)
    graph = _Logits(classifier.model, 2.0, 1.0)
    encoder = classifier.model.encoder.model
    write_graph(graph, tmp_path, graph.inputs, ("logits",), encoder.max_positions, encoder.pad_id)
    encoded = encode_texts(texts(3), texts(3, 1), classifier.tokenizer, 64, source=None, types=True)
    rows = TextRows(encoded, None, encoder.pad_id, types=True)
    for chosen in ([0, 1, 2], [1]):
        inputs = rows.batch(np.array(chosen)).inputs
        assert inputs.types is not None
        given = {"input_ids": inputs.tokens, "attention_mask": (inputs.tokens != encoder.pad_id).long()}
        given["token_type_ids"] = inputs.types
        with torch.no_grad():
            torch.testing.assert_close(_onnx(tmp_path)(given), 2 * classifier.model(*inputs) + 1, atol=1e-5, rtol=1e-5)
        nothing = {name: torch.zeros_like(x) for name, x in given.items()}
        assert torch.isfinite(_onnx(tmp_path)(nothing)).all()

"""The functions of the library: vectors of ten kinds of folders, searches, options; nothing heavy is imported early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capt
from capt.library import _as_overrides
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, UserError
from tests.finetune import write_encoder
from tests.unit.retrieval.test_folders import TEXTS, write_folder

KINDS: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any]]] = {
    "BERT, mean": ("BertModel", {}, {}),
    "BERT, cls": ("BertModel", {"pooling": {"pooling_mode_cls_token": True}}, {}),
    "RoBERTa": ("RobertaModel", None, {}),
    "MPNet": ("MPNetModel", {"modules": False}, {}),
    "DeBERTa": ("DebertaV2Model", {"pooling": {"pooling_mode_cls_token": True}}, {}),
    "ModernBERT": ("ModernBertModel", {}, {}),
    "Dense": ("BertModel", {"more": ["Dense"]}, {}),
    "Normalize": ("ElectraModel", {"more": ["Normalize"]}, {}),
    "prompts": ("BertModel", {}, {"query": "no the ", "document": "yes ", "topic": "and "}),
    "XLM-R, max_seq_length": ("XLMRobertaModel", {"sentence": {"max_seq_length": 9}}, {}),
}
"""The encoder, how the folder of sentence-transformers is written (None: there is no such folder), and its prompts."""


def test_vectors_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs the extra export")
    encoders: dict[str, Path] = {}
    for number, (kind, (cls, structure, prompts)) in enumerate(KINDS.items()):
        if cls not in encoders:
            encoders[cls] = write_encoder(tmp_path / cls, cls)
            capt_tokenizer(encoders[cls])
        folder = encoders[cls]
        if structure is not None:
            default = "topic" if prompts else None
            folder = write_folder(tmp_path / str(number), folder, prompts, default, structure)
        theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        ours = capt.load(folder)
        texts = [*TEXTS, "the river runs and " * 30]
        for prompt, expected in (
            (None, theirs.encode(texts)),
            ("query", theirs.encode_query(texts)),
            ("document", theirs.encode_document(texts)),
            ("no the river ", theirs.encode(texts, prompt="no the river ")),
            *([("topic", theirs.encode(texts, prompt_name="topic"))] if prompts else []),
        ):
            found = ours.encode(texts, prompt)
            assert found.dtype == np.float32
            assert np.abs(found - expected).max() < 1e-5, (kind, prompt)
        assert np.array_equal(ours.encode(texts[0]), ours.encode(texts[:1])[0])
        assert ours.similarity(texts, texts[:2]) == pytest.approx(
            theirs.similarity(theirs.encode(texts), theirs.encode(texts[:2])).numpy(), abs=1e-5
        )


def capt_tokenizer(folder: Path) -> None:
    """Write the tokenizer as one file: of a vocabulary alone transformers makes its own for some classes."""
    from capt.tokenizer.encode import load_tokenizer

    types = folder.name in ("BertModel", "ElectraModel", "DebertaV2Model")
    load_tokenizer(folder).save(folder, model_max_length=64, types=types)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("library") / "encoder", "BertModel")


def test_a_search_is_exact_and_keeps_the_order_of_equal_texts(folder: Path) -> None:
    model, documents = capt.load(folder), ["a stone", "the river runs", "a stone", "no bird sings"]
    (found, other) = model.search(["a stone", "no bird sings"], documents, top=3)
    assert [each.text for each in found[:2]] == ["a stone", "a stone"]
    assert found[0].similarity == found[1].similarity == pytest.approx(1.0)
    assert other[0].text == "no bird sings"
    rows = model.similarity(["no bird sings"], documents)[0]
    assert [each.similarity for each in other] == pytest.approx(sorted(rows, reverse=True)[:3], abs=1e-6)
    assert model.search(["a"], [], top=3) == [[]]
    assert model.encode([]).shape == (0, 32)


def test_an_index_is_searched_with_the_model_that_built_it(folder: Path, tmp_path: Path) -> None:
    from capt.pretrain.retrieval.index_build import build_index

    (tmp_path / "texts.txt").write_text("the river runs over a stone\n")
    (tmp_path / "more.txt").write_text("no bird sings\n")
    build_index([tmp_path / "texts.txt", tmp_path / "more.txt"], folder, tmp_path / "index")
    ((hit,), (other,)) = capt.load(folder).search(["stone river", "bird"], tmp_path / "index", top=1)
    assert "river" in hit.passage
    assert "bird" in other.passage
    with pytest.raises(ConfigError, match="texts are searched by vectors"):
        capt.load(folder).search(["a"], ["b"], mode="bm25")


def test_what_a_model_has_not_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an encoder, which predicts nothing"):
        capt.load(folder).predict(["a"])
    classifier = capt.load(write_encoder(tmp_path / "classifier", "BertForSequenceClassification", num_labels=1))
    (score,) = classifier.predict([("a stone", "the river")])
    for wrong in ("one text", ["one", ("a", "b")], [("a",)], [("a", "b", "c")], [("a", None)]):
        with pytest.raises(DataError, match="a list of texts, or a list of pairs"):
            classifier.predict(wrong)  # type: ignore[arg-type]
    assert score.score is not None
    assert score.label is None
    with pytest.raises(ConfigError, match="a classifier, which has no encode but predict"):
        classifier.encode(["a"])
    with pytest.raises(ConfigError, match="takes no pooling"):
        capt.load(tmp_path / "classifier", pooling="cls")
    with pytest.raises(CheckpointError, match="no such folder"):
        capt.load(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no option 'bm52'; did you mean 'bm25'"):
        capt.evaluate(folder, bm52=True)
    with pytest.raises(ConfigError, match="bm25=3 is not of the type"):
        capt.evaluate(folder, bm25=3)
    with pytest.raises(ConfigError, match="no option 'margins'; did you mean 'margin'"):
        capt.mine("pairs.jsonl", model=folder, out=tmp_path / "out", margins=0.1)
    with pytest.raises(UserError, match="did you mean the shipped job 'capt_tiny'"):
        capt.train("capt_tinny")


def test_values_become_overrides() -> None:
    given = {
        "run": {"dir": Path("runs/a"), "seed": 3},
        "data.files": ["a,b.txt"],
        "model": {"init": "123", "lora": {"rank": 2}},
    }
    assert list(_as_overrides(given)) == [
        "run.dir=runs/a", "run.seed=3", 'data.files=["a,b.txt"]', 'model.init="123"', 'model.lora={"rank": 2}'
    ]  # fmt: skip


def test_nothing_heavy_is_imported_before_the_first_call() -> None:
    code = (
        "import sys, capt; capt.load, capt.train, capt.evaluate, capt.mine; "
        "print([name for name in ('torch', 'numpy', 'pydantic', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    for name in capt.__all__:
        assert getattr(capt, name).__name__ == name

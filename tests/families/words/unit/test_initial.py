"""Tables that start from the vectors of a file or of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.config.load import load_job
from capt.pretrain.embeddings.config import EmbeddingJob
from capt.pretrain.embeddings.initial import InitialVectors, build_tables, with_initial_width
from capt.pretrain.embeddings.load import load_embeddings
from capt.pretrain.embeddings.tables import EmbeddingTables
from capt.pretrain.embeddings.task import EmbeddingTask
from capt.pretrain.embeddings.vectors import WordVectors
from tests.families.words.unit.runs import make_run, tables

INDEX = {"the": 0, "sea": 1, "queen": 2, "of": 3}
LINES = "queen 1 2 3\nwhale 9 9 9\nthe -1 0.5 0\n"


def _file(folder: Path, text: str = LINES) -> Path:
    path = folder / "vectors.txt"
    path.write_text(text)
    return path


def _tables(*, random_context: bool = False) -> EmbeddingTables:
    return EmbeddingTables(len(INDEX), 3, seed=1, random_context=random_context)


def test_words_of_the_text_get_their_vectors_and_the_others_keep_theirs(tmp_path: Path) -> None:
    tables, before = _tables(), _tables()
    initial = InitialVectors(_file(tmp_path))
    assert initial.width == 3
    assert initial.words_beside(INDEX, keep=True) == ["whale"]
    assert initial.words_beside(INDEX, keep=False) == []
    initial.fill(tables, INDEX, "zeros")
    assert tables.input[0].tolist() == [-1, 0.5, 0]
    assert tables.input[2].tolist() == [1, 2, 3]
    assert tables.input[[1, 3]].equal(before.input[[1, 3]])
    assert not tables.context.any()


def test_context_is_a_copy_or_stays_random(tmp_path: Path) -> None:
    path = _file(tmp_path)
    copied = _tables()
    InitialVectors(path).fill(copied, INDEX, "copy")
    assert copied.context[2].tolist() == [1, 2, 3]
    assert not copied.context[[1, 3]].any()
    random = _tables(random_context=True)
    InitialVectors(path).fill(random, INDEX, "random")
    assert random.context.equal(_tables(random_context=True).context)


def _job(path: Path, **model: object) -> EmbeddingJob:
    job = {"task": {"type": "ace"}, "data": {"files": ["text.txt"]}, "model": {"init": str(path), **model}}
    return EmbeddingJob.model_validate(job)


def test_width_is_that_of_the_vectors(tmp_path: Path) -> None:
    path = _file(tmp_path)
    initial = InitialVectors(path)
    assert with_initial_width(_job(path), initial).model.dim == 3
    assert with_initial_width(_job(path, dim=3), initial).model.dim == 3
    with pytest.raises(ConfigError, match=r"model.dim 300: the vectors of .*vectors.txt have 3 numbers"):
        with_initial_width(_job(path, dim=300), initial)


def test_generator_starts_like_the_discriminator(tmp_path: Path) -> None:
    initial = InitialVectors(_file(tmp_path))
    job = with_initial_width(_job(initial.source, context_init="copy"), initial)
    discriminator = build_tables(job, INDEX, initial)
    generator = build_tables(job, INDEX, initial, "generator", random_context=True)
    assert generator.input[[0, 2]].equal(discriminator.input[[0, 2]])
    assert generator.context[[0, 2]].equal(discriminator.context[[0, 2]])


def test_without_vectors_the_seed_decides(tmp_path: Path) -> None:
    job = EmbeddingJob.model_validate({"task": {"type": "ace"}, "data": {"files": ["text.txt"]}})
    assert not build_tables(job, INDEX).context.any()
    assert build_tables(job, INDEX, name="generator", random_context=True).context.any()


def test_a_run_is_read_once_for_its_width_and_both_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "first", {"discriminator": tables(1)})
    (tmp_path / "text.txt").write_text("the king the queen\n" * 400)
    read: list[Path] = []

    def counted(path: Path) -> WordVectors:
        read.append(path)
        return load_embeddings(path)

    monkeypatch.setattr("capt.pretrain.embeddings.initial.load_embeddings", counted)
    own = [
        f"model.init={run}", f"data.files={tmp_path / 'text.txt'}", f"data.cache={tmp_path / 'cache'}",
        "data.workers=1", "negatives.number=2", f"run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    (tmp_path / "run").mkdir()
    modules = EmbeddingTask(load_job("ace/finetune", own), tmp_path / "run").build_modules()
    assert modules["generator"].input.shape == (3, 4)
    assert torch.equal(modules["discriminator"].input[:3], modules["generator"].input)
    assert read == [run]


def test_other_words_are_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, "Wal 1 2 3\nMeer 4 5 6\n")
    with pytest.raises(DataError, match=r"none of its words is among the 4 of the text"):
        InitialVectors(path).words_beside(INDEX, keep=True)


def test_vectors_are_read_only_arrays(tmp_path: Path) -> None:
    """word2vec's binary rows are views of what was read; they are copied into the table."""
    path = tmp_path / "vectors.bin"
    rows = np.array([[1, 2, 3], [4, 5, 6]], dtype="<f4")
    path.write_bytes(b"2 3\nqueen " + rows[0].tobytes() + b"\nof " + rows[1].tobytes() + b"\n")
    tables = _tables()
    InitialVectors(path).fill(tables, INDEX, "zeros")
    assert tables.input[[2, 3]].tolist() == rows.tolist()

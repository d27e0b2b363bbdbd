from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.unit.tokenizer.corpus import docstrings, lines
from tokenizer.commands import EncodeReport, encode_command, export_command, train_command
from tokenizer.encode import load_tokenizer
from tokenizer.errors import DataError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt.gz"
    path.write_bytes(gzip.compress("\n".join(lines()[:5000]).encode()))
    return path


def test_train_encode_export(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read: list[int] = []
    report = train_command([corpus], tmp_path / "t", progress=read.append, vocab_size=800, type="bpe")
    assert report.vocab_size == 800
    assert report.lines == 5000
    assert sum(read) == corpus.stat().st_size

    tokenizer = load_tokenizer(tmp_path / "t")
    expected = [ids.tolist() for ids in tokenizer.encode_batch(lines()[:5000])]
    done = encode_command(tmp_path / "t", [corpus], tmp_path / "new" / "ids.jsonl")
    rows = [json.loads(row) for row in (tmp_path / "new" / "ids.jsonl").read_text().splitlines()]
    assert rows == expected
    assert done == EncodeReport(lines=5000, tokens=sum(map(len, expected)), unknown=0)

    wrapped = encode_command(tmp_path / "t", [corpus], wrap=True)
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert rows == [[0, *row, 2] for row in expected]
    assert wrapped.tokens == done.tokens + 2 * 5000


def test_a_failed_encode_leaves_nothing(tmp_path: Path, trained: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"fine\n" * 5000 + b"\xff\n")
    with pytest.raises(DataError, match="line 5001"):
        encode_command(trained, [tmp_path / "in.txt"], tmp_path / "ids.jsonl")
    assert [p.name for p in tmp_path.iterdir()] == ["in.txt"]


def test_export_of_a_model_and_of_a_folder(tmp_path: Path, trained: Path, corpus: Path) -> None:
    first = export_command(trained / "sentencepiece.model", tmp_path / "a", files=[corpus], model_max_length=64)
    assert first.sentencepiece_lines > 2000
    assert first.transformers_lines > 2000
    second = export_command(tmp_path / "a", tmp_path / "b")
    assert second.sentencepiece_lines == 0
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())["model_max_length"] == 64
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "corpus.txt.gz"]


def test_one_bad_option_does_not_train(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(docstrings()[0])
    with pytest.raises(DataError, match="too little text"):
        train_command([tmp_path / "in.txt"], tmp_path / "t", vocab_size=5000)
    assert not (tmp_path / "t").exists()

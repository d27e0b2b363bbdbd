"""Rows on disk are those in memory, written once for all ranks; prompts of rows; what cannot be meant is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.verification import Verifier
from capt.pretrain.pairs.data_config import PairData, PairSource
from capt.pretrain.pairs.forms import read_pairs
from capt.pretrain.pairs.prepare import encode_source, prepare_source
from capt.tokenizer.encode import TextTokenizer, load_tokenizer
from tests.finetune import write_vocabulary
from tests.pairs import write_pairs


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_vocabulary(folder)
    return load_tokenizer(folder)


def _source(path: Path, **settings: Any) -> PairSource:
    settings = {"sequence_length": 24, **settings}
    (source,) = PairData(files=[str(path)], **settings).each()
    return source


def test_rows_on_disk_are_those_in_memory(
    tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_pairs(tmp_path / "pairs.jsonl", 60, positives=2, negatives=3)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, *lines[:5]]) + "\n")  # texts that come again have one number
    source = _source(path, negatives=2)
    here = encode_source(source, read_pairs([path]), tokenizer, 64)
    assert len(here.queries) == 60
    caplog.clear()
    there = prepare_source(source, [path], 0.0, tokenizer, 64, Verifier(tmp_path / "cache")).train
    assert there is not None
    assert there.digest == here.digest
    for side in ("queries", "documents"):
        ours, theirs = getattr(here, side), getattr(there, side)
        assert not theirs.ids.flags.owndata, "mapped"
        for name in ("ids", "starts", "keys"):
            assert (getattr(ours, name) == getattr(theirs, name)).all()
    said = [record.message for record in caplog.records if "repeat" in record.message]
    assert len(said) == 1

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr("capt.pretrain.pairs.prepare.read_pairs", never)
    caplog.clear()
    again = prepare_source(source, [path], 0.0, tokenizer, 64, Verifier(tmp_path / "cache")).train
    assert again is not None
    assert again.digest == here.digest
    assert any("repeat" in record.message for record in caplog.records), "what was found is said at every start"
    with pytest.raises(AssertionError, match="read again"):
        prepare_source(_source(path, negatives=1), [path], 0.0, tokenizer, 64, Verifier(tmp_path / "cache"))
    (damaged,) = (tmp_path / "cache" / "pairs").glob("*/train/queries_ids.bin")
    whole = damaged.read_bytes()
    damaged.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(DataError, match=r"train: damaged: remove .*, it is then written anew"):
        prepare_source(source, [path], 0.0, tokenizer, 64, Verifier(tmp_path / "cache"))
    damaged.write_bytes(b"12")
    with pytest.raises(
        DataError, match=r"queries_ids.bin is damaged: .*found 2 bytes: remove .*, it is then written anew"
    ):
        prepare_source(source, [path], 0.0, tokenizer, 64, Verifier(tmp_path / "cache"))


def test_a_beir_folder_is_read_in_the_split_that_the_job_names(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """``data.split`` for all sources, and a source's own; each split is a set of rows of its own in the cache."""
    folder = tmp_path / "set"
    (folder / "qrels").mkdir(parents=True)
    for name in ("corpus", "queries"):
        rows = [{"_id": str(i), "text": f"{name} {i}"} for i in range(6)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, count in (("test", 6), ("dev", 1)):
        judged = [f"{i}\t{i}\t1\n" for i in range(count)]
        (folder / "qrels" / f"{name}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    cache = Verifier(tmp_path / "cache")
    found = [
        prepare_source(source, [folder], 0.0, tokenizer, 64, cache).train
        for source in (_source(folder, split="test"), _source(folder, split="dev"))
    ]
    assert [None if rows is None else len(rows) for rows in found] == [6, 1]
    mixed = {"sources": [{"name": "a", "files": [str(folder)], "split": "dev"}], "split": "test"}
    (own,) = PairData.model_validate(mixed).each()
    assert own.split == "dev"
    with pytest.raises(DataError, match=r"train\.tsv: no such file; split=train is chosen, and there are dev, test"):
        prepare_source(_source(folder), [folder], 0.0, tokenizer, 64, cache)


def test_a_prompt_of_a_row_stands_in_place_of_the_sources(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Its tokens come on top of the length, as those of the source do; the key is that of the text alone."""
    path, text = tmp_path / "pairs.jsonl", "river stone house door child book letter night bird"
    extras: list[dict[str, str]] = [{}, {"prompt": "a "}, {"prompt": ""}]
    texts = [text, f" {text}", f"{text} "]  # of one key
    rows = [{"query": texts[i], "pos": [f"road {i}"], **extra} for i, extra in enumerate(extras)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    source = _source(path, prompts={"query": "the tree "}, query_length=12)
    found = encode_source(source, read_pairs([path]), tokenizer, 64)
    for number, prompt in enumerate(("the tree ", "a ", "")):
        before, whole = tokenizer.encode_batch([prompt, prompt + texts[number]])
        expected = [tokenizer.special.bos, *whole[: 10 + len(before)], tokenizer.special.eos]
        assert found.queries.tokens(np.array([number]))[0].tolist() == expected
    assert len(set(found.queries.keys.tolist())) == 1
    path.write_text(json.dumps({**rows[0], "prompt": "the river " * 9}) + "\n")
    with pytest.raises(ValueError, match=r"pairs.jsonl, line 1: the prompt 'the river .* has \d+ tokens"):
        encode_source(source, read_pairs([path]), tokenizer, 64)


_SCORED = {"sentence1": "river", "sentence2": "road", "score": 3.0}
_PLAIN = {"query": "river", "pos": ["road"]}


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ([_SCORED], {"loss": "contrast"}, "1: two texts and their score, and source pairs has the loss contrast"),
        ([_PLAIN], {"loss": "cosent"}, "1: no score, and source pairs has the loss cosent"),
        ([_SCORED], {"loss": "cosine"}, "1: score 3 is not a cosine, which is from -1 to 1: divide the scores"),
        ([_PLAIN], {"view": "corrupted"}, "1: a row of two texts, and source pairs has the view corrupted"),
    ],
)
def test_rows_that_do_not_go_with_their_source(
    tmp_path: Path, tokenizer: TextTokenizer, rows: list[dict[str, Any]], settings: dict[str, Any], said: str
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    with pytest.raises(DataError, match=said):
        encode_source(_source(path, **settings), read_pairs([path]), tokenizer, 64)

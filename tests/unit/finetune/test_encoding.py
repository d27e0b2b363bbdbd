"""Texts and pairs become the ids that transformers gives them, cut in the same places."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from capt.finetune import encoding
from capt.finetune.batches import TextRows, evaluation_batches
from capt.finetune.encoding import EncodedTexts, encode_texts, truncated_lengths
from capt.finetune.glue.files import read_split
from capt.finetune.glue.task import GlueFineTuning
from capt.finetune.glue.tasks import glue_task
from capt.finetune.order import ExampleOrder
from capt.pretrain.base.errors import DataError
from capt.pretrain.config.load import job_from_mapping
from capt.tokenizer.encode import TextTokenizer, load_tokenizer
from tests.finetune import glue_mapping, sentence, write_encoder, write_vocabulary


@pytest.fixture(scope="module", params=[False, True], ids=["roberta", "bert"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_vocabulary(folder / "raw", request.param)
    load_tokenizer(folder / "raw").save(folder / "saved")
    return folder / "saved"


def _texts(seed: int, count: int = 60) -> list[str]:
    generator = random.Random(seed)
    return [sentence(generator, 30) for _ in range(count)]


def _rows(encoded: EncodedTexts) -> list[list[int]]:
    return [encoded.ids[a:b].tolist() for a, b in zip(encoded.starts[:-1], encoded.starts[1:], strict=True)]


@pytest.mark.parametrize("length", [8, 21, 22, 64])
def test_ids_are_those_of_transformers(folder: Path, length: int) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    first, second = _texts(1), _texts(2)
    for texts in ((first,), (first, second)):
        second_texts = texts[1] if len(texts) > 1 else None
        encoded = encode_texts(texts[0], second_texts, load_tokenizer(folder), length, source="x", types=True)
        expected = theirs(*texts, truncation="longest_first", max_length=length)
        assert _rows(encoded) == expected["input_ids"]
        rows = TextRows(encoded, None, theirs.pad_token_id, types=True)
        for numbers, batch in evaluation_batches(rows, 7):
            padded = theirs.pad({"input_ids": [expected["input_ids"][i] for i in numbers]}, return_tensors="pt")
            assert batch.inputs.tokens.tolist() == padded["input_ids"].tolist()
            assert batch.inputs.padded == bool((padded["attention_mask"] == 0).any())
            if "token_type_ids" in expected:
                width = batch.inputs.tokens.shape[1]
                types = [expected["token_type_ids"][i] for i in numbers]
                assert batch.inputs.types is not None
                assert batch.inputs.types.tolist() == [row + [0] * (width - len(row)) for row in types]


PAIRS = {
    "<s> $A </s> <s> $B </s>": True, "<s> $A </s> <s>:1 $B:1 </s>:1": True, "<s> $A </s> $B:1 </s>:1": True,
    "<s> $A $B": True, "<s> $A </s>:1 $B:1": True, "$A $B </s>:1": True, "<s> $A <pad> <pad> <pad> $B </s> <s>": True,
    "<s> $A </s> $B:1 </s>": "types", "<s> $B </s> $A </s>": "once", "<s> $A $A $B": "once",
}  # fmt: skip
"""Templates of a pair; what is refused of those that no row here can follow."""


def test_a_pair_gets_the_template_of_its_folder(tmp_path: Path) -> None:
    """AutoTokenizer puts pairs together so; texts alone are read whatever the template of a pair is."""
    write_vocabulary(tmp_path / "raw")
    load_tokenizer(tmp_path / "raw").save(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    special = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>", "<pad>")]
    first, second = _texts(1, 12), _texts(2, 12)
    for pair, outcome in PAIRS.items():
        backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=special)
        backend.save(str(tmp_path / "tokenizer.json"))
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        ours = load_tokenizer(tmp_path)
        alone = encode_texts(first, None, ours, 20, source="x")
        assert _rows(alone) == theirs(first, truncation=True, max_length=20)["input_ids"]
        for length in (9, 20, 90):
            expected = theirs(first, second, truncation="longest_first", max_length=length, return_token_type_ids=True)
            for types in (False, True):
                if outcome == "once" or (outcome == "types" and types):
                    with pytest.raises(DataError, match=r"post_processor of tokenizer\.json"):
                        encode_texts(first, second, ours, length, source="x", types=types)
                    continue
                encoded = encode_texts(first, second, ours, length, source="x", types=types)
                assert _rows(encoded) == expected["input_ids"], pair
                ends = encoded.lengths if not types else encoded.seconds
                found = [[0] * n + [1] * (len(row) - n) for n, row in zip(ends, _rows(encoded), strict=True)]
                assert not types or found == expected["token_type_ids"], pair


@pytest.mark.parametrize("room", [2, 7, 8])
def test_the_longer_text_is_cut_first(room: int) -> None:
    grid = np.arange(12)
    a, b = (x.reshape(-1) for x in np.meshgrid(grid, grid))
    for n, m, keep_a, keep_b in zip(a, b, *truncated_lengths(a, b, room), strict=True):
        short, long = min(n, m), max(n, m)
        while short + long > room and long > short:
            long -= 1
        if short + long > room:
            short, long = room // 2, room - room // 2
        assert sorted([keep_a, keep_b]) == sorted([short, long])
        assert keep_a <= n
        assert keep_b <= m


def test_how_many_rows_were_cut_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(folder)
    with caplog.at_level(logging.WARNING):
        assert encode_texts(["the bird", "the " * 30], None, tokenizer, 12, source="RTE/train.tsv").cut == 1
    assert "RTE/train.tsv: 1 of 2 rows were cut to 12 tokens" in caplog.text


def test_large_sets_are_tokenized_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "CACHE_FROM", 10)
    tokenizer, first, second = load_tokenizer(folder), _texts(1), _texts(2)
    options = {"source": "x", "cache": tmp_path}
    fresh = encode_texts(first, second, tokenizer, 20, **options)
    longer = encode_texts(first, second, tokenizer, 24, **options)
    other = encode_texts([*first[:-1], "no"], second, tokenizer, 20, **options)
    assert len(list(tmp_path.iterdir())) == 3

    def fail(self: TextTokenizer, texts: list[str]) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr(TextTokenizer, "encode_batch", fail)
    again = encode_texts(first, second, tokenizer, 20, **options)
    assert _rows(again) == _rows(fresh)
    assert again.cut == fresh.cut > 0
    assert _rows(longer) != _rows(fresh) != _rows(other)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_pass_over_a_set_meets_every_row_once_in_as_many_batches_on_every_rank(folder: Path, world: int) -> None:
    rows = TextRows(encode_texts(_texts(4, 23), None, load_tokenizer(folder), 30, source="x"), None, 1, types=False)
    passes = [list(evaluation_batches(rows, 4, world, rank)) for rank in range(world)]
    assert len({len(batches) for batches in passes}) == 1
    assert sorted(np.concatenate([numbers for batches in passes for numbers, _ in batches])) == list(range(23))


@pytest.mark.realdata
@pytest.mark.parametrize(("task", "count", "plain"), [("rte", 2490, 0.35), ("mrpc", 3668, 0.1), ("cola", 8551, 0.2)])
def test_real_rows(task: str, count: int, plain: float, data_folder: Path, tmp_path: Path) -> None:
    """RoBERTa's own vocabulary on the official files: transformers' ids, and next to no padding in batches."""
    tokenizer = load_tokenizer(data_folder / "vocab" / "roberta")
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    examples = read_split(data_folder / "glue", glue_task(task), "train")
    encoded = encode_texts(examples.first, examples.second, tokenizer, 128, source=task)
    texts = [examples.first[:300]] + ([examples.second[:300]] if examples.second else [])
    expected = theirs(*texts, truncation="longest_first", max_length=128, split_special_tokens=True)
    assert _rows(encoded)[:300] == expected["input_ids"]
    padding = {}
    for bucketing in (True, False):
        order = ExampleOrder(encoded.lengths, 16, 1, bucketing=bucketing)
        batches = [encoded.lengths[order.rows(start)] for start in range(0, count, 16)]
        padding[bucketing] = 1 - sum(x.sum() for x in batches) / sum(len(x) * x.max() for x in batches)
    assert padding[True] < 0.04
    assert padding[False] > plain


def test_texts_of_both_splits_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_encoder(tmp_path / "encoder")
    folder = tmp_path / "glue" / "RTE"
    folder.mkdir(parents=True)
    rows = [
        f"{i}\tThe cat is {word}.\tA cat is {word}.\t{label}"
        for i, (word, label) in enumerate(zip("abcdefgh", ["entailment", "not_entailment"] * 4, strict=True))
    ]
    for split, some in (("train", rows[:6]), ("dev", rows[4:])):
        (folder / f"{split}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *some]) + "\n")
    GlueFineTuning(job_from_mapping(glue_mapping(tmp_path), "test"), tmp_path / "run")
    assert "dev overlaps train: 2 of 4 texts are in both" in caplog.text

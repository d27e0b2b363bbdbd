"""Words, sentences, and what is said of text that does not fit."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.latent.corpus import (
    END,
    START,
    UNK,
    LatentVocabulary,
    Sentences,
    build_vocabulary,
    load_sentences,
    report_unknown,
)
from capt.pretrain.latent.evaluation.bounds import perplexity
from capt.pretrain.latent.text_files import DataSection, file_of


def _data(folder: Path, **more: object) -> DataSection:
    return DataSection(path=folder, **more)  # type: ignore[arg-type]


def _damaged(packed: bytes) -> bytes:
    return packed[:12] + b"\xff" * 8 + packed[20:]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x.train.txt").write_text(" b a b <unk>\n\na c b\n")
    (tmp_path / "x.valid.txt").write_text("a never b\n")
    with gzip.open(tmp_path / "x.test.txt.gz", "wt") as file:
        file.write("b b\n")
    return tmp_path


def test_blank_lines_are_counted_and_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = _data(folder)
    vocabulary = build_vocabulary(data)
    with caplog.at_level(logging.INFO):
        for split in ("train", "validation", "test"):
            load_sentences(data, split, vocabulary)
    assert [message for message in caplog.messages if "blank" in message] == [
        f"{folder / 'x.train.txt'}: 1 of 3 lines are blank and left out"
    ]


def test_a_byte_order_mark_of_each_joined_file_is_no_part_of_a_word(tmp_path: Path) -> None:
    lines = [b"\xef\xbb\xbfa b\n", b"\xef\xbb\xbfa b\n"]
    (tmp_path / "a.train.txt").write_bytes(b"".join(lines))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.train.txt.gz").write_bytes(b"".join(map(gzip.compress, lines)))
    for place in (tmp_path, tmp_path / "b"):
        assert build_vocabulary(_data(place)).words[4:] == ("a", "b")


def test_words_by_frequency_after_the_special_ones(folder: Path, tmp_path: Path) -> None:
    vocabulary = build_vocabulary(_data(folder))
    assert vocabulary.words == ("<pad>", "<unk>", "<s>", "</s>", "b", "a", "c")
    assert vocabulary.unknown_id == UNK
    vocabulary.save(tmp_path / "v.txt")
    again = build_vocabulary(_data(folder, vocabulary_file=tmp_path / "v.txt"))
    assert (again.words, again.fingerprint) == (vocabulary.words, vocabulary.fingerprint)
    assert build_vocabulary(_data(folder, vocabulary=1)).fingerprint != vocabulary.fingerprint


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("<unk>\n<pad>\n<unk>\n<s>\n</s>\nb\na\nb\n", "line 8: 'b' is on line 6 as well; remove one of the two"),
        ("<unk>\n<pad>\n<unk>\n<s>\n</s>\nb\n\na\n", "line 7: '' is not one word; remove the line"),
        ("<unk>\n<pad>\n<unk>\n<s>\n</s>\na b\n", "line 6: 'a b' is not one word; remove the line"),
        ("a\nb\n", r"lines 2 to 5 must be <pad> <unk> <s> </s>"),
    ],
)
def test_words_that_no_text_gets_are_refused(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text(content)
    with pytest.raises(DataError, match=says):
        LatentVocabulary.load(tmp_path / "words.txt")


def test_the_last_word_needs_no_line_end(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("\ufeff_UNK\n<pad>\n<unk>\n<s>\n</s>\na\nb")
    vocabulary = LatentVocabulary.load(tmp_path / "words.txt")
    assert (vocabulary.unknown, vocabulary.words[4:]) == ("_UNK", ("a", "b"))


def test_words_that_occur_once_stand_for_the_unknown_ones(tmp_path: Path) -> None:
    """In text without a word for unknown ones; PTB's, which has one, keeps its words."""
    (tmp_path / "train.txt").write_text("a b a\na once b\n")
    (tmp_path / "valid.txt").write_text("a never b\n")
    data = _data(tmp_path)
    vocabulary = build_vocabulary(data)
    assert vocabulary.words[4:] == ("a", "b")
    train = load_sentences(data, "train", vocabulary)
    assert train is not None
    assert train.count(vocabulary.unknown_id) == 1
    assert build_vocabulary(_data(tmp_path, min_count=1)).words[4:] == ("a", "b", "once")
    assert build_vocabulary(_data(tmp_path, min_count=3)).words[4:] == ("a",)
    (tmp_path / "train.txt").write_text("a <unk> b once\n")
    assert build_vocabulary(data).words[4:] == ("a", "b", "once")
    (tmp_path / "train.txt").write_text("a b once\n")
    with pytest.raises(DataError, match=r"no word occurs 2 times: set data\.min_count=1"):
        build_vocabulary(data)


@pytest.mark.parametrize(("count", "warned"), [(0, True), (1, False), (None, False)])
def test_an_untrained_unknown_word_is_warned_of(
    count: int | None, warned: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = _data(folder, min_count=1)
    validation = load_sentences(data, "validation", build_vocabulary(data))
    assert validation is not None
    with caplog.at_level("INFO"):
        report_unknown(validation, "validation text", UNK, count)
    assert "validation text: 25.00% of 4 scored tokens are unknown words" in caplog.text
    assert ("the training text has none" in caplog.text) == warned


def test_an_unknown_word_is_the_ordinary_one(folder: Path) -> None:
    vocabulary = LatentVocabulary(["_UNK", "a"], unknown="_UNK")
    assert vocabulary.encode(["a", "zebra"]).tolist() == [5, 4]
    assert vocabulary.decode([5, 4, END, 5]) == ["a", "_UNK"]


def test_sentences_are_framed_and_counted(folder: Path) -> None:
    data = _data(folder)
    vocabulary = build_vocabulary(data)
    train = load_sentences(data, "train", vocabulary)
    assert train is not None
    assert train.tokens.tolist() == [START, 4, 5, 4, UNK, END, START, 5, 6, 4, END]
    assert (len(train), train.scored) == (2, 9)
    test = load_sentences(data, "test", vocabulary)
    assert test is not None
    assert test.rows(np.array([0])).tolist() == [[START, 4, 4, END]]


def test_long_sentences_are_left_out_and_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = _data(folder, max_words=3)
    train = load_sentences(data, "train", build_vocabulary(data))
    assert train is not None
    assert len(train) == 1
    assert "1 sentences of more than data.max_words=3 left out" in caplog.text


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ("zzz yyy\n", {}, "holds no known word"),
        ("\n\n", {}, "no sentence of 1 to 200 words"),
        ("a b\n", {"format": "labelled"}, r"line 1: no tab; data\.format labelled"),
    ],
)
def test_text_that_does_not_fit(folder: Path, content: str, more: dict[str, str], message: str) -> None:
    vocabulary = build_vocabulary(_data(folder))
    (folder / "x.valid.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        load_sentences(_data(folder, **more), "validation", vocabulary)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.valid.txt", b"\xff\xfe\x00", r"x\.valid\.txt is not UTF-8 text: it begins as UTF-16"),
        ("x.valid.txt", "a\nb c".encode("utf-16-le"), r"x\.valid\.txt, line 1: binary, not text \(NUL\)"),
        (
            "y.valid.txt.gz",
            _damaged(gzip.compress(b"a b\n" * 99, mtime=0)),
            r"y\.valid\.txt\.gz, after line 0: damaged",
        ),
    ],
)
def test_binary_text_is_refused(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / "x.valid.txt").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_sentences(_data(folder), "validation", LatentVocabulary(["a"]))


def test_a_byte_order_mark_is_no_part_of_the_first_word(folder: Path) -> None:
    vocabulary = build_vocabulary(_data(folder))
    without = load_sentences(_data(folder), "validation", vocabulary)
    path = folder / "x.valid.txt"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    found = load_sentences(_data(folder), "validation", vocabulary)
    assert without is not None
    assert found is not None
    assert found.tokens.tolist() == without.tokens.tolist()


def test_which_file_is_which_split(folder: Path) -> None:
    found = file_of(_data(folder), "validation")
    assert found is not None
    assert found.name == "x.valid.txt"
    (folder / "contest.txt").write_text("a\n")
    assert file_of(_data(folder), "test") == folder / "x.test.txt.gz"
    (folder / "dev.txt").write_text("a\n")
    with pytest.raises(DataError, match=r"dev\.txt and x\.valid\.txt both fit; set data\.validation"):
        file_of(_data(folder), "validation")
    with pytest.raises(DataError, match="no folder"):
        file_of(_data(folder / "absent"), "train")


def test_labels_are_not_words(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("1\tgood food\n0\tbad\n")
    data = _data(tmp_path, format="labelled", min_count=1)
    train = load_sentences(data, "train", build_vocabulary(data))
    assert train is not None
    assert train.lengths.tolist() == [4, 3]


@pytest.mark.realdata
def test_the_identity_of_the_tables_on_ptb(data_folder: Path) -> None:
    data = _data(data_folder / "lm" / "ptb")
    vocabulary = build_vocabulary(data)
    assert len(vocabulary) == 10_002
    test = load_sentences(data, "test", vocabulary)
    assert isinstance(test, Sentences)
    assert (len(test), test.scored) == (3_761, 82_430)
    assert int((test.tokens == UNK).sum()) == 4_794
    assert perplexity(77.7, test.scored / len(test)) == pytest.approx(34.65, abs=0.01)
    valid = load_sentences(data, "validation", vocabulary)
    assert valid is not None
    assert (len(valid), int(valid.lengths.max()) <= 202) == (3_370, True)


@pytest.mark.realdata
def test_the_identity_of_the_tables_on_yahoo(data_folder: Path) -> None:
    """The training text is not at hand: validation and test text, in its place."""
    folder = data_folder / "vae" / "yahoo"
    data = _data(folder, train=folder / "yahoo.valid.txt.gz", unknown="_UNK")
    vocabulary = build_vocabulary(data)
    test = load_sentences(data, "test", vocabulary)
    assert test is not None
    assert (len(test), test.scored) == (10_000, 788_673 + 10_000)
    assert perplexity(328.6, test.scored / len(test)) == pytest.approx(61.21, abs=0.02)

"""Vector files: bytes as other programs write them, and every way in which such a file can be wrong."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pretrain.base.errors import DataError
from pretrain.embeddings.vectors.parse import BLOCK
from pretrain.embeddings.vectors.read import Format, file_format, read_vectors
from pretrain.embeddings.vectors.word_vectors import WordVectors, unit_rows
from pretrain.embeddings.vectors.write import write_vectors

WORDS = ("the", "café", "nan", "1980", "\u00a0half")
ROWS = np.array([[0.1, -2, 3e-9], [1, 0, 0], [7.5, 1e30, -1e-30], [0, 0, 0], [1.5, -1.5, 2]], dtype=np.float32)
FORMATS: tuple[Format, ...] = ("word2vec", "word2vec-binary", "glove")


def binary(words: tuple[str, ...], rows: np.ndarray, end: bytes = b"\n") -> bytes:
    """word2vec's binary format, byte by byte: ``end`` stands behind a row in the original's, not in gensim's files."""
    body = b"".join(
        word.encode() + b" " + b"".join(struct.pack("<f", x) for x in row) + end
        for word, row in zip(words, rows.tolist(), strict=True)
    )
    return f"{len(words)} {rows.shape[1]}\n".encode() + body


def text(words: tuple[str, ...], rows: np.ndarray, end: str = "\n", sign: str = " ") -> str:
    """A line for each word, without a header."""
    return "".join(f"{word}{sign}{sign.join(map(str, row))}{end}" for word, row in zip(words, rows, strict=True))


def same(vectors: WordVectors, words: tuple[str, ...] = WORDS, rows: np.ndarray = ROWS) -> None:
    assert vectors.words == words
    assert vectors.matrix.dtype == np.float32
    np.testing.assert_array_equal(vectors.matrix, rows)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "form"),
    [
        (text(WORDS, ROWS).encode(), "glove"),
        (text(WORDS, ROWS, sign="\t").encode(), "glove"),
        (text(WORDS, ROWS, end=" \n").encode(), "glove"),
        (("5 3\n" + text(WORDS, ROWS, end=" \r\n")).encode(), "word2vec"),
        (("5 3\n" + text(WORDS, ROWS)).encode().rstrip(b"\n"), "word2vec"),
        (binary(WORDS, ROWS), "word2vec-binary"),
        (binary(WORDS, ROWS, end=b""), "word2vec-binary"),
    ],
)
def test_every_format_is_told_and_read(content: bytes, form: str, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("vectors.gz" if packed else "vectors")
    path.write_bytes(gzip.compress(content) if packed else content)
    assert file_format(path) == form
    same(read_vectors(path))


def test_words_with_spaces_are_told_by_the_width(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text(", 1 2 3\n. . . 4 5 6\nat name@domain.com 7 8 9\n")
    same(read_vectors(path), (",", ". . .", "at name@domain.com"), np.arange(1, 10, dtype=np.float32).reshape(3, 3))


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_is_read(form: Format, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    words = tuple(f"w{i}" for i in range(BLOCK + 3))
    rows = (rng.standard_normal((len(words), 3)) * 10.0 ** rng.integers(-30, 30, (len(words), 1))).astype(np.float32)
    write_vectors(tmp_path / "v", words, rows, form)
    assert file_format(tmp_path / "v") == form
    same(read_vectors(tmp_path / "v"), words, rows)


def test_written_bytes(tmp_path: Path) -> None:
    rows = np.array([[0.1, -2], [1e-10, 3]], dtype=np.float32)
    for form, expected in {
        "word2vec": b"2 2\nthe 0.100000001 -2\na 1.00000001e-10 3\n",
        "glove": b"the 0.100000001 -2\na 1.00000001e-10 3\n",
        "word2vec-binary": binary(("the", "a"), rows),
    }.items():
        write_vectors(tmp_path / form, ("the", "a"), rows, form)  # type: ignore[arg-type]
        assert (tmp_path / form).read_bytes() == expected


@pytest.mark.parametrize("word", ["", "new york", "a\tb", "a\n"])
def test_words_that_a_file_cannot_hold_are_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="v: word 2, "):
        write_vectors(tmp_path / "v", ("a", word), np.ones((2, 3), np.float32))
    assert list(tmp_path.iterdir()) == []


BAD_TEXT = {
    "too few": ("a 1 2\nb 1\n", "line 2: 1 values, not 2 as in line 1"),
    "too many": ("a 1 2\nb 1 2 3\n", "line 2: 3 values, not 2 as in line 1"),
    "blank": ("a 1 2\n\nb 1 2\n", "line 2: 0 values"),
    "not a number": ("a 1 2\nb 1 x\n", "line 2: 'x' is not a number"),
    "underscore": ("a 1 2\nb 1 2_0\n", "line 2: '2_0' is not a number"),
    "nan": ("a 1 2\nb 1 nan\n", "line 2: value 2 is nan"),
    "inf": ("a 1 2\nb -inf 1\n", "line 2: value 1 is -inf"),
    "overflow": ("a 1 2\nb 1e39 1\n", "line 2: value 1 is inf"),
    "twice": ("a 1 2\nb 1 2\na 3 4\n", "line 3: the word 'a' stands in line 1 already"),
    "twice, header": ("3 2\na 1 2\nb 1 2\na 3 4\n", "line 4: the word 'a' stands in line 2 already"),
    "prose": ("It was the best of times\n", "line 1: not a word and its values"),
    "header, too few words": ("3 2\na 1 2\nb 1 2\n", "line 3: the file ends after 2 words; its header promises 3"),
    "header, too many words": ("1 2\na 1 2\nb 1 2\n", "the file ends after 2 words; its header promises 1"),
    "header, width": ("1 3\na 1 2\n", "line 2: 2 values, not 3 as the header says"),
    "header, huge": ("999999999 300\na 1 2\n", "line 1: promises 999,999,999 words of 300 values, and the file has"),
    "header, nothing": ("0 300\n", "line 1: promises 0 words"),
    "header, wide": ("1 9999999\na 1 2\n", "line 1: promises 1 words of 9999999 values"),
    "header alone": ("1 1\n", "its header promises 1"),
    "empty": ("", "the file is empty"),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_text_is_named_by_file_and_line(name: str, tmp_path: Path) -> None:
    content, message = BAD_TEXT[name]
    path = tmp_path / "vectors.txt"
    path.write_text(content)
    with pytest.raises(DataError) as error:
        read_vectors(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(b"a 1 2\ncaf\xe9 1 2\n")
    with pytest.raises(DataError, match=r"vectors\.txt, line 2: not UTF-8 text \(byte 0xe9\)"):
        read_vectors(path)


def _spoilt(change: Callable[[bytes], bytes]) -> bytes:
    return change(binary(WORDS, ROWS))


BAD_BINARY = {
    "cut in a row": (_spoilt(lambda b: b[:-5]), "word 5: the file ends here; its header promises 5"),
    "cut in a word": (_spoilt(lambda b: b[: b.index(b"1980") + 2]), "word 4: the file ends here"),
    "goes on": (_spoilt(lambda b: b + b"more 1234"), "goes on after word 5"),
    "not UTF-8": (_spoilt(lambda b: b.replace(b"1980", b"19\xff0")), "word 4: not UTF-8 text (byte 0xff)"),
    "empty word": (_spoilt(lambda b: b.replace(b"1980 ", b" ")), "word 4: an empty word"),
    "nan": (_spoilt(lambda b: b.replace(struct.pack("<f", 7.5), struct.pack("<f", float("nan")))), "word 3: value 1"),
    "twice": (binary(("a", "b", "a"), ROWS[:3]), "word 3: the word 'a' stands in word 1 already"),
    "no end of a word": (b"3 2\nab \x00\x00\x00\x00\x00\x00\x00\x00" + b"x" * 20_000, "word 2: over 10,000 bytes"),
}


@pytest.mark.parametrize("name", BAD_BINARY)
def test_bad_binary_is_named_by_file_and_word(name: str, tmp_path: Path) -> None:
    content, message = BAD_BINARY[name]
    path = tmp_path / "vectors.bin"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_vectors(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.99])
def test_truncated_archives_are_named(form: Format, share: float, tmp_path: Path) -> None:
    rows = np.random.default_rng(1).standard_normal((3000, 40)).astype(np.float32)
    write_vectors(tmp_path / "v", tuple(f"word{i}" for i in range(3000)), rows, form)
    packed = gzip.compress((tmp_path / "v").read_bytes())
    path = tmp_path / "v.gz"
    path.write_bytes(packed[: int(share * len(packed))])
    place = "word" if form == "word2vec-binary" else "line"
    with pytest.raises(DataError, match=rf"v\.gz, .*{place} .*damaged gzip file"):
        read_vectors(path)


def test_altered_archives_and_other_things_are_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(text(WORDS, ROWS).encode()))
    packed[-6] ^= 1  # of the checksum
    path = tmp_path / "v.gz"
    path.write_bytes(packed)
    with pytest.raises(DataError, match="damaged gzip"):
        read_vectors(path)
    path.write_text("a 1 2\n")
    with pytest.raises(DataError, match="damaged gzip"):
        read_vectors(path)
    with pytest.raises(DataError, match="no such file"):
        read_vectors(tmp_path / "absent.txt")
    with pytest.raises(DataError, match="not a file"):
        read_vectors(tmp_path)


def test_rows_of_length_one() -> None:
    rows = np.array([[3, 4], [0, 0], [3e30, 4e30], [3e-30, 4e-30]], dtype=np.float32)
    np.testing.assert_allclose(unit_rows(rows), [[0.6, 0.8], [0, 0], [0.6, 0.8], [0.6, 0.8]], rtol=1e-6)


def test_words_are_looked_up_as_they_stand_then_in_lower_case() -> None:
    vectors = WordVectors(("Paris", "paris", "king"), np.eye(3, dtype=np.float32))
    assert [vectors.row(word) for word in ("Paris", "paris", "King", "PARIS", "queen")] == [0, 1, 2, 1, None]
    with pytest.raises(DataError, match=r"v\.txt: none of its 3 words is 'kings'; did you mean 'king'"):
        vectors.require("kings", "v.txt")


@pytest.mark.realdata
def test_a_real_file() -> None:
    path = Path(os.environ["CAPT_DATA"]) / "embeddings" / "retrofitting_sample_vec.48d.txt"
    vectors = read_vectors(path)
    assert file_format(path) == "glove"
    assert vectors.matrix.shape == (1000, 48)
    line = path.read_text().splitlines()[777].split()
    assert vectors.words[777] == line[0]
    np.testing.assert_array_equal(vectors.matrix[777], np.array(line[1:], dtype=np.float32))

"""Vector files: bytes as other programs write them, and every way in which such a file can be wrong."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.embeddings.vectors import (
    Form,
    VectorLayout,
    WordVectors,
    find_layout,
    read_vectors,
    stream_vectors,
    write_vectors,
)
from tests.unit.test_printed_commands import Remedy, require_mending

WORDS = ("the", "café", "nan", "1980", "\u00a0half")
ROWS = np.array([[0.1, -2, 3e-9], [1, 0, 0], [7.5, 1e30, -1e-30], [0, 0, 0], [1.5, -1.5, 2]], dtype=np.float32)
FORMS: tuple[tuple[Form, bool], ...] = (("word2vec", False), ("word2vec", True), ("glove", False), ("gensim", True))


def binary(words: tuple[str, ...], rows: np.ndarray, end: bytes = b"\n") -> bytes:
    """word2vec's binary format, byte by byte: ``end`` follows a row in the original's, not in gensim's files."""
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
    ("content", "layout"),
    [
        (text(WORDS, ROWS).encode(), VectorLayout(None, 3, False)),
        (b"\xef\xbb\xbf" + text(WORDS, ROWS).encode(), VectorLayout(None, 3, False)),
        (text(WORDS, ROWS, sign="\t").encode(), VectorLayout(None, 3, False)),
        (text(WORDS, ROWS, end=" \n").encode(), VectorLayout(None, 3, False)),
        (("5 3\n" + text(WORDS, ROWS, end=" \r\n")).encode(), VectorLayout(5, 3, False)),
        (("5 3\n" + text(WORDS, ROWS)).encode().rstrip(b"\n"), VectorLayout(5, 3, False)),
        (binary(WORDS, ROWS), VectorLayout(5, 3, True)),
        (binary(WORDS, ROWS, end=b""), VectorLayout(5, 3, True)),
    ],
)
def test_every_form_is_found_out_and_read(content: bytes, layout: VectorLayout, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("vectors.gz" if packed else "vectors")
    path.write_bytes(gzip.compress(content) if packed else content)
    assert find_layout(path) == layout
    same(read_vectors(path))
    assert [word for word, _ in stream_vectors(path)] == list(WORDS)


def test_words_with_spaces_are_told_by_the_width(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text(". . . 4 5 6\n, 1 2 3\nat name@domain.com 7 8 9\n")
    vectors = read_vectors(path)
    same(vectors, (". . .", ",", "at name@domain.com"), np.array([[4, 5, 6], [1, 2, 3], [7, 8, 9]], dtype=np.float32))
    write_vectors(vectors, tmp_path / "again.txt", "glove")
    assert (tmp_path / "again.txt").read_text() == path.read_text()


@pytest.mark.parametrize("name", ["v", "v.gz"])
@pytest.mark.parametrize(("form", "is_binary"), FORMS)
def test_what_is_written_is_read(form: Form, is_binary: bool, name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    words = tuple(f"w{i}" for i in range(9000))  # more than the first allocation holds
    rows = (rng.standard_normal((len(words), 3)) * 10.0 ** rng.integers(-30, 30, (len(words), 1))).astype(np.float32)
    write_vectors(WordVectors(words, rows), tmp_path / name, form, binary=is_binary)
    assert find_layout(tmp_path / name).binary == is_binary
    same(read_vectors(tmp_path / name), words, rows)


def test_written_bytes(tmp_path: Path) -> None:
    vectors = WordVectors(("the", "a"), np.array([[0.1, -2], [1e-10, 3]], dtype=np.float32))
    expected: dict[tuple[Form, bool], bytes] = {
        ("word2vec", False): b"2 2\nthe 0.100000001 -2 \na 1.00000001e-10 3 \n",
        ("gensim", False): b"2 2\nthe 0.100000001 -2\na 1.00000001e-10 3\n",
        ("glove", False): b"the 0.100000001 -2\na 1.00000001e-10 3\n",
        ("word2vec", True): binary(vectors.words, vectors.matrix),
        ("gensim", True): binary(vectors.words, vectors.matrix, end=b""),
    }
    for number, ((form, is_binary), content) in enumerate(expected.items()):
        path = tmp_path / str(number)
        write_vectors(vectors, path, form, binary=is_binary)
        assert path.read_bytes() == content, form
    with pytest.raises(DataError, match="GloVe's form is text"):
        write_vectors(vectors, tmp_path / "v.bin", "glove", binary=True)


@pytest.mark.parametrize("word", ["", "new york", "a\tb", "a\n"])
def test_words_that_a_file_cannot_hold_are_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="v: word 2, "):
        write_vectors(WordVectors(("a", word), np.ones((2, 3), np.float32)), tmp_path / "v", "word2vec")
    assert list(tmp_path.iterdir()) == []


BAD_TEXT = {
    "too few": ("a 1 2\nb 1\nc 1 2\n", "line 2: a word and 1 numbers; the vectors of this file have 2"),
    "too few in line 1": ("a 1\nb 1 2\nc 1 2\n", "line 1: a word and 1 numbers"),
    "too many": ("a 1 2\nb 1 2 3\nc 1 2\n", "line 2: more than 2 numbers"),
    "carriage returns alone": ("a 1 2\rb 1 2\rc 1 2\r", "line 1: a carriage return within the line; end lines with"),
    "blank": ("a 1 2\n\nb 1 2\n", "line 2: a word and 0 numbers"),
    "no word": ("a 1 2\n 1 2\n", "line 2: a word and 1 numbers"),
    "not a number": ("a 1 2\nb 1 x\nc 1 2\n", "line 2: 'x' is not a number"),
    "underscore": ("a 1 2\nb 1 2_0\nc 1 2\n", "line 2: '2_0' is not a number"),
    "nan": ("a 1 2\nb 1 nan\n", "line 2: 'nan' is not a finite"),
    "inf": ("a 1 2\nb -inf 1\n", "line 2: '-inf' is not a finite"),
    "overflow": ("a 1 2\nb 1e39 1\n", "line 2: '1e39' is not a finite"),
    "twice": ("a 1 2\nb 1 2\na 3 4\n", "line 3: the word 'a' occurs at line 1 already"),
    "twice, header": ("3 2\na 1 2\nb 1 2\na 3 4\n", "line 4: the word 'a' occurs at line 2 already"),
    "prose": ("It was the best of times\n", "line 1: expected a word and 1 to"),
    "header, too few words": ("3 2\na 1 2\nb 1 2\n", "line 1: the header says 3 words, but the file ends after 2"),
    "header, too many words": ("1 2\na 1 2\nb 1 2\n", "line 3: more words than the 1 that the header"),
    "header, width": ("1 3\na 1 2\n", "line 2: a word and 2 numbers; the vectors of this file have 3"),
    "header, huge": ("999999999 300\na 1 2\n", "line 1: the header says 999999999 words of 300 dimensions; expected"),
    "header, nothing": ("0 300\n", "line 1: the header says 0 words"),
    "header, wide": ("1 9999999\na 1 2\n", "line 1: the header says 1 words of 9999999 dimensions"),
    "header alone": ("1 1\n", "line 1: the header says 1 words, but the file ends after 0"),
    "empty": ("", "the file is empty"),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_text_is_named_by_file_and_line(name: str, tmp_path: Path) -> None:
    content, message = BAD_TEXT[name]
    path = tmp_path / "vectors.txt"
    path.write_bytes(content.encode())
    with pytest.raises(DataError) as error:
        read_vectors(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("header", [b"", b"2 2\n"])
def test_text_that_is_not_utf8_is_named(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(header + b"a 1 2\ncaf\xe9 1 2\n")
    with pytest.raises(DataError, match=rf"line {3 if header else 2}: the word is not UTF-8 \(byte 0xe9\)"):
        read_vectors(path)


def test_a_header_that_promises_much_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("10000000 400\na " + "1 " * 400)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="ends after 1"):
            read_vectors(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def _spoilt(change: Callable[[bytes], bytes]) -> bytes:
    return change(binary(WORDS, ROWS))


def _saved_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros((2, 3), np.float32))
    return file.getvalue()


BAD_BINARY = {
    "cut in a row": (_spoilt(lambda b: b[:-5]), "ends within or before word 5; the header says 5 words"),
    "cut in a word": (_spoilt(lambda b: b[: b.index(b"1980") + 2]), "ends within or before word 4"),
    "continues": (_spoilt(lambda b: b + b"more 1234"), "continues after word 5"),
    "not UTF-8": (_spoilt(lambda b: b.replace(b"1980", b"19\xff0")), "word 4: the word is not UTF-8 (byte 0xff)"),
    "empty word": (_spoilt(lambda b: b.replace(b"1980 ", b" ")), "word 4: the word is empty"),
    "nan": (_spoilt(lambda b: b.replace(struct.pack("<f", 7.5), struct.pack("<f", float("nan")))), "word 3 ('nan')"),
    "twice": (binary(("a", "b", "a"), ROWS[:3]), "word 3: the word 'a' occurs at word 1 already"),
    "no end of a word": (b"3 2\nab \x00\x00\x00\x00\x00\x00\x00\x00" + b"x" * 20_000, "word 2: no end within"),
    "no header": (b"ab \x00\x00\x00\x00\x00\x00\x00\x00", "line 1: neither text nor a header"),
}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        *((pickle.dumps({"vectors": [1.0]}, protocol), "pickle") for protocol in (2, 3, 4, 5)),
        (_saved_array(), "NumPy array"),
        (struct.pack("<ii", 793712314, 12), r"fastText \(.bin\)"),
    ],
)
def test_files_of_gensim_and_fasttext_are_named_with_the_way_out(content: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "vectors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{what}.*not read; write it with gensim's KeyedVectors.save_word2vec_format"):
        read_vectors(path)


@pytest.mark.parametrize("name", BAD_BINARY)
def test_bad_binary_is_named_by_file_and_word(name: str, tmp_path: Path) -> None:
    content, message = BAD_BINARY[name]
    path = tmp_path / "vectors.bin"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_vectors(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(("form", "is_binary"), FORMS)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.99])
def test_truncated_archives_are_named(form: Form, is_binary: bool, share: float, tmp_path: Path) -> None:
    rows = np.random.default_rng(1).standard_normal((3000, 40)).astype(np.float32)
    write_vectors(WordVectors(tuple(f"word{i}" for i in range(3000)), rows), tmp_path / "v", form, binary=is_binary)
    packed = gzip.compress((tmp_path / "v").read_bytes())
    path = tmp_path / "v.gz"
    path.write_bytes(packed[: int(share * len(packed))])
    place = "word" if is_binary and share > 0.1 else "line"  # of a header that is not whole nothing is known
    with pytest.raises(DataError, match=rf"v\.gz, after {place} [\d,]+: damaged gzip file") as error:
        read_vectors(path)
    if share == 0.99:
        number = re.search(rf"{place} ([\d,]+)", str(error.value))
        assert number is not None
        assert int(number[1].replace(",", "")) > 2500  # of 3000


def test_altered_archives_and_other_things_are_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(text(WORDS, ROWS).encode()))
    packed[-6] ^= 1  # of the checksum
    path = tmp_path / "v.gz"
    path.write_bytes(packed)
    with pytest.raises(DataError, match="damaged gzip"):
        read_vectors(path)
    path.write_text("a 1 2\n")
    assert read_vectors(path).words == ("a",)  # what is inside decides, not the name
    with pytest.raises(DataError, match="no such file"):
        read_vectors(tmp_path / "absent.txt")
    with pytest.raises(DataError, match="not a regular file"):
        read_vectors(tmp_path)


def test_words_are_looked_up_as_they_stand_then_in_lower_case() -> None:
    vectors = WordVectors(("Paris", "paris", "king"), np.eye(3, dtype=np.float32))
    assert [vectors.find(word) for word in ("Paris", "paris", "King", "PARIS", "queen")] == [0, 1, 2, 1, None]


@pytest.mark.realdata
def test_a_real_file() -> None:
    path = Path(os.environ["CAPT_DATA"]) / "embeddings" / "retrofitting_sample_vec.48d.txt"
    vectors = read_vectors(path)
    assert vectors.matrix.shape == (1000, 48)
    line = path.read_text().splitlines()[777].split()
    assert vectors.words[777] == line[0]
    np.testing.assert_array_equal(vectors.matrix[777], np.array(line[1:], dtype=np.float32))


def test_what_the_message_of_old_line_ends_prints_mends_the_file(tmp_path: Path) -> None:
    require_mending(Remedy(r"tr '\r' '\n' < FILE", "a.txt", b"a 1 2\rb 3 4\rc 5 6\n", read_vectors), tmp_path)

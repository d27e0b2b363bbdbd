from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from capt.pretrain.base import files
from capt.pretrain.base.errors import DataError
from capt.pretrain.data.corpus import Missing
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.data.formats import ReadOptions
from capt.pretrain.data.parquet import Parquet
from capt.pretrain.data.paths import held_out_files, resolve_files, resolve_paths
from capt.pretrain.data.tables import open_table
from tests.unit.data.doubles import documents

DOCUMENTS = ["One paragraph.\nAnöther, with an ümlaut.", "Second document."]
TEXT = "\n\n".join(DOCUMENTS) + "\n"


def read(*paths: Path, column: str = "text", start: str | None = None, missing: Missing = "skip") -> list[str]:
    return list(documents(FileCorpus(paths, column, start, missing=missing)))


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", TEXT),
        ("a.txt.gz", TEXT),
        ("a.md", TEXT),
        ("a.txt", "\ufeff" + TEXT),
        ("a.txt", TEXT.replace("\n", "\r\n")),
        ("a.txt", "\n \n" + TEXT.replace("\n\n", "\n\t \n\n") + "\n\n"),
        ("a.txt", TEXT.rstrip()),
        ("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)),
        ("a.json.gz", "\n\n".join(json.dumps({"id": 1, "text": text}) for text in DOCUMENTS)),
    ],
    ids=["txt", "gz", "md", "bom", "crlf", "extra-blank-lines", "no-final-newline", "jsonl", "json.gz-blank-lines"],
)
def test_documents_of_every_format(tmp_path: Path, name: str, content: str) -> None:
    assert read(write(tmp_path / name, content)) == DOCUMENTS


def test_a_byte_order_mark_of_each_joined_file_is_no_text(tmp_path: Path) -> None:
    text, row = b"\xef\xbb\xbfa b\n\n", b'\xef\xbb\xbf{"text": "a b"}\n'
    for name, part in (("a.txt", text), ("a.jsonl", row)):
        (tmp_path / name).write_bytes(part * 3)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(part) * 3)
        assert read(tmp_path / name) == read(tmp_path / f"{name}.gz") == ["a b"] * 3
    with pytest.raises(DataError, match="holds no text"):
        read(write(tmp_path / "b.txt", "\ufeff\n\ufeff"))


def test_parquet(tmp_path: Path) -> None:
    table = pyarrow.table({"id": list(range(1000)), "body": [f"row {i}" for i in range(1000)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    assert read(tmp_path / "a.parquet", column="body") == [f"row {i}" for i in range(1000)]
    twice = pyarrow.Table.from_arrays([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="two columns have the name 'text'"):
        read(tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="two columns have the name 'text'"):
        open_table(tmp_path / "twice.parquet")


def test_wikitext_documents_are_articles(tmp_path: Path) -> None:
    text = " \n = First = \n \n Some text . \n \n = = Section = = \n \n More . \n \n = Second = \n \n Text . \n"
    parts = read(write(tmp_path / "wiki.valid.tokens", text))
    assert [part.split("\n")[0].strip() for part in parts] == ["= First =", "= Second ="]
    assert "More" in parts[0]


def test_documents_may_start_at_a_pattern(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", "CHAPTER 1\nx\n\ny\nCHAPTER 2\nz\n")
    assert read(text, start="CHAPTER") == ["CHAPTER 1\nx\ny", "CHAPTER 2\nz"]
    rows = write(tmp_path / "a.jsonl", "\n".join(json.dumps({"text": line}) for line in ["# a", "b", "", "# c"]))
    assert read(rows, start="# ") == ["# a\nb", "# c"]


def test_several_files_are_read_in_order_and_progress_is_bytes_on_disk(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.txt", "x\n" * 50_000), write(tmp_path / "b.txt.gz", "y\n" * 50_000)]
    corpus = FileCorpus(files, "text", None)
    positions = [corpus.position for _ in corpus]
    assert positions == sorted(positions)
    assert positions[-1] == corpus.size == sum(file.stat().st_size for file in files)
    assert read(*files)[1][0] == "y"


def test_a_border_between_files_is_a_border_between_documents(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", "a"), write(tmp_path / "b.txt", "b")) == ["a", "b"]


def test_one_endless_line_is_read_in_pieces(tmp_path: Path) -> None:
    text = "word " * 200_000
    path = write(tmp_path / "text8.txt", text)
    lengths = [len(passage.text) for passage in FileCorpus([path], "text", None)]
    assert max(lengths) <= 4096
    assert read(path) == [text.rstrip()]


BAD = {
    "empty": ("a.txt", b"", "a.txt is empty"),
    "blank": ("a.txt", b"\n \n\n", "holds no text"),
    "blank rows": ("a.jsonl", b'{"text": ""}\n{"text": " "}\n', "holds no text"),
    "binary": ("a.txt", b"text\nmore\0text", "a.txt, line 2: binary, not text: it holds a NUL"),
    "packed twice": ("a.txt.gz", gzip.compress(b"one two\n" * 9), "it is packed with gzip; unpack it, or name it .gz"),
    "latin-1": ("a.txt", b"one\ntwo\ncaf\xe9\n", "line 3: not UTF-8 text .byte 0xe9. at byte 11; convert it"),
    "latin-1 far in": ("a.txt", b"ok \xc3\xa9\n" * 30_000 + b"\xe9", "line 30001: .* at byte 180000"),
    "cut in a character": ("a.txt", b"caf\xc3", "line 1: not UTF-8 text .byte 0xc3. at byte 3"),
    "json list": (
        "a.jsonl",
        b"[1]\n",
        "a.jsonl, line 1: a JSON object is needed, this is a list; write one object a line: jq",
    ),
    "json list of lines": (
        "a.json",
        b'[\n {"text": "a"}\n]\n',
        "a.json, line 1, column 1: not JSON .*; write one object a line: jq",
    ),
    "json key": ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', "line 2: there is no 'text' .*; did you mean 'txt'"),
    "json key, none near": ("a.jsonl", b'{"id": 1, "body": "b"}\n', "there is no 'text' .*; it has 'id', 'body'"),
    "json null": ("a.jsonl", b'{"text": null}\n', "line 1: 'text' has no text; data.missing=skip leaves such rows out"),
    "json type": ("a.jsonl", b'{"text": 3}\n', "line 1: 'text' must be text, it is int"),
    "json NUL": ("a.jsonl", b'{"text": "a\\u0000b"}\n', "line 1: 'text' is binary, not text: NUL at character 1"),
    "json utf-8": ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "line 2: not UTF-8 text .byte 0xe9. at byte 24"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD)
def test_bad_files_are_named_with_the_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=message) as error:
        read(path, missing="refuse")
    assert "\n" not in str(error.value)


def test_parquet_column_is_checked(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"txt": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: there is no 'text' .*; did you mean 'txt'"):
        read(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet, row 1: 'n' must be text, it is int"):
        read(tmp_path / "a.parquet", column="n")


TABLE = ["a row", None, "", "another", None, " ", "third"]


def _jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def _tables(folder: Path) -> dict[str, Path]:
    """`TABLE` in every form in which a row may have no text."""
    frame = pyarrow.table({"text": TABLE, "id": range(len(TABLE))})
    pyarrow.parquet.write_table(frame, folder / "a.parquet", row_group_size=3)
    coded = pyarrow.table({"text": pyarrow.array(TABLE).dictionary_encode()})
    pyarrow.parquet.write_table(coded, folder / "coded.parquet")
    return {
        "null": _jsonl(folder / "null.jsonl", [{"text": text} for text in TABLE]),
        "NaN": _jsonl(folder / "nan.json.gz", [{"text": float("nan") if text is None else text} for text in TABLE]),
        "absent": _jsonl(folder / "absent.jsonl", [{"id": 1} if text is None else {"text": text} for text in TABLE]),
        "first absent": _jsonl(
            folder / "first.jsonl", [{"id": 1}, *({"text": text} for text in TABLE if text is not None), {}]
        ),
        "parquet": folder / "a.parquet",
        "coded": folder / "coded.parquet",
    }


def test_rows_without_text_are_left_out_counted_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in _tables(tmp_path).values():
        caplog.clear()
        corpus = FileCorpus([path], "text", None)
        assert list(documents(corpus)) == ["a row", "another", "third"], path
        assert list(documents(corpus)) == ["a row", "another", "third"]
        assert corpus.contents()[0]["rows_without_text"] == 2
        (said,) = (text for text in caplog.messages if "left out" in text)
        assert f"{path}: 2 of 7 rows have no 'text' and are left out, the first is {path}" in said
        with pytest.raises(DataError, match=r"(line|row) [12]: .*no '?text'?"):
            read(path, missing="refuse")


def test_a_whole_table_counts_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus = FileCorpus([_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": ""}])], "text", None)
    assert list(documents(corpus)) == ["a"]
    assert "rows_without_text" not in corpus.contents()[0]
    assert not any("left out" in text for text in caplog.messages)


@pytest.mark.parametrize("value", [3, 0.5, True, ["a"], {"a": "b"}])
def test_other_types_are_no_missing_text(tmp_path: Path, value: object) -> None:
    with pytest.raises(DataError, match=rf"line 2: 'text' must be text, it is {type(value).__name__}"):
        read(_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": value}]))


def test_a_column_that_no_row_has_is_named(tmp_path: Path) -> None:
    """A large file is refused soon."""
    with pytest.raises(DataError, match=r"line 1: there is no 'text' .*; did you mean 'txt'"):
        read(_jsonl(tmp_path / "a.jsonl", [{"txt": "a"}] * 3))
    large = _jsonl(tmp_path / "b.jsonl", [*[{"txt": "a"}] * 2000, {"text": 3}])
    with pytest.raises(DataError, match=r"line 1: there is no 'text'"):
        read(large)
    with pytest.raises(DataError, match="holds no text: every line or row is blank or has none"):
        read(_jsonl(tmp_path / "c.jsonl", [{"text": None}] * 3))


def test_patterns_name_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "notes.rst", "odd[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, "text")
    os.mkdir(tmp_path / "folder.txt")
    assert [p.name for p in resolve_paths([f"{tmp_path}/[ab].txt"], "data.files")] == ["a.txt", "b.txt"]
    odd = resolve_paths([f"{tmp_path}/**/c.txt", f"{tmp_path}/odd[1].txt"], "data.files")
    assert [p.name for p in odd] == ["c.txt", "odd[1].txt"]
    with pytest.raises(DataError, match=r"a\.txt is named twice"):
        resolve_paths([f"{tmp_path}/a.txt", f"{tmp_path}/*.txt"], "data.files")
    os.symlink("..", tmp_path / "sub" / "loop")
    with pytest.raises(DataError, match=r"c\.txt and .*loop/sub/c\.txt are one file, by a link; name it once"):
        resolve_files([f"{tmp_path}/sub/**/c.txt"], "data.files")
    with pytest.raises(DataError, match=r"data\.validation_files: .*loop/a\.txt is training text too"):
        held_out_files([f"{tmp_path}/sub/loop/a.txt"], [tmp_path / "a.txt"])
    with pytest.raises(DataError, match=r"no reader for files ending in \.rst; known: \.txt,.* rename"):
        resolve_paths([f"{tmp_path}/notes.rst"], "data.files")

    with pytest.raises(DataError, match=r"is a folder; name its files, for example .*/\*\.txt$"):
        resolve_paths([str(tmp_path)], "data.files")
    for name in ("guide/a.md", "guide/b.md.gz", "guide/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, "text")
    with pytest.raises(DataError, match=r"is a folder; name its files, for example .*/guide/\*\.md$"):
        resolve_paths([f"{tmp_path}/guide"], "data.files")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("books.tx", "data.files: .*books.tx does not exist; did you mean .*books.txt?"),
        ("zzz.txt", "zzz.txt does not exist; the folder .* has books.txt: correct the path$"),
        ("empty/zzz.txt", "zzz.txt does not exist; the folder .*empty has no files: correct the path$"),
        ("no/books.txt", "books.txt does not exist: there is no folder .*no; correct the path$"),
        ("*.jsonl", r"\*.jsonl does not exist: the pattern matches no file; change it, or name the files$"),
        ("boo*.csv", r"boo\*.csv does not exist: the pattern matches no file; change it, or name the files$"),
    ],
)
def test_missing_files_come_with_a_remedy(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path / "books.txt", "text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        resolve_paths([str(tmp_path / name)], "data.files")


def test_a_fifo_is_no_corpus(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"data\.files: .*a\.txt is not a regular file"):
        resolve_paths([str(tmp_path / "a.txt")], "data.files")


def test_a_row_without_end_is_refused_in_constant_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capt.pretrain.base.files.LONGEST_LINE", 1 << 16)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "' + b"a" * (1 << 24)))
    tracemalloc.start()
    with pytest.raises(DataError, match="line 1: over 65,536 bytes"):
        list(FileCorpus([path], "text", None))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def _packed(path: Path) -> None:
    line = json.dumps({"text": "x" * 1000}) + "\n" if ".jsonl" in path.name else "x" * 1000 + "\n"
    write(path, 4000 * line)


def _plain_table(path: Path) -> None:
    table = pyarrow.table({"text": ["x" * 1000] * 4000})
    pyarrow.parquet.write_table(table, path, compression="gzip", use_dictionary=False)


def _dictionary(path: Path) -> None:
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4000, pyarrow.int32()), ["x" * 1000])
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)


def _rows_of_one_text(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 1000] * 4000}), path)


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.txt.gz", _packed),
        ("a.jsonl.gz", _packed),
        ("plain.parquet", _plain_table),
        ("dictionary.parquet", _dictionary),
        ("rows.parquet", _rows_of_one_text),
    ],
)
def test_a_small_file_that_holds_far_more_than_text_is_refused(
    tmp_path: Path, name: str, pack: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(tmp_path / name)
    assert len("".join(read(tmp_path / name))) > 3_900_000, "the smallest bound lets small files pass"
    monkeypatch.setattr(files, "_ALWAYS", 1 << 16)
    with pytest.raises(DataError, match=rf"{name}: [\d,]+ bytes hold over [\d,]+ bytes of text, more than 200 times"):
        read(tmp_path / name)


_NESTED = {
    "lists": lambda text, count: pyarrow.array([[text]] * count),
    "one row": lambda text, count: pyarrow.array([[text] * count]),
    "coded": lambda text, count: pyarrow.array(
        [[text]] * count, pyarrow.list_(pyarrow.dictionary(pyarrow.int32(), pyarrow.string()))
    ),
    "large": lambda text, count: pyarrow.array([[text] * count], pyarrow.large_list(pyarrow.large_string())),
    "objects": lambda text, count: pyarrow.array([[{"text": text, "id": 1}] * count]),
    "map": lambda text, count: pyarrow.array([[("a", text)] * count], pyarrow.map_(*2 * [pyarrow.string()])),
    "numbers": lambda text, count: pyarrow.array([[7] * count * len(text)]),
}


def test_a_list_may_hold_one_text_a_million_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of a parquet file are read as they are, and refused before they are unpacked to far more than the file."""
    path = tmp_path / "a.parquet"
    monkeypatch.setattr(files, "_ALWAYS", 1 << 20)
    for name, make in _NESTED.items():
        column = make("one", 3)
        pyarrow.parquet.write_table(pyarrow.table({"list": column}), path)
        with path.open("rb") as raw:
            assert [row.cells["list"] for row in Parquet().rows(path, raw, ReadOptions())] == column.to_pylist(), name
        column = make(1000 * "x", 4000)
        pyarrow.parquet.write_table(pyarrow.table({"list": column}), path)
        assert path.stat().st_size < 50_000, name
        usual, pool = pyarrow.default_memory_pool(), pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())
        pyarrow.set_memory_pool(pool)
        try:
            with path.open("rb") as raw, pytest.raises(DataError, match="more than 200 times their size"):
                list(Parquet().rows(path, raw, ReadOptions()))
        finally:
            pyarrow.set_memory_pool(usual)
        assert pool.max_memory() < 1 << 20, name


def test_text_that_is_packed_as_text_is_has_no_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_ALWAYS", 0)
    assert read(write(tmp_path / "a.txt.gz", TEXT)) == DOCUMENTS


def test_tables_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\r\n1,"one, with ""quotes""\r\nand a line"\r\n2,\r\n3,three\r\n')
    (tmp_path / "b.tsv").write_text('text\tid\nfour "4\t4\n')
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b"text\nfive\n"))
    paths = [tmp_path / "a.csv", tmp_path / "b.tsv", tmp_path / "c.csv.gz"]
    assert read(*paths) == ['one, with "quotes"\nand a line', "three", 'four "4', "five"]
    with pytest.raises(DataError, match=r"a\.csv: there is no 'body' \(data\.text_column; .*\); it has 'id', 'text'"):
        read(tmp_path / "a.csv", column="body")


def test_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="needs the package zstandard, of the extra prepare")
    pack = zstandard.ZstdCompressor().compress
    path = tmp_path / "a.jsonl.zst"
    rows = "".join(f'{{"text": "row {i}"}}\n' for i in range(9000)).encode()
    path.write_bytes(pack(rows[:70_000]) + pack(rows[70_000:]))
    assert read(path) == [f"row {i}" for i in range(9000)]
    path.write_bytes(pack(rows)[:-9])
    with pytest.raises(
        DataError, match=r"a\.jsonl\.zst, after line 6\d+: damaged zstd file \(it ends within a frame\)"
    ):
        read(path)
    path.write_bytes(rows)
    with pytest.raises(DataError, match=r"damaged zstd file .*name it without \.zst"):
        read(path)

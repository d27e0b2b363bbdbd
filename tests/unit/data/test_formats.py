"""The registry of table formats: one of another distribution is read wherever tables are."""

from __future__ import annotations

import gzip
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from capt.finetune.labels.config import LabelsData
from capt.finetune.labels.data import read_splits
from capt.pretrain import registry
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.data import formats
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.data.paths import resolve_files
from capt.pretrain.data.units import units_of
from capt.pretrain.pairs.forms import Pair, read_pairs
from capt.pretrain.retrieval.data import read_collections, read_documents
from tests.unit.data.doubles import documents

TOY = """
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import text_lines
from capt.pretrain.data.formats import Format, TableRow


class Toy(Format):
    def rows(self, path, raw, reading):
        for number, line in text_lines(path, raw):
            place = f"{path}, line {number}"
            cells = [cell.split("=") for cell in line.strip().split("|")]
            if any(len(cell) != 2 for cell in cells):
                raise DataError(f"{place}: no NAME=VALUE")
            yield TableRow(place, number, dict(cells))
"""


@pytest.fixture(params=["entry point", "row"])
def distribution(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A format of a distribution, or in a row of the registry; and one that cannot be imported."""
    folder = tmp_path / "packages"
    (folder / "theirs-1.dist-info").mkdir(parents=True)
    (folder / "toy_format.py").write_text(TOY)
    (folder / "theirs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    entries = "toyrows = toy_format:Toy\n" * (request.param == "entry point") + "absent = toy_format:Nothing\n"
    (folder / "theirs-1.dist-info" / "entry_points.txt").write_text(f"[capt.formats]\n{entries}")
    monkeypatch.syspath_prepend(folder)
    if request.param == "row":
        monkeypatch.setitem(formats.FORMATS, ".toyrows", "toy_format:Toy")
    importlib.invalidate_caches()
    for cached in (registry.entry_point_values, formats._load):
        cached.cache_clear()
    yield
    for cached in (registry.entry_point_values, formats._load):
        cached.cache_clear()
    sys.modules.pop("toy_format", None)


@pytest.mark.usefixtures("distribution")
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_format_of_another_distribution_is_read_in_every_room(tmp_path: Path, packed: str) -> None:
    def write(name: str, *rows: str) -> Path:
        path, content = tmp_path / f"{name}.toyrows{packed}", "".join(f"{row}\n" for row in rows).encode()
        path.write_bytes(gzip.compress(content) if packed else content)
        return path

    text = write("text", *(f"text=paragraph {i}" for i in range(3)))
    assert list(documents(FileCorpus(resolve_files([str(text)], "data.files"), "text", None))) == [
        f"paragraph {i}" for i in range(3)
    ]
    assert len(units_of([text], None, 8)) == 1, "such a file is not divided"
    pairs = write("pairs", "query=a|pos=b", "query=c|pos=d|neg=e")
    assert [pair for _, pair in read_pairs([pairs])] == [Pair("a", ("b",)), Pair("c", ("d",), ("e",))]
    (collection,) = read_collections(pairs)
    assert ([query for _, query in collection.queries], [text for _, text in collection.documents()]) == (
        ["a", "c"],
        ["b", "d", "e"],
    )
    assert list(read_documents(write("documents", "_id=d1|text=a", "text=b"))) == [("d1", "a"), ("2", "b")]
    labels = write("labels", *(f"text=review {i}|label={'good' if i % 2 else 'bad'}" for i in range(8)))
    splits = read_splits(LabelsData(train=labels))
    assert splits.data.labels == ["bad", "good"]
    assert len(splits.train) + len(splits.validation) == 8
    bad = write("bad", "text=a", "text")
    for read in (
        lambda: list(FileCorpus([bad], "text", None)),
        lambda: list(read_pairs([bad])),
        lambda: list(read_documents(bad)),
    ):
        with pytest.raises(DataError, match="line 2: no NAME=VALUE"):
            read()


@pytest.mark.usefixtures("distribution")
def test_a_format_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.absent").write_text("a")
    (tmp_path / "a.other").write_text("a")
    with pytest.raises(ConfigError, match=r"files ending in \.absent: the entry point 'toy_format:Nothing'"):
        list(read_pairs([tmp_path / "a.absent"]))
    with pytest.raises(DataError, match=r"no reader for files ending in \.other; known: .*\.toyrows"):
        list(read_pairs([tmp_path / "a.other"]))

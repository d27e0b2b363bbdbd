"""Files of a search index: passages and their places, vectors as an array, and the words of BM25.

``INDEX/index.json`` names the newest *generation*, a folder that appears whole and never changes. So a reader always
finds a complete index, whatever happens to a writer. ``INDEX/vectors`` is a `VectorStore`, from which a killed writer
continues, and in which passages that stay are found again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from pydantic import BaseModel, ConfigDict, ValidationError

from capt.pretrain.base.arrays import ArrayFile, Column, map_array, map_whole
from capt.pretrain.base.errors import DataError, quoted
from capt.pretrain.base.files import open_regular, read_json
from capt.pretrain.retrieval.passages import Passages
from capt.pretrain.retrieval.sources import SourceDocument

ABOUT, LOCK, STORE = "index.json", ".lock", "vectors"
PASSAGES, DOCUMENTS, VECTORS, WORDS, GRAPH = "passages.jsonl", "documents.jsonl", "vectors.npy", "words", "graph.faiss"
_ARRAYS = {"offset": np.int64, "document": np.int64, "order": np.int64}
_REMEDY = "; build the index again in a new folder"


class SearchRecord(BaseModel):
    """The record of an index, ``index.json``."""

    model_config = ConfigDict(frozen=True)
    generation: str
    """The folder of the generation."""
    model: str
    encoder: dict[str, Any]
    """The choices of the user about the encoder."""
    identity: dict[str, Any]
    """The `VectorIdentity` of the passages."""
    similarity: str
    length: int
    """Tokens of a passage at most, the prompt and special tokens included."""
    overlap: int
    documents: int
    passages: int
    fields: list[str]
    recall: float | None = None
    """The recall of the graph against the exact search; None where there is no graph."""

    @property
    def vectors(self) -> ArrayFile:
        """Type and shape of the file of vectors."""
        dtype = "<f4" if self.identity["dtype"] == "fp32" else "<f2"
        return ArrayFile(dtype, (self.passages, self.identity["dimension"]))


def read_search_record(folder: Path) -> SearchRecord:
    """Read the record of the index in ``folder``. Raises ``DataError``."""
    path = folder / ABOUT
    if not path.is_file():
        build = f"capt search build DOCUMENTS --model FOLDER --out {quoted(folder)}"
        raise DataError(f"{folder}: no index; {build} makes one, or continues one that was interrupted")
    try:
        return SearchRecord.model_validate(read_json(path))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise DataError(f"{path}: {where or 'content'} is not what capt search build writes{_REMEDY}") from None


class PassageWriter:
    """Writes the passages of a generation, document by document, in the order in which they come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []
        self.fields: dict[str, None] = {}
        self._columns = {name: Column(folder / f"{name}.npy", kind, has_header=True) for name, kind in _ARRAYS.items()}
        self._at = self.passages = 0

    def __enter__(self) -> PassageWriter:
        self._files = [(self.folder / name).open("xb") for name in (PASSAGES, DOCUMENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def add(self, document: SourceDocument, digest: str, passages: Passages) -> None:
        """Append a document, whose text has the hash ``digest``."""
        text, place = document.text, {"id": document.name, "file": document.file}
        rows, starts = [], []
        for number, (begin, end) in enumerate(passages, start=1):
            starts.append(self._at)
            line = document.line + (0 if document.is_row else text.count("\n", 0, begin))
            row = {**place, "line": line, "passage": number, "text": text[begin:end], "fields": document.fields}
            rows.append(_line(row))
            self._at += len(rows[-1])
        self._columns["offset"].append(starts)
        self._columns["document"].append([len(self.names)] * len(passages))
        self._files[0].write(b"".join(rows))
        about = {**place, "line": document.line, "sha256": digest, "passages": passages, "fields": document.fields}
        self._files[1].write(_line(about))
        self.names.append(document.name)
        self.fields.update(dict.fromkeys(document.fields))
        self.passages += len(passages)

    def finish(self, order: Int[np.ndarray, " n"]) -> None:
        """Write what is left, and for each passage its place among equal scores."""
        self._columns["order"].append(order)
        for column in self._columns.values():
            column.finish()


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Generation:
    """The files of a generation, mapped."""

    folder: Path
    record: SearchRecord
    offset: Int[np.ndarray, " n"]
    document: Int[np.ndarray, " n"]
    order: Int[np.ndarray, " n"]
    passages: np.ndarray
    """The bytes of ``passages.jsonl``."""
    rows: np.ndarray
    """The bytes of ``documents.jsonl``."""

    @classmethod
    def map(cls, index: Path, record: SearchRecord) -> Generation:
        """Map the generation that ``record`` names. Raises ``DataError``."""
        folder, shape = index / record.generation, (record.passages,)
        arrays = {
            name: map_array(folder / f"{name}.npy", ArrayFile(np.dtype(kind).str, shape), _REMEDY)
            for name, kind in _ARRAYS.items()
        }
        # Mapped as long as the object lives: a later generation may take its place meanwhile.
        passages, rows = (map_whole(folder / name, np.uint8) for name in (PASSAGES, DOCUMENTS))
        for name, lines in ((PASSAGES, passages), (DOCUMENTS, rows)):
            if lines[-1:].tobytes() != b"\n":
                raise DataError(f"{folder / name} is damaged: its last line has no end{_REMEDY}")
        return cls(folder, record, **arrays, passages=passages, rows=rows)

    def passage(self, number: int) -> dict[str, Any]:
        """The row of a passage."""
        end = int(self.offset[number + 1]) if number + 1 < len(self.offset) else len(self.passages)
        return _row(self.folder / PASSAGES, self.passages[int(self.offset[number]) : end].tobytes())

    def documents(self) -> Iterator[dict[str, Any]]:
        """Yield the row of each document."""
        for line in self.rows.tobytes().splitlines():
            yield _row(self.folder / DOCUMENTS, line)

    @property
    def has_graph(self) -> bool:
        """Tell whether vectors are searched by a graph."""
        return self.record.recall is not None

    def map_vectors(self) -> np.ndarray:
        """The vectors of the passages. Raises ``DataError``."""
        return map_array(self.folder / VECTORS, self.record.vectors, _REMEDY)


def _row(path: Path, line: bytes) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        raise DataError(f"{path} is damaged: a line is not JSON{_REMEDY}") from None
    return row


def rows_of_file(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON lines that is ours."""
    with open_regular(path) as file:
        for line in file:
            yield json.loads(line)

"""Pairs in folders of tables whose rows name texts by id: those of BEIR, and candidates that a teacher has scored."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from capt.pretrain.base.errors import ConfigError, DataError, counted, shown
from capt.pretrain.data.formats import ReadOptions, TableRow, has_header, suffix_of, suffixes
from capt.pretrain.data.row_filter import Tally
from capt.pretrain.data.tables import read_table
from capt.pretrain.pairs.cells import (
    DOCUMENT_IDS,
    QUERY_IDS,
    beir_file,
    id_of,
    number_of,
    read_qrels,
    text_of,
    title_of,
)
from capt.pretrain.pairs.layout import Layout
from capt.pretrain.pairs.selection import Selection

_TEXTS = ("text", "document_text", "passage", "document", "contents", "content", "body")
_QUERIES = ("query", "question", "query_text")


@dataclass(frozen=True)
class FolderForm:
    """A form of pairs that is a folder of tables.

    Attributes:
        fits: whether a folder has it.
        rows: yields the place and the cells of each row, texts in the place of ids; None where it has too few hard
            negatives.
        layout: the columns of the cells.
        describe: how a folder is read, for the log; ``{split}`` is the split.
        selects: whether ``rows`` has selected among the hard negatives.
    """

    fits: Callable[[Path], bool]
    rows: Callable[[Path, str, Selection, Tally], Iterator[tuple[str, dict[str, Any] | None]]]
    layout: Layout
    describe: str
    selects: bool = False


# ---- texts by id


def corpus_texts(path: Path, needed: set[str]) -> dict[str, str]:
    """Read the texts of documents that are needed, a title before its text; the others are not kept in memory."""
    is_beir = path.is_dir() and any(path.glob("corpus.*"))
    return _texts_by_id([_file_in(path, "corpus") if is_beir else path], needed, "a document")


def text_named(place: str, column: str, name: str, texts: Mapping[str, str]) -> str:
    """Return the text of an id. Raises ``DataError`` where there is none."""
    if name not in texts:
        raise DataError(
            f"{place}: {column!r} names {shown(name)}, which the corpus does not have; add it, or drop the row"
        )
    return texts[name]


def _texts_by_id(tables: Sequence[Path], needed: set[str], what: str) -> dict[str, str]:
    known = _TEXTS if what == "a document" else (*_TEXTS, *_QUERIES)
    ids = DOCUMENT_IDS if what == "a document" else (*DOCUMENT_IDS, *QUERY_IDS)

    def choose(names: list[str]) -> list[str]:
        chosen = [name for name in names if name in (*ids, *known, "title")]
        return chosen if {*chosen} & {*ids} and {*chosen} & {*known} else names

    found: dict[str, str] = {}
    for place, _, row in (row for table in tables for row in read_table(table, reading=ReadOptions(choose=choose))):
        name_column = next((name for name in ids if name in row), None)
        text_column = next((name for name in known if name in row), None)
        if name_column is None or text_column is None:
            raise DataError(
                f"{place}: {what} needs an id and a text (_id or docid, text or document_text); this row has "
                f"{', '.join(shown(name, 40) for name in list(row)[:10]) or 'nothing'}"
            )
        name = id_of(place, name_column, row[name_column])
        if name not in needed:
            continue
        parts = [title_of(place, row), *(value for value in [row.get(text_column)] if value is not None)]
        text = " ".join(part for value in parts if (part := text_of(place, text_column, value).strip()))
        if found.setdefault(name, text) != text:
            raise DataError(f"{place}: the id {shown(name)} has another text above; an id has one")
    return found


# ---- BEIR


def _file_in(folder: Path, stem: str) -> Path:
    found = beir_file(folder, stem)
    if found is None:
        raise DataError(f"{folder}: no {stem}.jsonl; a BEIR folder has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv")
    return found


def _is_beir(folder: Path) -> bool:
    return any((folder / "qrels").glob("*.tsv"))


def _beir(folder: Path, split: str, selection: Selection, left_out: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
    """The judged queries of a split: documents with a positive score are positives, the other judged ones negatives."""
    if selection.where is not None:
        raise ConfigError(f"where: it selects rows of a table, and {folder} has judgements (BEIR): remove it")
    corpus, queries = _file_in(folder, "corpus"), _file_in(folder, "queries")
    path = folder / "qrels" / f"{split}.tsv"
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in path.parent.glob("*.tsv"))) or "none"
        raise DataError(
            f"{path}: no such file; split={split} is chosen, and there are {there}: choose another by data.split "
            "(capt data inspect: --split NAME)"
        )
    # Query -> document -> place of the first judgement and grade of the last.
    judged: dict[str, dict[str, tuple[str, float]]] = {}
    for place, query, document, grade in read_qrels(path):
        of_query = judged.setdefault(query, {})
        first, earlier = of_query.get(document, (place, grade))
        if earlier != grade:
            left_out("contradictions", place)
        of_query[document] = first, grade
    texts = _texts_by_id([corpus], {name for of_query in judged.values() for name in of_query}, "a document")
    asked = _texts_by_id([queries], set(judged), "a query")
    for name, of_query in judged.items():
        place = next(place for place, _ in of_query.values())
        if name not in asked:
            raise DataError(f"{place}: query-id {shown(name)} is not in {queries}; add it, or drop its judgements")
        documents: tuple[list[str], list[str]] = ([], [])
        for document, (at, grade) in of_query.items():
            # The flag as an index: 0 the relevant documents, 1 the others.
            documents[grade <= 0].append(text_named(at, "corpus-id", document, texts))
        yield place, {"query": asked[name], "corpus-id": documents[0], "not relevant": documents[1]}


BEIR = FolderForm(_is_beir, _beir, Layout("query", ("corpus-id",), ("not relevant",)), "the qrels of {split}")


# ---- candidates


_TABLES = ("queries", "documents", "scores")
_IDS, _SCORES = "document_ids", "scores"
_PART = re.compile(r"-\d+-of-\d+$")


class _Scored(NamedTuple):
    """A query, and its documents that are read: the positive first. No ``ids`` where it has too few hard negatives."""

    place: str
    query: str
    ids: list[str]
    scores: list[float]


def _stem(path: Path) -> str:
    """The name of a table, of which a file may be a part: ``train`` of ``train-00000-of-00002.parquet``."""
    return _PART.sub("", path.name.partition(".")[0])


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.is_file() and suffix_of(path) in suffixes())


def _has_candidates(folder: Path) -> bool:
    stems = {_stem(path) for path in _files(folder)}
    return all(table in stems or (folder / table).is_dir() for table in _TABLES)


def _table_files(folder: Path, table: str, split: str) -> list[Path]:
    """The files of a table: those of its name in ``folder``, or those of ``split`` in a folder of its name."""
    inner = folder / table
    there = _files(inner) if inner.is_dir() else []
    found = [path for path in there if _stem(path) == split] or [p for p in _files(folder) if _stem(p) == table]
    if found:
        return found
    if there:
        names = ", ".join(sorted({_stem(path) for path in there}))
        raise DataError(
            f"{inner}: no table of split={split}; there are {names}: choose another by data.split (capt data inspect: "
            "--split NAME)"
        )
    raise DataError(f"{folder}: no table {table}; the form candidates has {', '.join(_TABLES)}, as .parquet or .jsonl")


def _candidates(
    folder: Path, split: str, selection: Selection, left_out: Tally
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """The queries of the table of scores, each with its first document as positive and the others as hard negatives."""
    tables = {table: _table_files(folder, table, split) for table in _TABLES}

    def scored(left_out: Tally) -> Iterator[_Scored]:
        for path in tables["scores"]:
            typed = not has_header(path)
            for row in selection.rows(path, split, left_out):
                yield _scored(row, selection, typed=typed)

    # A first pass over the ids, so that only the texts that are needed are kept in memory.
    asked: set[str] = set()
    needed: set[str] = set()
    for each in scored(lambda name, place: None):
        if each.ids:
            asked.add(each.query)
            needed.update(each.ids)
    documents = _texts_by_id(tables["documents"], needed, "a document")
    queries = _texts_by_id(tables["queries"], asked, "a query")
    for place, query, ids, scores in scored(left_out):
        if not ids:
            yield place, None
            continue
        if query not in queries:
            raise DataError(f"{place}: no query has the id {shown(query)}; add it, or drop the row")
        texts = [text_named(place, _IDS, name, documents) for name in ids]
        yield place, {
            "query": queries[query], "positive": texts[:1], "negatives": texts[1:],
            "positive_scores": scores[:1], "negative_scores": scores[1:],
        }  # fmt: skip


def _scored(row: TableRow, selection: Selection, *, typed: bool) -> _Scored:
    """Read the cells of a row of scores, and select of its candidates."""
    place, cells = row.place, row.cells
    column = next((name for name in QUERY_IDS if name in cells), None)
    if column is None or _IDS not in cells or _SCORES not in cells:
        raise DataError(
            f"{place}: a row of scores has query_id, {_IDS} and {_SCORES}; this one has "
            f"{', '.join(shown(name, 40) for name in list(cells)[:10]) or 'nothing'}"
        )
    ids, scores = (_listed(place, name, cells[name], typed=typed) for name in (_IDS, _SCORES))
    if not ids or len(ids) != len(scores):
        raise DataError(
            f"{place}: {counted(len(ids), 'id')} in {_IDS!r} and {counted(len(scores), 'score')} in {_SCORES!r}; each "
            "document has one, the first of them is the positive"
        )
    # Floats are checked in one go: a row may have thousands.
    if not (all(type(score) is float for score in scores) and math.isfinite(sum(map(abs, scores)))):
        scores = [number_of(place, score, _SCORES) for score in scores]
    query = id_of(place, column, cells[column])
    chosen = selection.negatives(scores[:1], scores[1:])
    if chosen is None:
        return _Scored(place, query, [], [])
    places = [0, *(1 + each for each in chosen)]
    return _Scored(place, query, [id_of(place, _IDS, ids[i]) for i in places], [scores[i] for i in places])


def _listed(place: str, column: str, value: Any, *, typed: bool) -> list[Any]:
    """Return the list in a cell; of a file without types the one that its text is."""
    if isinstance(value, str) and not typed:
        try:
            value = _list_in(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise DataError(f"{place}: {column!r} is no list: {shown(value, 40)}; write it as JSON") from None
    if not isinstance(value, list | tuple):
        raise DataError(f"{place}: {column!r} must be a list, it holds {shown(value, 40)} ({type(value).__name__})")
    return list(value)


def _list_in(text: str) -> Any:
    """Return the list that a text is: as JSON has it, with null and NaN, else as Python writes it."""
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text)


CANDIDATES = FolderForm(
    _has_candidates,
    _candidates,
    Layout(
        "query", ("positive",), ("negatives",), positive_scores="positive_scores", negative_scores="negative_scores"
    ),
    "the scored candidates of {split}",
    selects=True,
)

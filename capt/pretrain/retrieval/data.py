"""Retrieval data in files: BEIR folders, NanoBEIR's parquet, pairs, and plain text.

Documents are streamed, since a corpus may be larger than memory. Queries and judgements are held.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capt.pretrain.base.errors import ConfigError, DataError, repeated, shown
from capt.pretrain.base.files import is_utf8, printable, read_lines
from capt.pretrain.base.overlap import same_text, text_hash
from capt.pretrain.data.corpus import warn_once
from capt.pretrain.data.formats import ReadOptions, TableRow, suffix_of, suffixes
from capt.pretrain.data.tables import read_file, read_table
from capt.pretrain.pairs.cells import DOCUMENT_IDS, QUERY_IDS, beir_file, read_qrels, text_of, title_of, values
from capt.pretrain.pairs.layout import Layouts, unread_labels

Document = tuple[str, str]
"""The id and the text of a document."""

_ROW = '{"_id": "...", "text": "..."}'

JUDGED_BY = ("test", "dev", "train")
"""Splits of a BEIR folder, in the order in which one is looked for."""


@dataclass(frozen=True)
class Collection:
    """A retrieval data set.

    Attributes:
        name: for tables.
        documents: gives an iterator over the corpus, as often as it is called.
        queries: id and text of each.
        judged: for the id of a query the judgement of each document that has one.
        split: where the judgements come from.
        remarks: what the figures leave out of the files, for their protocol.
    """

    name: str
    documents: Callable[[], Iterator[Document]]
    queries: list[Document]
    judged: dict[str, dict[str, int]] = field(default_factory=dict)
    split: str = ""
    remarks: tuple[str, ...] = ()


def read_sets(paths: Sequence[Path], split: str | None, option: str) -> list[Collection]:
    """Read the data sets of all paths (`read_collections`). Raises ``ConfigError`` where two have one name."""
    collections = [each for path in paths for each in read_collections(path, split)]
    if twice := repeated(collection.name for collection in collections):
        raise ConfigError(f"{option}: two data sets are called {twice!r}; rename a folder or file")
    return collections


def read_collections(path: Path, split: str | None = None) -> list[Collection]:
    """Read the data sets at ``path``: a BEIR folder, a folder of NanoBEIR's parquet files, or a file of pairs.

    Args:
        path: a file or folder.
        split: of a BEIR folder; without it the first of test, dev and train.

    Raises:
        DataError: nothing of the kind is there, or a file is damaged.
        ConfigError: a split of something else than a BEIR folder.
    """
    if _is_beir(path):
        return [_beir(path, split)]
    if split is not None and path.exists():
        raise ConfigError(f"--split {split}: {path} is not a BEIR folder, and has no splits")
    if (path / "corpus").is_dir():
        return _nano_beir(path)
    if path.is_file():
        return [_of_pairs(path)]
    what = "no corpus.jsonl and no folder corpus in it" if path.is_dir() else "no such file or folder"
    raise DataError(f"{path}: {what}; give a BEIR folder, a folder of NanoBEIR's parquet files, or a file of pairs")


def read_documents(path: Path, column: str = "text", *, titles: bool = True) -> Iterator[Document]:
    """Yield the corpus at ``path``: that of a BEIR folder, the rows of a table with ``column``, or a text a line.

    ``titles`` false gives the texts of a table without their titles, in the same order.

    Raises:
        DataError: nothing of the kind is there, or a row is not what it should be.
    """
    if _is_beir(path):
        yield from _documents(_read(_table_of(path, "corpus")), titles=titles)
    elif path.is_dir():
        for collection in read_collections(path):
            yield from collection.documents()
    elif (suffix := suffix_of(path)) in suffixes() and suffix != ".txt":
        yield from _documents(_read(path, column), column, titles=titles)
    else:
        for number, line in enumerate(read_lines([path]), start=1):
            if line.strip():
                _require_text(f"{path}, line {number}", line)
                yield str(number), line.strip()


def read_queries(folder: Path) -> Iterator[Document]:
    """Yield all queries of a BEIR folder, judged or not, none where it has no queries; the judged ones of NanoBEIR.

    Raises:
        DataError: as `read_documents`.
    """
    if not _is_beir(folder):
        for collection in read_collections(folder):
            yield from collection.queries
    elif (queries := beir_file(folder, "queries")) is not None:
        yield from _documents(_read(queries))


def is_collection(path: Path) -> bool:
    """Return whether a path is a folder of BEIR or of NanoBEIR, with queries beside the documents."""
    return _is_beir(path) or (path / "corpus").is_dir()


def _is_beir(path: Path) -> bool:
    return beir_file(path, "corpus") is not None


def _beir(folder: Path, split: str | None) -> Collection:
    corpus, queries = (_table_of(folder, name) for name in ("corpus", "queries"))
    names = [split] if split else list(JUDGED_BY)
    found = next((path for name in names if (path := folder / "qrels" / f"{name}.tsv").is_file()), None)
    if found is None:
        have = sorted(path.stem for path in (folder / "qrels").glob("*.tsv"))
        raise DataError(
            f"{folder}: no qrels/{names[0]}.tsv; " + (f"it has {', '.join(have)}: give --split" if have else "no qrels")
        )
    # Judgements first: only queries that have some are kept in memory.
    judged, contradictions = _judged(read_qrels(found), found)
    texts = [(name, text) for name, text in _documents(_read(queries), judged=True) if name in judged]
    if not texts:
        raise DataError(f"{found}: none of its queries is in {queries}")
    remarks = _remarks(found, texts, judged, contradictions)
    return Collection(
        folder.name,
        lambda: _documents(_read(corpus), judged=True),
        _unique(texts, queries),
        judged,
        found.stem,
        remarks,
    )


def _remarks(
    source: Path, queries: Sequence[Document], judged: dict[str, dict[str, int]], contradictions: int = 0
) -> tuple[str, ...]:
    """Say what of the judgements has no part in the figures. Raises ``DataError`` where nothing is relevant."""
    if not any(grade > 0 for name, _ in queries for grade in judged[name].values()):
        raise DataError(f"{source}: no judgement of its queries is above 0, so that no document is relevant")
    counts = {
        "judged queries are not among the queries, and left out": len(judged) - len({name for name, _ in queries}),
        "queries have no text": sum(not text.strip() for _, text in queries),
        "judgements contradict an earlier one, the last counts": contradictions,
    }
    return tuple(f"{count} {what}" for what, count in counts.items() if count)


def _table_of(folder: Path, stem: str) -> Path:
    found = beir_file(folder, stem)
    if found is None:
        raise DataError(f"{folder}: no {stem}.jsonl, which a BEIR folder has")
    return found


def _read(path: Path, column: str = "text") -> Iterator[TableRow]:
    return read_file(path, ReadOptions(keys=("_id", column)))


def _documents(
    rows: Iterable[TableRow], column: str = "text", *, titles: bool = True, judged: bool = False
) -> Iterator[Document]:
    """Yield rows with an id, ``column`` and perhaps ``title``: the text of a row is title, space, text.

    Rows without an id have their number, but not where they are ``judged`` by their ids.
    """
    for where, number, row in rows:
        name, text = document_row(where, row, column, titles=titles)
        if name is None and judged:
            raise DataError(f'{where}: no "_id", by which judgements name it; {_ROW} is expected')
        yield name or str(number), text


def document_row(
    where: str, row: Mapping[str, Any], column: str = "text", *, titles: bool = True
) -> tuple[str | None, str]:
    """Return the id of a row, None where it has none, and its text: title, space, ``column``. Raises ``DataError``."""
    text, title = row.get(column), title_of(where, row)
    if not isinstance(text, str):
        has = ", ".join(shown(key, 40) for key in list(row)[:10]) or "nothing"
        raise DataError(f'{where}: "{column}" should be a text, it is {shown(text)}; the row has {has}')
    key = next((key for key in (*DOCUMENT_IDS, *QUERY_IDS) if key in row), None)
    name = None if key is None else row[key]
    if key is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise DataError(f'{where}: "{key}" should be a text, not {shown(name)}')
    if key is not None and not str(name).strip():
        raise DataError(f'{where}: "{key}" is empty; give the row an id, or remove it')
    _require_text(where, title, text, str(name))
    return (
        None if key is None else str(name).strip(),
        f"{title} {text}".strip() if title and titles and column != "title" else text,
    )


def _require_text(where: str, *texts: str) -> None:
    if any("\0" in text for text in texts):
        raise DataError(f"{where}: binary, not text: it holds a NUL")
    if not all(map(is_utf8, texts)):
        raise DataError(f"{where}: half a character (a lone surrogate), which is not text")


def _unique(documents: Iterable[Document], source: Path) -> list[Document]:
    seen: set[str] = set()
    kept = []
    for name, text in documents:
        if name in seen:
            raise DataError(f"{source}: the id {shown(name)} is there twice; leave one of the two out")
        seen.add(name)
        kept.append((name, text))
    return kept


def _judged(judgements: Iterable[tuple[str, str, str, float]], source: Path) -> tuple[dict[str, dict[str, int]], int]:
    """Return the judgements of each query, and the number of those that contradict an earlier one."""
    judged: dict[str, dict[str, int]] = {}
    contradictions = 0
    for place, query, document, grade in judgements:
        if grade % 1:
            raise DataError(f"{place}: query-id, corpus-id and a whole number as score are expected, not {grade:g}")
        # setdefault keeps the earlier judgement, to compare with; the later one then counts.
        contradictions += judged.setdefault(query, {}).setdefault(document, int(grade)) != grade
        judged[query][document] = int(grade)
    if not judged:
        raise DataError(f"{source}: no judgements")
    return judged, contradictions


def _nano_beir(folder: Path) -> list[Collection]:
    """Read folders ``corpus``, ``queries`` and ``qrels`` with a parquet file for each data set, as the hub has them."""
    names = sorted({_split_of(path) for path in (folder / "corpus").glob("*.parquet")})
    if not names:
        raise DataError(f"{folder / 'corpus'}: no parquet file")
    return [_nano(folder, name) for name in names]


def _split_of(path: Path) -> str:
    # `NanoMSMARCO-00000-of-00001.parquet` -> `NanoMSMARCO`.
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)


_LARGEST_GRADE = 10**18
"""The largest judgement, as `read_qrels` takes them from files of text."""


def _nano(folder: Path, name: str) -> Collection:
    def rows(kind: str) -> Iterator[TableRow]:
        files = sorted(path for path in (folder / kind).glob("*.parquet") if _split_of(path) == name)
        if not files:
            raise DataError(f"{folder / kind}: no parquet file of {name}")
        for path in files:
            yield from read_file(path)

    def judgements() -> Iterator[tuple[str, str, str, float]]:
        for where, _, row in rows("qrels"):
            query, document, grade = row.get("query-id"), row.get("corpus-id"), row.get("score", 1)
            if not isinstance(query, str | int) or not isinstance(document, str | int):
                raise DataError(f'{where}: columns "query-id" and "corpus-id" are expected, it has {", ".join(row)}')
            # The rest of NaN and of infinity is NaN. A sum of huge ones is infinite, and a figure of it no number.
            if not isinstance(grade, int | float) or grade % 1 or abs(grade) > _LARGEST_GRADE:
                raise DataError(f'{where}: "score" is {shown(grade)}; a whole number is expected')
            yield where, str(query).strip(), str(document).strip(), grade

    judged, contradictions = _judged(judgements(), folder / "qrels")
    # Queries without a judgement are left out, as those of a BEIR folder are.
    queries = [(each, text) for each, text in _documents(rows("queries"), judged=True) if each in judged]
    if not queries:
        raise DataError(f"{folder}: none of the judged queries of {name} is among its queries")
    remarks = _remarks(folder / "qrels", queries, judged, contradictions)
    return Collection(
        name,
        lambda: _documents(rows("corpus"), judged=True),
        _unique(queries, folder / "queries"),
        judged,
        name,
        remarks,
    )


@dataclass(frozen=True)
class PairRow:
    """A query with its positives and negatives, and the other columns of the row."""

    where: str
    query: str
    positives: list[str]
    negatives: list[str]
    others: dict[str, Any]


def read_pair_rows(files: Sequence[Path]) -> Iterator[PairRow]:
    """Yield rows with a query and one positive or several, from tables of any kind (`read_table`).

    Columns are found by their names, or by their order, as for training on pairs (`Layouts`); scores and labels have no
    meaning here and are among the other columns. The log names such columns.

    Raises:
        DataError: a file cannot be read, or a row has no query or no positive, or one of them is not a text.
    """
    for path in files:
        empty, layouts = True, Layouts("columns", {}, path, with_corpus=False)
        for where, _, row in read_table(path):
            layout = layouts.find(where, row)
            query, positives, negatives = (
                [text_of(where, name, value) for name in names for value in values(row.get(name))]
                for names in ((layout.query,), layout.positives, layout.negatives)
            )
            if len(query) != 1:
                raise DataError(f"{where}: {layout.query!r} holds {len(query)} texts; a row has one query")
            if not positives:
                raise DataError(f"{where}: no positive; remove the row")
            if not all(text.strip() for text in (*query, *positives)):
                raise DataError(f"{where}: an empty query or positive; remove the row")
            # Once, although a file is read twice where its positives are the corpus.
            for remark in unread_labels(path, layout):
                warn_once(remark)
            used = {layout.query, *layout.positives, *layout.negatives}
            others = {name: value for name, value in row.items() if name not in used}
            # The other columns are written again, as JSON.
            _require_json(where, others)
            empty = False
            yield PairRow(where, query[0], positives, negatives, others)
        if empty:
            raise DataError(f"{path}: no rows")


def _require_json(where: str, row: dict[str, Any]) -> None:
    try:
        is_text = is_utf8(json.dumps(row, ensure_ascii=False))
    except (TypeError, ValueError) as problem:  # bytes or a date of a parquet file
        raise DataError(f"{where}: {printable(str(problem))}; leave the column out") from None
    if not is_text:
        raise DataError(f"{where}: half a character (a lone surrogate), which is not text")


def _of_pairs(path: Path) -> Collection:
    """Queries of a pair file; the corpus is its different positives and negatives, whose ids are hashes.

    Copies of a text (:mod:`capt.pretrain.pairs.known`) are one, with the id of the first: a copy of a positive is no
    wrong answer.
    """
    names: tuple[dict[bytes, str], dict[bytes, str]] = ({}, {})
    queries: dict[str, str] = {}
    judged: dict[str, dict[str, int]] = {}

    def name_of(text: str, *, is_query: bool = False) -> str:
        return names[is_query].setdefault(text_hash(same_text(text)), text_hash(text).hex())

    # Two passes over the file: queries and judgements are held, documents are streamed.
    for pair in read_pair_rows([path]):
        name = name_of(pair.query, is_query=True)
        queries.setdefault(name, pair.query)
        own, _ = [[name_of(text) for text in texts] for texts in (pair.positives, pair.negatives)]
        judged.setdefault(name, {}).update(dict.fromkeys(own, 1))

    def documents() -> Iterator[Document]:
        seen: set[str] = set()
        for pair in read_pair_rows([path]):
            for text in (*pair.positives, *pair.negatives):
                if (name := name_of(text)) not in seen:
                    seen.add(name)
                    yield name, text

    return Collection(path.name.partition(".")[0], documents, list(queries.items()), judged, "pairs")

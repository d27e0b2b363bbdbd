"""Read pairs of texts in the forms in which they are published: one `Pair` a row, whatever its columns are called.

A row that cannot be meant (a number in the place of a text, a score that is not a number, mixed-up columns) is a
``DataError``. What can be left out or kept without harm is counted, and said at the end (`Counts`).
"""

from __future__ import annotations

import glob
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from capt.pretrain.base.errors import ConfigError, DataError, counted, did_you_mean, shown
from capt.pretrain.base.overlap import same_text
from capt.pretrain.pairs.cells import id_of, is_number, number_of, score_of, text_of, values
from capt.pretrain.pairs.folders import BEIR, CANDIDATES, FolderForm, corpus_texts, text_named
from capt.pretrain.pairs.known import negative_fault
from capt.pretrain.pairs.layout import Layout, Layouts, unread_labels
from capt.pretrain.pairs.selection import EVERYTHING, Selection

logger = logging.getLogger(__name__)


class Form(NamedTuple):
    """A form of pairs: what its rows are, and how they are found where it is a folder of tables."""

    about: str
    folder: FolderForm | None = None


FORMS = {
    "auto": Form("whichever of the others the names of the columns say"),
    "flagembedding": Form("query, pos, neg (lists), pos_scores, neg_scores, prompt"),
    "columns": Form("anchor, positive, negatives: by name, else in the order of the columns"),
    "scores": Form("two texts and the score of their similarity"),
    "texts": Form("one column alone"),
    "ids": Form("a query and the ids of documents, whose texts are in `corpus`"),
    "beir": Form("a folder with corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv", BEIR),
    "candidates": Form("a folder with the tables queries, documents and scores: candidates of each query", CANDIDATES),
}
"""The forms that `read_pairs` knows."""

_AS_MISSING = ("nan", "NaN", "None", "null", "NULL", "<NA>", "#N/A")


@dataclass(frozen=True)
class Pair:
    """A query, the documents that belong to it, and documents that do not.

    ``score`` is the similarity of query and document in a row of two texts and a score. A row of one text alone has no
    positives. The scores of positives and negatives are a teacher's, one for each document. ``prompt`` is text before
    the query, in place of the source's.
    """

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    positive_scores: tuple[float, ...] | None = None
    negative_scores: tuple[float, ...] | None = None
    score: float | None = None
    prompt: str | None = None


def _count(description: str) -> Any:
    return field(default=0, metadata={"says": description})


@dataclass
class Counts:
    """The counts of `read_pairs`: rows, usable rows, and each thing that was left out or looks like a mistake."""

    rows: int = 0
    used: int = 0
    columns: dict[str, str] = field(default_factory=dict)
    """File -> how its columns were read."""
    without_query: int = _count("rows left out, the query is empty")
    without_positive: int = _count("rows left out, they have no document")
    empty_texts: int = _count("empty documents, left out")
    duplicates: int = _count("rows that repeat an earlier row")
    query_is_positive: int = _count("rows whose query equals a document of theirs")
    negative_is_positive: int = _count("negatives left out, they equal a positive of their row")
    negative_is_query: int = _count("negatives left out, they equal their query")
    as_missing: int = _count("rows with a text that reads nan, None or null, as programs write a missing one")
    contradictions: int = _count("judgements that contradict an earlier one, the last counts")
    filtered: int = _count("rows left out by where")
    null_compared: int = _count("rows left out, where compares a null of theirs")
    few_negatives: int = _count("rows left out, they have fewer hard negatives than stored_negatives")
    first: dict[str, str] = field(default_factory=dict)
    """Name of a count -> the place of the first case."""

    def add(self, name: str, place: str) -> None:
        """Count one case of ``name``."""
        setattr(self, name, getattr(self, name) + 1)
        self.first.setdefault(name, place)

    def remarks(self) -> list[str]:
        """Return a line for each count that is not zero, with the place of the first case."""
        found = [(f.name, getattr(self, f.name), f.metadata["says"]) for f in fields(self) if "says" in f.metadata]
        where = {name: f", the first at {place}" for name, place in self.first.items()}
        return [f"{says}: {number:,}{where.get(name, '')}" for name, number, says in found if number]


def check_form(form: str, corpus: Path | None) -> None:
    """Raise ``ConfigError`` for an unknown form, and for one that does not go with ``corpus``; no row is read."""
    if form not in FORMS:
        raise ConfigError(f"form: there is no form {form!r}; {did_you_mean(form, list(FORMS))}")
    if form == "ids" and corpus is None:
        raise ConfigError("form=ids needs the texts of the documents: name them by corpus")
    if (form in ("scores", "texts") or FORMS[form].folder is not None) and corpus is not None:
        raise ConfigError(f"corpus: form={form} looks no document up in it; leave corpus out, or form=ids")


def read_pairs(
    files: Sequence[Path],
    *,
    form: str = "auto",
    corpus: Path | None = None,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    counts: Counts | None = None,
    selection: Selection = EVERYTHING,
) -> Iterator[tuple[str, Pair]]:
    """Yield the place (``FILE, line 3``) and the pair of every usable row.

    Args:
        files: files, patterns, folders of ``datasets``, of BEIR or of candidates, or ids of the hub: see `read_table`.
        form: one of `FORMS`.
        corpus: where the texts of document ids are: a table with ids and texts, or a folder with corpus.jsonl.
        columns: role (query, positive, negative, score, positive_scores, negative_scores, or text for one column alone)
            -> name, where the names are not known. Several columns of negatives are separated by commas.
        split: the split of a data set of the hub, of BEIR's qrels, or of the tables of candidates.
        counts: filled while rows are read; what it has to say is logged at the end.
        selection: the rows, and the hard negatives of a row, that are read.

    Raises:
        DataError: a row is malformed, or all rows together cannot train anything (no usable row, one text throughout,
            one score throughout, texts that are numbers, queries that all equal their documents).
        ConfigError: unknown form, or a role that does not exist.
    """
    check_form(form, corpus)
    counts = Counts() if counts is None else counts
    variation = _Variation(counts)
    for path in _expanded(files):
        folder = FORMS[form].folder or folder_form(path)
        if folder is not None:
            rows: Iterable[tuple[str, Pair]] = _folder(folder, path, split, counts, selection)
        else:
            rows = _table(path, form, corpus, columns or {}, split, counts, selection)
        for place, pair in rows:
            variation.add(pair)
            yield place, pair
    variation.report(files)


def _expanded(files: Sequence[Path]) -> Iterator[Path]:
    if not files:
        raise DataError("no file of pairs is named; name one (data.files)")
    for path in files:
        # A file whose name has an asterisk or a bracket is no pattern.
        if glob.has_magic(str(path)) and not path.exists():
            yield from [Path(name) for name in sorted(glob.glob(str(path), recursive=True))] or [path]
        else:
            yield path


def folder_form(path: Path) -> FolderForm | None:
    """Return the form of a folder of tables; None where it is none of `FORMS`."""
    found = (form.folder for form in FORMS.values() if form.folder is not None and form.folder.fits(path))
    return next(found, None) if path.is_dir() else None


# ---- folders and tables


def _folder(
    form: FolderForm, path: Path, split: str, counts: Counts, selection: Selection
) -> Iterator[tuple[str, Pair]]:
    counts.columns[str(path)] = form.describe.format(split=split)
    left = EVERYTHING if form.selects else selection
    for place, cells in form.rows(path, split, selection, counts.add):
        counts.rows += 1
        if cells is None:
            counts.add("few_negatives", place)
        # From here on it is a row like any other, with the same checks.
        elif (pair := _pair(place, cells, form.layout, None, counts, left)) is not None:
            yield place, pair


def _table(
    path: Path, form: str, corpus: Path | None, columns: Mapping[str, str], split: str, counts: Counts,
    selection: Selection,
) -> Iterator[tuple[str, Pair]]:  # fmt: skip
    layouts = Layouts(form, columns, path, with_corpus=corpus is not None)
    texts: dict[str, str] | None = None
    # A first pass over the ids, so that of the corpus only the texts that are needed are kept in memory.
    if corpus is not None:
        rows = selection.rows(path, split, lambda name, place: None)
        needed = {i for place, _, row in rows for i in _ids(row, layouts.find(place, row), place)}
        texts = corpus_texts(corpus, needed)
    for place, _, row in selection.rows(path, split, counts.add, layouts.choose):
        layout = layouts.find(place, row)
        # Once a file: how its columns were read, for the log and `capt data inspect`.
        if str(path) not in counts.columns:
            counts.columns[str(path)] = layout.describe()
            if layout.by_order and layouts.has_header:
                logger.warning(
                    "%s: the first line counts as names of columns, none of them a usual one, so their order decides:"
                    " %s; data.columns='{query: NAME, positive: NAME}' names them; if the first line is itself a pair, "
                    "put a line of names above it, such as anchor and positive", path, layout.describe(),
                )  # fmt: skip
            for remark in unread_labels(path, layout):
                logger.warning("%s", remark)
        counts.rows += 1
        pair = _pair(place, row, layout, texts, counts, selection)
        if pair is not None:
            yield place, pair
    layouts.end()


def _pair(
    place: str, row: Mapping[str, Any], layout: Layout, texts: dict[str, str] | None, counts: Counts,
    selection: Selection = EVERYTHING,
) -> Pair | None:  # fmt: skip
    # A query is never an id, even where documents are.
    queries = _documents(place, row, (layout.query,), None)
    prompt = None if layout.prompt is None else row.get(layout.prompt)
    if len(queries) > 1:
        raise DataError(f"{place}: {layout.query!r} holds {len(queries)} texts; a row has one query")
    score = None
    if layout.score is not None:
        score = score_of(place, row.get(layout.score), layout.score, layout.is_label, selection.scores)
    positives = _scored(place, row, layout.positives, layout.positive_scores, texts)
    negatives = _scored(place, row, layout.negatives, layout.negative_scores, texts)
    if not queries or not queries[0].strip():
        counts.add("without_query", place)
        return None
    query = queries[0]
    positives = _not_empty(place, positives, counts)
    if any(text.strip() in _AS_MISSING for text in (query, *(text for text, _ in (*positives, *negatives)))):
        counts.add("as_missing", place)
    if layout.positives and not positives:
        counts.add("without_positive", place)
        return None
    # A negative that is also a positive would be pulled and pushed by the same row, so it is left out and counted.
    own, known = same_text(query), {same_text(text) for text, _ in positives}
    if own in known:
        counts.add("query_is_positive", place)
    kept = []
    for text, number in _not_empty(place, negatives, counts):
        if fault := negative_fault(same_text(text), own, known):
            counts.add(fault, place)
        else:
            kept.append((text, number))
    if selection.selects_negatives and layout.positives:
        columns = (layout.positive_scores, layout.negative_scores)
        scored = all(column is not None and row.get(column) is not None for column in columns)
        if selection.negatives_below is not None and kept and not scored:
            raise DataError(
                f"{place}: no teacher's scores (pos_scores, neg_scores), which negatives_below compares; capt mine "
                "--cross-encoder writes them"
            )
        chosen = selection.negatives([number for _, number in positives], [number for _, number in kept])
        if chosen is None:
            counts.add("few_negatives", place)
            return None
        kept = [kept[i] for i in chosen]
    return Pair(
        query,
        tuple(text for text, _ in positives),
        tuple(text for text, _ in kept),
        _numbers(positives, layout.positive_scores, row),
        _numbers(kept, layout.negative_scores, row),
        score,
        None if prompt is None else text_of(place, "prompt", prompt),
    )


def _numbers(
    documents: list[tuple[str, float]], column: str | None, row: Mapping[str, Any]
) -> tuple[float, ...] | None:
    return None if column is None or row.get(column) is None else tuple(number for _, number in documents)


def _scored(
    place: str, row: Mapping[str, Any], columns: Sequence[str], scores: str | None, texts: dict[str, str] | None
) -> list[tuple[str, float]]:
    """The documents of some columns, each with its teacher's score (0 where there are none)."""
    documents = _documents(place, row, columns, texts)
    given = None if scores is None else row.get(scores)
    if given is None:
        return [(text, 0.0) for text in documents]
    values = given if isinstance(given, list | tuple) else [given]
    if len(values) != len(documents):
        raise DataError(
            f"{place}: {scores!r} has {counted(len(values), 'score')} for {counted(len(documents), 'document')}; give "
            "one for each"
        )
    assert scores is not None
    return list(zip(documents, (number_of(place, value, scores) for value in values), strict=True))


def _not_empty(place: str, documents: list[tuple[str, float]], counts: Counts) -> list[tuple[str, float]]:
    kept = [(text, number) for text, number in documents if text.strip()]
    for _ in range(len(documents) - len(kept)):
        counts.add("empty_texts", place)
    return kept


def _documents(place: str, row: Mapping[str, Any], columns: Sequence[str], texts: dict[str, str] | None) -> list[str]:
    """The texts of some columns; those that ``texts`` has by id, where the row gives ids."""
    found = []
    for column in columns:
        for value in values(row.get(column)):
            if texts is None or not _is_id(value):
                found.append(text_of(place, column, value))
            else:
                found.append(text_named(place, column, id_of(place, column, value), texts))
    return found


# ---- documents by id


def _ids(row: Mapping[str, Any], layout: Layout, place: str) -> Iterator[str]:
    for column in (*layout.positives, *layout.negatives):
        for value in values(row.get(column)):
            if _is_id(value):
                yield id_of(place, column, value)


def _is_id(value: Any) -> bool:
    return value != "" and not (isinstance(value, Mapping) and "text" in value)


# ---- all rows together


class _Variation:
    """The variation of all rows together, without which they cannot train anything."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        # A hash of eight bytes a row: the rows themselves might not fit into memory.
        self._rows = array("q")
        self._first: Pair | None = None
        self._one = {"query": True, "document": True, "score": True}
        self._numeric = {"query": True, "document": True}
        self._own_negatives = True
        """True while every row of the file that named negatives lost all of them."""

    def add(self, pair: Pair) -> None:
        """Take one row; what differs is found at the second one."""
        self._counts.used += 1
        self._rows.append(hash((pair.prompt, pair.query, pair.positives, pair.negatives, pair.score)))
        first = self._first = self._first or pair
        self._one["query"] &= pair.query == first.query
        self._one["document"] &= pair.positives[:1] == first.positives[:1]
        self._one["score"] &= pair.score == first.score
        # Once one text is no number, no further one is parsed.
        self._numeric["query"] &= self._numeric["query"] and is_number(pair.query)
        self._numeric["document"] &= self._numeric["document"] and all(map(is_number, pair.positives))
        self._own_negatives &= not pair.negatives

    def report(self, files: Sequence[Path]) -> None:
        """Raise ``DataError`` where the rows cannot train anything, and log what was counted."""
        counts, first = self._counts, self._first
        name = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
        counts.duplicates = len(self._rows) - len(np.unique(np.frombuffer(self._rows, np.int64)) if self._rows else ())
        remarks = counts.remarks()
        if first is None:
            raise DataError(
                f"{name}: no usable row of {counts.rows:,}" + (f": {'; '.join(remarks)}" if remarks else "")
            )
        # A single row may be anything; of several, what never differs says that a wrong column is read.
        for part in ("query", *(("document",) if first.positives else ())):
            text = shown(first.query if part == "query" else first.positives[0], 60)
            if counts.used > 1 and self._numeric[part]:
                raise DataError(
                    f"{name}: every {part} is a number, as {text}: is it an id? Texts of ids come by corpus; "
                    "data.columns='{query: NAME, positive: NAME}' chooses other columns"
                )
            # Scored pairs may share one of the two texts: their scores differ.
            if counts.used > 1 and self._one[part] and (first.score is None or all(self._one.values())):
                raise DataError(
                    f"{name}: every {part} of {counts.used:,} rows is {text}: rows that do not differ teach nothing; "
                    "check that the right column is read"
                )
        if counts.used > 1 and first.score is not None and self._one["score"]:
            raise DataError(
                f"{name}: every score of {counts.used:,} rows is {first.score:g}; scores must "
                "differ; form=columns reads the texts without them"
            )
        if counts.used > 1 and counts.query_is_positive == counts.used:
            raise DataError(
                f"{name}: every query equals its document: is one column named twice? To train on one column alone, "
                "form=texts"
            )
        # A single row may name a wrong negative; all rows say that the columns are swapped.
        if counts.used > 1 and counts.negative_is_positive >= counts.used and self._own_negatives:
            raise DataError(f"{name}: every negative equals a positive of its row: are the columns mixed up?")
        for remark in remarks:
            logger.warning("%s: %s", name, remark)

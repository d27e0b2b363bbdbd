"""The roles of the columns of a table, by their names or, as in sentence-transformers, by their places."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from capt.pretrain.base.errors import ConfigError, DataError, did_you_mean, shown
from capt.pretrain.data.formats import has_header
from capt.pretrain.pairs.cells import is_number

ROLES: dict[str, tuple[str, ...]] = {
    "query": (
        *("query", "anchor", "question", "query_text", "sentence1", "sentence_1", "sentence_A", "text1"),
        *("question1", "sent0"),
    ),
    "positive": (
        *("positive", "pos", "positives", "document", "passage", "answer", "response", "pos_doc", "positive_passages"),
        *("sentence2", "sentence_2", "sentence_B", "text2", "question2", "sent1", "positive_document_ids"),
        *("positive_ids", "pos_ids", "positive_id", "pos_id"),
    ),
    "negative": (
        *(
            "negative",
            "neg",
            "negatives",
            "neg_doc",
            "negative_passages",
            "hard_negative",
            "hard_negatives",
            "hard_neg",
        ),
        *("negative_document_ids", "negative_ids", "neg_ids", "negative_id", "neg_id"),
    ),
    "score": ("score", "scores", "similarity", "similarity_score", "relatedness_score"),
    "positive_scores": ("pos_scores", "positive_scores"),
    "negative_scores": ("neg_scores", "negative_scores"),
}
"""The names by which a column of each role is known; the first that a table has is taken."""

LABELS = ("label", "labels", "is_duplicate", "gold_label")
"""Names of columns that hold a score from 0 to 1, or the number of a class, which is not a score."""
_KINDS = {"flagembedding": "pairs", "columns": "pairs", "scores": "scores", "texts": "texts", "ids": "pairs"}
_IDS = tuple(name for names in ROLES.values() for name in names if name.endswith(("_id", "_ids")))
_USUAL = {name.lower(): name for names in (*ROLES.values(), LABELS, ("text", "sentence", "prompt")) for name in names}
_NUMBERED = re.compile(r"(positive|pos|negative|neg|hard_negative|hard_neg)[_-]?(\d{1,4})")
_NUMBER_OF_ROW = re.compile(
    r"|Unnamed: 0|__index_level_\d+__|_?id|idx|index|.*[_-](id|idx)|[qpd]id\d?|docid", re.IGNORECASE
)
_PROMPT = "prompt"
_FIRST_OF_LIST = "column 1"
_LIST = re.compile(r"\s*\[\s*['\"\]]")
_NO_NAME = re.compile(r".{61,}|.*[.?!]|(\S+\s+){4,}\S+", re.DOTALL)
"""A cell that reads as a sentence and not as the name of a column."""


@dataclass(frozen=True)
class Layout:
    """The columns of each role."""

    query: str
    positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    score: str | None = None
    positive_scores: str | None = None
    negative_scores: str | None = None
    prompt: str | None = None
    """Text before the query in place of the source's prompt, in a row of FlagEmbedding's form."""
    is_label: bool = False
    """True where the score is a column of `LABELS`, which may hold classes."""
    ignored: tuple[str, ...] = ()
    by_order: bool = False

    @property
    def kind(self) -> str:
        """The kind of a row: ``pairs``, ``scores`` (two texts and a score) or ``texts`` (one text alone)."""
        return "scores" if self.score is not None else "pairs" if self.positives else "texts"

    def describe(self) -> str:
        """The roles and their columns in one line."""
        parts = {
            "query" if self.positives else "text": (self.query,),
            "positive" if self.score is None else "second text": self.positives,
            "negative": self.negatives,
            "score": (self.score,) if self.score is not None else (),
            "prompt of the query": (self.prompt,) if self.prompt is not None else (),
            "not read": self.ignored,
        }
        said = "; ".join(
            f"{role} {', '.join(shown(n, 40) for n in names[:8])}" for role, names in parts.items() if names
        )
        return f"{said} (by the order of the columns)" if self.by_order else said


class Layouts:
    """Finds the layout of every row of a file. Rows of JSON may lack a key that others have."""

    def __init__(self, form: str, columns: Mapping[str, str], path: Path, *, with_corpus: bool) -> None:
        known = [*ROLES, "text"]
        for role in columns:
            if role not in known:
                raise ConfigError(f"columns: there is no role {shown(role)}; {did_you_mean(role, known)}")
        self._form, self._columns, self._path, self._with_corpus = form, columns, path, with_corpus
        self.has_header = has_header(path)
        self._found: dict[tuple[str, ...], Layout] = {}
        self._first: tuple[str, Layout, tuple[str, ...]] | None = None
        self._not_read: tuple[str, ...] = ()
        self._all: list[str] = []
        self._unseen = {name.strip(): role for role, value in columns.items() for name in value.split(",")}

    def choose(self, names: list[str]) -> list[str]:
        """The columns to read where they can be read alone: those with a role, or all where the order decides."""
        layout, self._all = self._by_name(names), names
        if layout is None:
            return names
        roles = (layout.query, *layout.positives, *layout.negatives, layout.score)
        needed = {*roles, layout.positive_scores, layout.negative_scores, layout.prompt}
        self._not_read = tuple(name for name in names if name not in needed)
        return [name for name in names if name in needed]

    def find(self, place: str, row: Mapping[str, Any]) -> Layout:
        """The layout of the row at ``place``. Raises ``DataError`` for columns that cannot be understood."""
        names = tuple(row)
        if names not in self._found:
            self._found[names] = self._checked(place, row)
            for name in names:
                self._unseen.pop(name, None)
        layout = self._found[names]
        _refuse_written_lists(place, row, layout)
        return layout

    def end(self) -> None:
        """Refuse, after the last row, a column that was asked for and that no row has. Raises ``DataError``."""
        for name, role in self._unseen.items():
            if self._first is not None:
                hint = did_you_mean(name, self._all or self._first[2], "the columns are")
                raise DataError(f"{self._path}: no row has the column {shown(name)} (columns: {role}); {hint}")

    def _checked(self, place: str, row: Mapping[str, Any]) -> Layout:
        names = list(row)
        layout = self._by_name(names)
        # Keys of JSON in another order than in the first row: roles stay as there.
        if layout is None and self._first is not None:
            first_place, first, first_names = self._first
            if first.by_order and set(names) == set(first_names):
                return first
            # Of rows that are lists, some may have more negatives.
            are_lists = all(columns[:1] == [_FIRST_OF_LIST] for columns in (names, list(first_names)))
            if not (are_lists and first.kind == "pairs" and len(names) > 1):
                raise DataError(
                    f"{place}: the columns are {_listed(names)}, and those at {first_place} are {_listed(first_names)};"
                    " rows of a file have the same columns, of which negatives and scores may be absent: complete the "
                    "row, or remove it"
                )
        # Names decide, and the order of columns only where they say nothing, as in sentence-transformers.
        layout = layout or self._by_order(place, row)
        if _KINDS.get(self._form, layout.kind) != layout.kind:
            raise DataError(f"{place}: {_no_layout(self._form, names)}")
        if layout.score is not None and layout.negatives:
            raise DataError(
                f"{place}: {layout.score!r} is a score of two texts, and {layout.negatives[0]!r} a third text; "
                "form=columns leaves scores out, form=scores the third text"
            )
        ids = [name for name in (*layout.positives, *layout.negatives) if _usual(name) in _IDS]
        if ids and not self._with_corpus:
            raise DataError(f"{place}: {ids[0]!r} holds ids; name the texts of the documents by corpus")
        if self._with_corpus and not layout.positives:
            raise DataError(
                f"{place}: of the columns {_listed(names)} none is known to hold the ids of the documents, whose texts "
                "corpus has; data.columns='{query: NAME, positive: NAME}' names it"
            )
        layout = replace(layout, ignored=tuple(dict.fromkeys((*layout.ignored, *self._not_read))))
        # The first row sets what kind of rows the file has.
        if self._first is None:
            self._first = (place, layout, tuple(names))
        elif layout.kind != self._first[1].kind:
            raise DataError(
                f"{place}: a row of {layout.kind} ({_listed(names)}), and the row at {self._first[0]} is one of "
                f"{self._first[1].kind} ({_listed(self._first[2])}); a file has one form: complete the "
                "row, or give rows of another form a file of their own"
            )
        return layout

    def _by_name(self, names: Sequence[str]) -> Layout | None:
        """The layout that the names say, whatever their case; None where they leave query or positive open."""
        asked = {name.strip() for value in self._columns.values() for name in value.split(",")}
        known: dict[str, str] = {}  # usual name -> name
        given = set(names)
        for name in names:
            usual = _usual(name)
            # A name that the user wrote, or that is usual as it is, is not taken for another.
            is_free = name not in asked and usual not in given and usual not in known
            known[usual if is_free else name] = name
        layout = self._by_usual_name(list(known))
        return None if layout is None else _renamed(layout, known)

    def _by_usual_name(self, names: Sequence[str]) -> Layout | None:
        text = self._columns.get("text")
        if self._form == "texts" or text in names:
            known = (*self._columns_of("query", names),) if "query" in self._columns else ("text", "sentence")
            # A role `text` that the user gave beats `text` and `sentence`.
            alone = next((name for name in (text, *(known if text is None else ())) if name in names), None)
            return None if alone is None else _with_ignored(Layout(alone), names)
        # FlagEmbedding's names exactly; `positive` and the like do not count there.
        if self._form == "flagembedding":
            query, positives, negatives = (tuple({name} & set(names)) for name in ("query", "pos", "neg"))
        else:
            query, positives, negatives = (self._columns_of(r, names) for r in ("query", "positive", "negative"))
        if not query or not positives:
            return None
        score = next(iter(self._columns_of("score", names)), None)
        label = next((name for name in LABELS if name in names), None) if score is None else None
        # A score is of two texts: form=scores drops the third one, every other named form the score.
        has_score = self._form in ("auto", "scores")
        layout = Layout(
            query[0],
            positives,
            () if self._form == "scores" else negatives,
            score=(score or label) if has_score else None,
            positive_scores=next(iter(self._columns_of("positive_scores", names)), None),
            negative_scores=next(iter(self._columns_of("negative_scores", names)), None),
            prompt=_PROMPT if _PROMPT in names and positives == ("pos",) else None,
            is_label=has_score and label is not None,
        )
        return _with_ignored(layout, names)

    def _columns_of(self, role: str, names: Sequence[str]) -> tuple[str, ...]:
        if role in self._columns:
            wanted, given = (name.strip() for name in self._columns[role].split(",")), set(names)
            return tuple(name for name in wanted if name in given)
        known = next(((name,) for name in ROLES[role] if name in names), ())
        # `negative_2` before `negative_10`: by number.
        numbered = []
        for name in names:
            match = _NUMBERED.fullmatch(name)
            if match and role == ("positive" if match[1].startswith("pos") else "negative"):
                numbered.append((int(match[2]), name))
        return (*known, *(name for _, name in sorted(numbered)))

    def _by_order(self, place: str, row: Mapping[str, Any]) -> Layout:
        """The first text column is the query, the second its positive, the others negatives; a last number a score."""
        names = list(row)
        if self._columns:
            missing = [n for value in self._columns.values() for n in value.split(",") if n.strip() not in names]
            named = shown(missing[0].strip()) if missing else "query or positive"
            raise DataError(f"{place}: columns names {named}, and the columns are {_listed(names)}")
        if self.has_header and (wrong := next((name for name in names if _NO_NAME.fullmatch(name)), None)):
            raise DataError(
                f"{self._path}, line 1: {shown(wrong, 60)} is not a name of a column: the first line "
                "names them, as anchor and positive; put such a line above the texts"
            )
        # Row numbers and ids, as pandas and hubs write them, are no texts.
        rest = [name for name in names if not _NUMBER_OF_ROW.fullmatch(name) and _usual(name) not in LABELS]
        # in a file without types, a number is a text that reads as one
        texts = [n for n in rest if not is_number(row[n]) or (isinstance(row[n], str) and not self.has_header)]
        has_score = self._form in ("auto", "scores")
        # Three columns of which two are texts: the third is the score, as sentence-transformers has it.
        score = rest[2] if has_score and len(rest) == 3 and texts == rest[:2] else None
        is_label = has_score and score is None and len(texts) == 2
        labels = [name for name in names if _usual(name) in LABELS]
        label = labels[0] if is_label and labels else None
        are_texts = set(texts)
        numbers = [name for name in rest if name not in are_texts and name != score]
        roles = ("query", "positive", *["negative"] * len(texts))
        # A name that is known for another role contradicts the order.
        mixed = next((n for n, role in zip(texts, roles, strict=False) if _role(n) not in (None, role)), None)
        # `text` beside other texts may be the only one that is meant; form=columns says that it is not.
        is_one_of_many = len(texts) > 1 and any(_usual(name) in ("text", "sentence") for name in texts)
        ambiguous = is_one_of_many and self._form != "columns"
        # One text and a label are data for classification, not for pairs.
        with_label = len(texts) == 1 and bool(labels) and self._form != "texts"
        if not texts or numbers or mixed or ambiguous or with_label or self._form == "flagembedding":
            raise DataError(f"{place}: {_no_layout(self._form, names)}")
        layout = Layout(
            texts[0],
            tuple(texts[1:2]),
            tuple(texts[2:]),
            score or label,
            is_label=label is not None,
            by_order=len(texts) > 1,
        )
        return _with_ignored(layout, names)


def unread_labels(path: Path, layout: Layout) -> list[str]:
    """A remark on each column of a file of pairs that may say which rows belong together, and that is not read."""
    known = (*LABELS, *ROLES["score"])
    labels = [name for name in layout.ignored if _usual(name) in known] if layout.kind == "pairs" else []
    return [f"{path}: {label!r} is not read; every row counts as a pair that belongs together" for label in labels]


def _no_layout(form: str, names: Sequence[str]) -> str:
    """Say that columns do not fit a form, and what to do."""
    what = {
        "flagembedding": "'query' and 'pos'",
        "scores": "two texts and a score",
        "texts": "one text alone, or a column 'text'",
        "ids": "a query and the ids of its documents",
    }.get(form, "a query and its positive (query, anchor or question; positive, pos or document)")
    return (
        f"the columns {_listed(names)} are not {what}; columns={{query: NAME, positive: NAME}} says which is which "
        "(capt data inspect: --columns query=NAME --columns positive=NAME), form=texts with columns={text: NAME} takes "
        "one alone"
    )


def _usual(name: str) -> str:
    """A name of a column as it is known, where it differs from that in case or in spaces around it alone."""
    plain = name.strip().lower()
    return _USUAL.get(plain) or (plain if _NUMBERED.fullmatch(plain) else name)


def _renamed(layout: Layout, names: Mapping[str, str]) -> Layout:
    """A layout with other names of its columns."""

    def new(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(names[name] for name in value)
        return names[value] if isinstance(value, str) else value

    return replace(layout, **{field.name: new(getattr(layout, field.name)) for field in fields(layout)})


def _role(name: str) -> str | None:
    return next((role for role, names in ROLES.items() if _usual(name) in names), None)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(shown(name, 40) for name in names[:12]) or "none"


def _with_ignored(layout: Layout, names: Sequence[str]) -> Layout:
    used = {layout.query, *layout.positives, *layout.negatives, layout.score}
    used |= {layout.positive_scores, layout.negative_scores, layout.prompt}
    return replace(layout, ignored=tuple(name for name in names if name not in used))


def _refuse_written_lists(place: str, row: Mapping[str, Any], layout: Layout) -> None:
    """Refuse a cell that a program has filled with the text of a list: ``['a', 'b']``."""
    for name in (*layout.positives, *layout.negatives):
        cell = row.get(name)
        # A longer text is hardly a list, and would take long to parse.
        if isinstance(cell, str) and _LIST.match(cell) and cell.rstrip().endswith("]") and len(cell) < 100_000:
            try:
                value = ast.literal_eval(cell.strip())
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
            if isinstance(value, list):
                raise DataError(
                    f"{place}: {name!r} holds a list written as text; a cell is one text, or in .jsonl a list"
                )

"""The pairs of a source as token ids: every distinct text is there once, and rows name texts by number.

All arrays may be mapped from files (:mod:`capt.pretrain.pairs.store`), so that nothing here copies a whole one.

Two texts that differ in case, in kinds of spaces or in Unicode's form alone have the same key. Keys decide what is no
negative (:mod:`capt.pretrain.pairs.known`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int32, Int64

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.overlap import same_text
from capt.pretrain.base.randomness import generator_for
from capt.pretrain.data.views import View, draw_spans, find_view
from capt.pretrain.pairs.data_config import PairSource
from capt.pretrain.pairs.known import KnownPositives, RowKeys
from capt.pretrain.pairs.losses import NO_LOSS, PairLoss, find_loss, loss_of
from capt.tokenizer.encode import TextTokenizer, require_short_prompt

Numbers = Int64[np.ndarray, " n"]

_BLOCK = 1 << 20
LENGTH = 128
"""Tokens of a text where ``data.sequence_length`` is null."""


def text_key(text: str) -> int:
    """A number of 63 bits that is the same for texts which differ in case, spaces or Unicode's form alone."""
    content = same_text(text).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class EncodedTexts:
    """Distinct texts of one side: text ``i`` is ``ids[starts[i] : starts[i + 1]]``, special tokens included.

    ``keys`` are as `text_key` gives them. ``cut`` texts were longer than allowed. ``ids`` are of any type of integers.
    Where a teacher has vectors of the texts, ``hashes`` are as `text_hash` gives them, of a text and of it without the
    spaces around it, and ``vectors`` the places of the vectors (`Vectors.find`).
    """

    ids: np.ndarray
    starts: Int64[np.ndarray, " n1"]
    keys: Numbers
    cut: int
    hashes: np.ndarray | None = None
    vectors: Numbers | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def mean_length(self) -> float:
        """Tokens of a text in the mean."""
        return float(self.starts[-1]) / max(1, len(self))

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return int(np.diff(self.starts).max(initial=0))

    def lengths(self, numbers: Numbers) -> Numbers:
        """Tokens of some texts."""
        found: Numbers = self.starts[numbers + 1] - self.starts[numbers]
        return found

    def tokens(self, numbers: Numbers) -> list[Int32[np.ndarray, " _"]]:
        """The ids of some texts."""
        starts, stops = self.starts[numbers].tolist(), self.starts[numbers + 1].tolist()
        return [self.ids[start:stop].astype(np.int32) for start, stop in zip(starts, stops, strict=True)]


Side = Literal["query", "document"]


@runtime_checkable
class Teacher(Protocol):
    """The vectors of a teacher (`capt.pretrain.retrieval.teacher.TeacherVectors`)."""

    dimension: int

    def of(self, texts: EncodedTexts, numbers: Int64[np.ndarray, " n"], role: Side) -> Float[np.ndarray, "n e"]:
        """The vectors of the texts with these numbers."""
        ...


@dataclass(frozen=True)
class Lists:
    """A list of numbers for each row, one after another: row ``i`` has ``values[starts[i] : starts[i + 1]]``."""

    values: Numbers
    starts: Int64[np.ndarray, " n1"]

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Lists:
        """Lay lists end to end."""
        rows = list(rows)
        starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return cls(np.array([value for row in rows for value in row], dtype=np.int64), starts)

    def counts(self, rows: Numbers) -> Numbers:
        """Return how many numbers each of some rows has."""
        found: Numbers = self.starts[rows + 1] - self.starts[rows]
        return found

    def places(self, rows: Numbers, first: Numbers, number: Numbers) -> Int64[np.ndarray, " taken"]:
        """Return the places of ``number`` values of each row, from place ``first`` on, in a circle."""
        # Row of each value that is taken, and which one of that row's it is.
        owners = np.repeat(np.arange(len(rows)), number)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(number) - number, number)
        round_ = (first[owners] + within) % self.counts(rows)[owners]
        taken: Int64[np.ndarray, " taken"] = self.starts[rows][owners] + round_
        return taken


@dataclass(frozen=True)
class SourceRows:
    """The rows of one source. ``query[i]``, ``positives`` and ``negatives`` are numbers of texts.

    Attributes:
        source: its settings, all filled in (`PairData.each`).
        queries: the texts of one side.
        documents: those of the other.
        query: the query of each row.
        positives: its documents.
        negatives: its hard negatives.
        scores: similarity of query and document, in a source of scored pairs; else None.
        positive_scores: a teacher's score of each value of ``positives``; None where the source has none.
        negative_scores: the same of ``negatives``.
        digest: SHA-256 of all that the rows are: their tokens, texts and lists.
        index: the known positives of their queries, where they have been indexed before.
    """

    source: PairSource
    queries: EncodedTexts
    documents: EncodedTexts
    query: Numbers
    positives: Lists
    negatives: Lists
    scores: Float[np.ndarray, " n"] | None = None
    positive_scores: Float[np.ndarray, " p"] | None = None
    negative_scores: Float[np.ndarray, " k"] | None = None
    digest: str = ""
    index: KnownPositives | None = None

    def __len__(self) -> int:
        return len(self.query)

    @property
    def keys(self) -> RowKeys:
        """The keys of the rows."""
        positives = self.documents.keys[self.positives.values]
        return RowKeys(self.queries.keys[self.query], positives, self.positives.starts)

    @cached_property
    def known(self) -> KnownPositives:
        """The known positives of each query; of scored pairs, which need not belong together, there are none."""
        if self.scores is not None:
            return KnownPositives.of(*np.zeros((2, 0), dtype=np.int64))
        return self.keys.known if self.index is None else self.index

    @property
    def loss_name(self) -> str:
        """The loss that the rows are trained with: that of their source, or what goes with what they are."""
        return loss_of(self.source.loss, is_scored=self.scores is not None)

    @cached_property
    def loss(self) -> PairLoss:
        """The row of `loss_name`."""
        return find_loss(self.loss_name)

    @cached_property
    def view(self) -> View:
        """View that makes both views of a text alone."""
        return find_view(self.source.view)

    @cached_property
    def draw(self) -> Callable[..., Any] | None:
        """The function that draws spans, where the view is made of them."""
        return self.view.function()  # type: ignore[no-any-return]

    def spans(
        self, numbers: Numbers, rows: Numbers, visits: Numbers, seed: int
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Both views of the texts ``numbers`` of some rows in a visit of each; short texts are whole."""
        first, second = [], []
        for text, row, visit in zip(self.queries.tokens(numbers), rows.tolist(), visits.tolist(), strict=True):
            generator = generator_for(f"views/{self.source.name}", seed, visit, row)
            cut = draw_spans(self.draw, text[1:-1], self.source.spans, len(text), generator)
            ends = text[:1], text[-1:]
            both = [text, text] if cut is None else [np.concatenate([ends[0], span, ends[1]]) for span in cut]
            first.append(both[0])
            second.append(both[1])
        return first, second

    def long_enough(self) -> SourceRows:
        """The rows without those of texts that are too short for two spans."""
        # 2: `<s>` and `</s>`.
        keep = self.queries.lengths(self.query) - 2 >= self.source.spans.shortest
        if keep.all():
            return self
        rows = np.arange(keep.sum() + 1, dtype=np.int64)
        return replace(
            self, query=self.query[keep], positives=Lists(self.positives.values[keep], rows),
            negatives=Lists(self.negatives.values, np.zeros_like(rows)),
            digest=hashlib.sha256(f"{self.digest} {self.source.spans.shortest}".encode()).hexdigest(),
        )  # fmt: skip

    @cached_property
    def is_one_column(self) -> bool:
        """True if every text is its own positive, as in rows of one text alone."""
        values = self.positives.values
        if len(values) != len(self):
            return False
        # In blocks: the arrays are mapped files, and one comparison of all would copy them.
        blocks = (slice(first, first + _BLOCK) for first in range(0, len(self), _BLOCK))
        return all(
            bool((self.documents.keys[values[block]] == self.queries.keys[self.query[block]]).all()) for block in blocks
        )

    @cached_property
    def is_alone(self) -> bool:
        """True if a text has a teacher's vector and nothing to be compared with, so that it is encoded once."""
        return self.loss_name == NO_LOSS and self.is_one_column and not self.source.negatives

    def role_of(self, side: Side) -> Side:
        """The role in which a teacher has encoded a side: a text alone is no query."""
        return "document" if self.is_alone else side

    def vectors(self, teacher: Teacher, side: Side, numbers: Numbers) -> Float[np.ndarray, "n e"]:
        """The teacher's vectors of the texts ``numbers`` of a side."""
        return teacher.of(self.queries if side == "query" else self.documents, numbers, self.role_of(side))

    @property
    def has_teacher(self) -> bool:
        """True if a teacher has scored the documents of every row."""
        return self.positive_scores is not None and bool(self.source.negatives)

    @property
    def most_tokens(self) -> int:
        """Tokens of a row in a step at most, of the longest texts there are."""
        rows = np.arange(len(self), dtype=np.int64)
        negatives = min(self.source.negatives, int(self.negatives.counts(rows).max(initial=0)))
        if self.is_alone:
            return self.queries.longest
        return self.queries.longest + (1 + negatives) * self.documents.longest

    @property
    def flops_shape(self) -> tuple[float, float, float]:
        """Tokens of a query and of a document, and hard negatives of a row in a step, in the mean."""
        negatives = float(min(self.source.negatives, len(self.negatives.values) / max(1, len(self))))
        return self.queries.mean_length, self.documents.mean_length, negatives


def longest_text(
    tokenizer: TextTokenizer, prompt: str, length: int | None, max_positions: int, what: str, own: int | None = None
) -> int:
    """Tokens of the longest text with its prompt: ``length`` and those of the prompt.

    Without ``length`` it is the encoder's own, ``own``, or 128, as far as there is room.

    Raises:
        ConfigError: the prompt alone is as long as ``length``, or both are longer than the encoder's positions.
    """
    require_short_prompt(prompt, max_positions, what, "shorten data.prompts")
    return longest_behind(
        len(tokenizer.encode_batch([prompt])[0]) if prompt else 0, prompt, length, max_positions, what, own
    )


def longest_behind(
    before: int, prompt: str, length: int | None, max_positions: int, what: str, own: int | None = None
) -> int:
    """`longest_text` for a prompt of ``before`` tokens."""
    length = length or max(8, min(own or LENGTH, max_positions - before))
    if before > length - 2:
        raise ConfigError(
            f"{what}: the prompt {prompt[:60]!r} has {before} tokens, the text after it at most {length - 2}: "
            "shorten the prompt, or allow more tokens"
        )
    if length + before > max_positions:
        raise ConfigError(
            f"{what}: {length} tokens and a prompt of {before} are more than the encoder's {max_positions} positions; "
            "allow fewer tokens"
        )
    return length + before

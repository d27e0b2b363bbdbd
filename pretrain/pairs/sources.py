"""The pairs of each source as token ids: every distinct text is encoded once, and rows name texts by number.

Two texts that differ in case, in kinds of spaces or in Unicode's form alone have the same key. Keys decide what is no
negative: a document of the query itself, wherever in the batch or in the queue it comes from.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32, Int64

from capt.pretrain.base.errors import ConfigError, DataError, counted
from capt.pretrain.base.overlap import same_text
from capt.pretrain.base.randomness import mix64
from capt.pretrain.pairs.config import PairSource
from capt.pretrain.pairs.forms import Pair
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)

Numbers = Int64[np.ndarray, " n"]

_LENGTH = 128
"""Tokens of a text where the job does not say: what contrastors and ModernBERT's embedding models train on."""


def text_key(text: str) -> int:
    """A number of 63 bits that is the same for texts which differ in case, spaces or Unicode's form alone."""
    content = same_text(text).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class EncodedTexts:
    """Distinct texts of one side: text ``i`` is ``ids[starts[i] : starts[i + 1]]``, special tokens included.

    ``keys`` are as `text_key` gives them. ``cut`` texts were longer than allowed.
    """

    ids: Int32[np.ndarray, " total"]
    starts: Int64[np.ndarray, " n1"]
    keys: Numbers
    cut: int

    @property
    def lengths(self) -> Numbers:
        """Tokens of each text."""
        return np.diff(self.starts)

    def tokens(self, numbers: Numbers) -> list[Int32[np.ndarray, " _"]]:
        """The ids of some texts."""
        starts = self.starts
        return [self.ids[starts[i] : starts[i + 1]] for i in numbers.tolist()]


@dataclass(frozen=True)
class Lists:
    """A list of numbers for each row, one behind the other: row ``i`` has ``values[starts[i] : starts[i + 1]]``."""

    values: Numbers
    starts: Int64[np.ndarray, " n1"]

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Lists:
        """Lay lists end to end."""
        rows = list(rows)
        starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return cls(np.array([value for row in rows for value in row], dtype=np.int64), starts)

    @property
    def counts(self) -> Numbers:
        """How many numbers each row has."""
        return np.diff(self.starts)

    def take(self, rows: Numbers, first: Numbers, number: Numbers) -> Int64[np.ndarray, " taken"]:
        """``number`` values of each of some rows, from place ``first`` on and round to its beginning again."""
        owners = np.repeat(np.arange(len(rows)), number)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(number) - number, number)
        places = (first[owners] + within) % self.counts[rows][owners]
        taken: Int64[np.ndarray, " taken"] = self.values[self.starts[rows][owners] + places]
        return taken


@dataclass(frozen=True)
class SourceRows:
    """The rows of one source. ``query[i]``, ``positives`` and ``negatives`` are numbers of texts."""

    source: PairSource
    queries: EncodedTexts
    documents: EncodedTexts
    query: Numbers
    positives: Lists
    negatives: Lists

    def __len__(self) -> int:
        return len(self.query)

    def digest(self) -> str:
        """SHA-256 of all that the rows are: their tokens, texts and lists."""
        content = hashlib.sha256()
        for array in (
            *(self.queries.ids, self.queries.starts, self.queries.keys, self.documents.ids, self.documents.starts),
            *(self.documents.keys, self.query, self.positives.values, self.positives.starts, self.negatives.values),
            self.negatives.starts,
        ):
            content.update(len(array).to_bytes(8, "little") + np.ascontiguousarray(array).tobytes())
        return content.hexdigest()


def longest_text(tokenizer: TextTokenizer, prompt: str, length: int | None, max_positions: int, what: str) -> int:
    """Tokens of the longest text with its prompt: ``length`` and those of the prompt; None = 128 if there is room.

    Raises:
        ConfigError: the prompt alone is as long as ``length``, or both are longer than the encoder's positions.
    """
    before = len(tokenizer.encode_batch([prompt])[0]) if prompt else 0
    length = length or max(8, min(_LENGTH, max_positions - before))
    if before > length - 2:
        raise ConfigError(
            f"{what}: the prompt {prompt[:60]!r} has {before} tokens, the text behind it at most {length - 2}: "
            "shorten the prompt, or allow more tokens"
        )
    if length + before > max_positions:
        raise ConfigError(
            f"{what}: {length} tokens and a prompt of {before} are more than the encoder's {max_positions} positions; "
            "allow fewer tokens"
        )
    return length + before


@dataclass
class _Side:
    """The distinct texts of queries or documents while they are collected."""

    texts: dict[str, int] = field(default_factory=dict)

    def number(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))

    def encode(
        self, tokenizer: TextTokenizer, prompt: str, length: int | None, max_positions: int, what: str
    ) -> EncodedTexts:
        longest = longest_text(tokenizer, prompt, length, max_positions, what)
        special, texts = tokenizer.special, list(self.texts)
        encoded = tokenizer.encode_batch([prompt + text for text in texts] if prompt else texts)
        lengths = np.array([min(len(ids) + 2, longest) for ids in encoded], dtype=np.int64)
        parts = [part for ids in encoded for part in ([special.bos], ids[: longest - 2], [special.eos])]
        return EncodedTexts(
            ids=np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32),
            starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            keys=np.array([text_key(text) for text in texts], dtype=np.int64),
            cut=sum(len(ids) + 2 > longest for ids in encoded),
        )


def encode_source(
    source: PairSource, pairs: Iterable[tuple[str, Pair]], tokenizer: TextTokenizer, max_positions: int
) -> SourceRows:
    """Encode the pairs of a source, whose settings are all filled in (`PairData.each`), and log what they are.

    A negative with the key of a positive of its row is left out, and counted. A row without a positive is one of
    unsupervised SimCSE: the text is its own positive, and dropout tells the two views apart.

    Raises:
        DataError: a row has no text or a score, a source with ``in_batch`` false has a row without negatives, or there
            is no row.
        ConfigError: a prompt and a length that do not fit together, or the encoder.
    """
    assert source.prompts is not None
    queries, documents = _Side(), _Side()
    query: list[int] = []
    positives: list[list[int]] = []
    negatives: list[list[int]] = []
    counts: Counter[str] = Counter()
    keys: dict[str, int] = {}

    def key(text: str) -> int:
        if text not in keys:
            keys[text] = text_key(text)
        return keys[text]

    for place, pair in pairs:
        if pair.score is not None:
            raise DataError(
                f"{place}: two texts and their score; a pair here belongs together: keep the rows of high scores, and "
                "set form=columns, which reads the texts alone"
            )
        own = pair.positives or (pair.query,)
        if not pair.query.strip() or not all(text.strip() for text in own):
            raise DataError(f"{place}: an empty query or positive; remove the row")
        right = {key(text) for text in own}
        wrong = [text for text in pair.negatives if key(text) not in right]
        counts["negatives are positives of their row, and left out"] += len(pair.negatives) - len(wrong)
        if not source.in_batch and not wrong:
            raise DataError(
                f"{place}: no negative, and source {source.name} has in_batch false: give the row negatives, or set "
                "in_batch=true"
            )
        query.append(queries.number(pair.query))
        positives.append([documents.number(text) for text in dict.fromkeys(own)])
        used = wrong if source.negatives else ()
        negatives.append([documents.number(text) for text in dict.fromkeys(used)])
    if not query:
        raise DataError(f"source {source.name}: no pair in {', '.join(source.files)}")
    if source.negatives and not any(negatives):
        raise DataError(
            f"source {source.name}: negatives is {source.negatives}, and no row has a negative; set data.negatives=0"
        )
    names = [f"source {source.name}, {side}" for side in ("queries", "documents")]
    rows = SourceRows(
        source=source,
        queries=queries.encode(tokenizer, source.prompts.query, source.query_length, max_positions, names[0]),
        documents=documents.encode(tokenizer, source.prompts.document, source.document_length, max_positions, names[1]),
        query=np.array(query, dtype=np.int64),
        positives=Lists.of(positives),
        negatives=Lists.of(negatives),
    )
    counts["texts are cut"] = rows.queries.cut + rows.documents.cut
    _report(rows, counts)
    return rows


def _report(rows: SourceRows, counts: Counter[str]) -> None:
    notes = "".join(f"; {number:,} {what}" for what, number in counts.items() if number)
    logger.info(
        "source %s: %s, %.1f tokens a query, %.1f a document%s",
        *(rows.source.name, counted(len(rows), "pair"), rows.queries.lengths.mean(), rows.documents.lengths.mean()),
        notes,
    )


def split_pairs(
    pairs: Iterable[tuple[str, Pair]], fraction: float
) -> tuple[list[tuple[str, Pair]], list[tuple[str, Pair]]]:
    """Pairs to train on, and pairs to hold out: all those whose query has a key in the first part of all keys.

    So a query is on one side alone, in whatever order the pairs come.
    """
    train: list[tuple[str, Pair]] = []
    held_out: list[tuple[str, Pair]] = []
    for place, pair in pairs:
        mixed = int(mix64(np.array([text_key(pair.query)], dtype=np.uint64))[0])
        (held_out if mixed < fraction * 2**64 else train).append((place, pair))
    return train, held_out

"""Text as one array of word numbers on disk: counted and encoded in parallel, once, and kept in the cache.

Words are what `split_words` gives, with ``data.split=punctuation`` cut by `split_punctuation`. Those outside the
vocabulary are left out before any pair is formed, as in word2vec.
The numbers are in a file of int32 that is mapped into memory, so that a text of any size takes none. The first word
of a sentence is stored as its bitwise complement (a negative number): sentences need no index of their own.
"""

from __future__ import annotations

import hashlib
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64
from pydantic import Field

from capt.pretrain.base.arrays import ArrayFile, Column, map_array
from capt.pretrain.base.atomic import new_file
from capt.pretrain.base.errors import CheckpointError, DataError
from capt.pretrain.base.files import printable, read_lines, write_text
from capt.pretrain.base.locks import make_folder_once
from capt.pretrain.base.parallel import ProgressCallback, ordered_map
from capt.pretrain.base.process import usable_cores
from capt.pretrain.base.records import Count, Record, read_record
from capt.pretrain.base.verification import ALONE, ExpectedFile, Ranks, Verifier, digest_of
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.data.paths import resolve_paths
from capt.pretrain.embeddings.config import DataSection

logger = logging.getLogger(__name__)


# The words of a text with their counts, most frequent first.


VOCABULARY = "vocabulary.txt"
_WORD = re.compile(r"[^ \t\n\r\v\f]+")
_OTHER_SPACE = re.compile(r"[^\S \t\n\r\v\f]")


def split_words(text: str) -> list[str]:
    r"""Split text at the blanks of ASCII: space and ``\t \n \r \v \f``.

    Files of word vectors are split alike, as by word2vec and GloVe: other spaces, such as the no-break space and the
    ideographic one, are characters of a word.
    """
    return _WORD.findall(text) if _OTHER_SPACE.search(text) else text.split()  # which is twice as fast


class WordVocabulary:
    """Words and how often they occur; the number of a word is its row in the tables.

    Args:
        words: the words, most frequent first, ties in the order of their code points; then those of ``model.init`` that
            the text lacks.
        counts: occurrences of each word in the text, 0 of the latter.
    """

    def __init__(self, words: tuple[str, ...], counts: Int64[np.ndarray, " V"]) -> None:
        assert len(words) == len(counts)
        self.words = words
        self.counts = counts

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The number of each word."""
        return {word: number for number, word in enumerate(self.words)}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the words in their order, in hexadecimal."""
        return hashlib.sha256("\n".join(self.words).encode()).hexdigest()

    @classmethod
    def of(cls, counts: Mapping[str, int], min_count: int, largest: int | None = None) -> WordVocabulary:
        """The words that occur at least ``min_count`` times, or the ``largest`` most frequent of them."""
        kept = [(-count, word) for word, count in counts.items() if count >= min_count]
        kept.sort()
        kept = kept[:largest]
        return cls(tuple(word for _, word in kept), np.array([-count for count, _ in kept], dtype=np.int64))

    @property
    def words_of_text(self) -> int:
        """The number of words that are of the text; they come first."""
        return int(np.count_nonzero(self.counts))

    def with_others(self, words: Sequence[str]) -> WordVocabulary:
        """Return these words and, after them, ``words`` that the text lacks."""
        return WordVocabulary((*self.words, *words), np.append(self.counts, np.zeros(len(words), dtype=np.int64)))

    def noise(self, power: float = 0.75) -> Float64[np.ndarray, " V"]:
        r"""The noise distribution of word2vec, :math:`P(w) \propto \mathrm{count}(w)^{power}`."""
        weights = self.counts.astype(np.float64) ** power
        distribution: Float64[np.ndarray, " V"] = weights / weights.sum()
        return distribution

    def keep_probability(self, threshold: float) -> Float64[np.ndarray, " V"]:
        r"""The probability that an occurrence of a word survives subsampling, as in the code of word2vec.

        .. math:: \min(1, \sqrt{t / f} + t / f)

        with the word's share :math:`f` of the text; 1 for every word where ``threshold`` :math:`t` is 0.
        """
        if threshold == 0:
            return np.ones(len(self))
        ratio = threshold * self.counts.sum() / np.maximum(self.counts, 1)
        kept: Float64[np.ndarray, " V"] = np.minimum(1.0, np.sqrt(ratio) + ratio)
        return kept

    def save(self, path: Path) -> None:
        """Write ``word count`` lines; the file appears whole."""
        with new_file(path) as file:
            file.writelines(f"{word} {count}\n" for word, count in zip(self.words, self.counts.tolist(), strict=True))

    @classmethod
    def load(cls, path: Path) -> WordVocabulary:
        """Read what :meth:`save` has written.

        Raises:
            DataError: a line is not ``word count``, or a word occurs there twice.
        """
        words, counts = [], []
        seen: set[str] = set()
        for number, line in enumerate(read_lines([path]), 1):  # only \n ends a line: a word may hold its relatives
            word, _, count = line.rpartition(" ")
            # A count of 18 digits still fits in int64.
            # A word that the text lacks is of a file of vectors, where it may hold blanks.
            if (
                not word
                or (count != "0" and split_words(word) != [word])
                or not (count.isdecimal() and count.isascii() and len(count) < 19)
            ):
                raise DataError(f"{path}, line {number}: {printable(line, 80)!r} is not `word count`")
            if word in seen:
                raise DataError(f"{path}, line {number}: the word {printable(word, 80)!r} occurs there twice")
            seen.add(word)
            words.append(word)
            counts.append(int(count))
        return cls(tuple(words), np.array(counts, dtype=np.int64))


def other_vocabulary(folder: Path) -> CheckpointError:
    """The error of a checkpoint whose rows are those of other words."""
    return CheckpointError(
        f"{folder}: trained with another vocabulary than that of this job's text: resume with the text and the "
        "data.min_count, data.max_vocabulary and data.lowercase of its config.yaml"
    )


LONGEST_SENTENCE = 10_000
"""Words after which a sentence is cut, as gensim does it."""
_WORDS, _RECORD = "words.i32", "corpus.json"
_FORMAT = 3
_TASK = 1 << 20
"""Characters that a worker gets in one task."""
_SMALL = 8 << 20
"""Bytes of text below which starting processes would take longer than the work."""


class _CorpusRecord(Record):
    """The record of a folder of the cache."""

    format: int = Field(ge=1, le=_FORMAT)
    words: Count
    raw_words: Count
    sentences: Count
    sha256: str = Field(max_length=64)


@dataclass(frozen=True)
class EncodedCorpus:
    """The words of a text as numbers of a vocabulary.

    ``words[i] >= 0`` is a word's number, and ``~words[i]`` that of the first word of a sentence. ``raw_words`` counts
    the words of the text before any was left out: the unit of "words per second" of word2vec and gensim.
    """

    words: Int32[np.ndarray, " n"]
    vocabulary: WordVocabulary
    raw_words: int
    sentences: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.words)

    def slice(self, start: int, end: int) -> tuple[Int64[np.ndarray, " m"], Bool[np.ndarray, " m"]]:
        """The words from ``start`` to ``end``, and which of them begin a sentence."""
        stored = np.asarray(self.words[start:end], dtype=np.int64)
        begins = stored < 0
        return np.where(begins, ~stored, stored), begins


def open_corpus(data: DataSection, progress: ProgressCallback | None = None, ranks: Ranks = ALONE) -> EncodedCorpus:
    """The encoded text of ``data.files``: from the cache, or counted and encoded now. All ranks call this.

    The cache goes by the content of the files and by what decides their words. One process makes a folder, the others
    wait for it.

    Raises:
        DataError: a file cannot be read as text, or no word occurs ``data.min_count`` times.
    """
    verifier = Verifier(data.cache, ranks)
    # A rank that failed alone would leave the others waiting in the next collective.
    with ranks.synchronize_errors():
        paths = resolve_paths(data.files, "data.files")
        source = FileCorpus(paths, data.text_column, None, verifier, missing=data.missing)
    text = [(part["format"], part["sha256"]) for part in source.contents()]
    options = [_FORMAT, data.text_column, data.lowercase, data.min_count, data.max_vocabulary]
    if data.missing == "refuse":  # text of the default is that of releases without this key
        options.append(data.missing)
    if data.split != "blanks":
        options.append(data.split)
    key = digest_of([text, options])
    folder = data.cache / "embeddings" / key
    with ranks.synchronize_errors():
        make_folder_once(folder, lambda partial: _encode(source, data, partial, progress))
    remedy = f"; remove {folder}, it is made again"
    with ranks.synchronize_errors():
        record = read_record(_CorpusRecord, folder / _RECORD, remedy, error=DataError)
        words = map_array(folder / _WORDS, ArrayFile("<i4", (record.words,), has_header=False), remedy)
        vocabulary = WordVocabulary.load(folder / VOCABULARY)
    verifier.verify(folder, {_WORDS: ExpectedFile(4 * record.words, record.sha256)}, hint=remedy)
    return EncodedCorpus(words, vocabulary, record.raw_words, record.sentences, record.sha256)


def _encode(source: FileCorpus, data: DataSection, folder: Path, progress: ProgressCallback | None) -> None:
    workers = 1 if source.size < _SMALL else data.workers or usable_cores()
    report: Callable[[int, int], None] = progress or (lambda done, total: None)
    counts: Counter[str] = Counter()
    for part in ordered_map(_Count(_Splitter(data)), _tasks(source), workers):
        counts.update(part)
        report(source.position, 2 * source.size)
    # The text is read twice: once to count its words, and once to write their numbers.
    vocabulary = WordVocabulary.of(counts, data.min_count, data.max_vocabulary)
    raw_words = counts.total()
    del counts
    if not len(vocabulary):
        raise DataError(
            f"data.min_count {data.min_count}: no word of the {raw_words:,} in the text occurs so often; lower it"
        )
    # Little-endian on every machine: the digest and the mapped file depend on it.
    words, sentences = Column(folder / _WORDS, "<i4"), 0
    for encoded in ordered_map(_Encode(vocabulary.index, _Splitter(data)), _tasks(source), workers):
        words.append(encoded)
        # The first word of a sentence is stored as a negative number.
        sentences += int((encoded < 0).sum())
        report(source.size + source.position, 2 * source.size)
    words.finish()
    vocabulary.save(folder / VOCABULARY)
    record = _CorpusRecord(
        format=_FORMAT, words=len(words), raw_words=raw_words, sentences=sentences, sha256=words.sha256
    )
    write_text(folder / _RECORD, record.model_dump_json(indent=1))
    logger.info(
        "%d words of %d kept, %d of them different, %d sentences", len(words), raw_words, len(vocabulary), sentences
    )


def _tasks(source: FileCorpus) -> Iterator[str]:
    """The text in parts that end where a line ends; within a line of more than a megabyte, where a word ends."""
    parts: list[str] = []
    size, ended = 0, True
    for piece, begins_document in source.pieces():
        if begins_document and not ended:  # the file before ends without a line end
            parts.append("\n")
        ended = piece.endswith("\n")
        parts.append(piece)
        size += len(piece)
        if size >= _TASK:
            text = "".join(parts)
            # Without a line end or a blank more is read, up to 64 times as much, before a word is cut in two.
            cut = text.rfind("\n") + 1 or _last_blank(text) + 1
            if cut or size > 64 * _TASK:
                yield text[: cut or None]
                parts = [text[cut:]] if cut else []
                size = len(parts[0]) if parts else 0
    if size:
        yield "".join(parts)


def _last_blank(text: str) -> int:
    """The place of the last blank; -1 without any."""
    return max(text.rfind(blank) for blank in " \t\r\v\f")


def split_punctuation(words: Iterable[str]) -> Iterator[str]:
    """Cut punctuation marks and symbols off both ends of each word; each mark is a word of its own.

    What is inside a word stays: ``don't``, ``3.5``, ``well-known``. Categories are Unicode's, so that scripts without
    blanks or with combining marks lose nothing.
    """
    for word in words:
        start, end = 0, len(word)
        while start < end and unicodedata.category(word[start])[0] in "PS":
            start += 1
        while end > start and unicodedata.category(word[end - 1])[0] in "PS":
            end -= 1
        yield from word[:start]
        if start < end:
            yield word[start:end]
        yield from word[end:]


class _Splitter:
    """Words of a text, as the job reads them."""

    def __init__(self, data: DataSection) -> None:
        self._lowercase, self._punctuation = data.lowercase, data.split == "punctuation"

    def words(self, text: str) -> list[str]:
        """The words of a line, or of a text whose lines do not matter."""
        words = split_words(text.lower() if self._lowercase else text)
        return list(split_punctuation(words)) if self._punctuation else words

    def sentences(self, text: str) -> Iterator[list[str]]:
        """The words of each line that is not blank, at most `LONGEST_SENTENCE` at a time."""
        for line in text.split("\n"):
            words = self.words(line)
            for start in range(0, len(words), LONGEST_SENTENCE):
                yield words[start : start + LONGEST_SENTENCE]


class _Count:
    """Counts the words of a part of the text, in a worker process."""

    def __init__(self, splitter: _Splitter) -> None:
        self._splitter = splitter

    def __call__(self, text: str) -> Counter[str]:
        return Counter(self._splitter.words(text))


class _Encode:
    """Turns a part of the text into word numbers, in a worker process."""

    def __init__(self, index: object, splitter: _Splitter) -> None:
        assert isinstance(index, dict)
        self._index: dict[str, int] = index
        self._splitter = splitter

    def __call__(self, text: str) -> Int32[np.ndarray, " n"]:
        get = self._index.get
        encoded: list[int] = []
        for words in self._splitter.sentences(text):
            numbers = [number for word in words if (number := get(word)) is not None]
            if numbers:
                # The complement marks the first word of a sentence.
                numbers[0] = ~numbers[0]
                encoded += numbers
        return np.array(encoded, dtype=np.int32)

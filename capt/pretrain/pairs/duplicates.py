"""Evaluation texts that are in the training data too: equal ones exactly, nearly equal ones by MinHash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.overlap import same_text
from capt.pretrain.data.tables import read_table
from capt.pretrain.pairs.cells import beir_file

_CHARACTERS = 5
_PERMUTATIONS = 128
"""Numbers of a signature. The standard error of a similarity that is estimated by it is about .04."""
_MARGIN = 0.15
"""The distance below the threshold at which candidates are looked for."""
_PERMUTED = 10_000
"""Members of a set that are permuted at a time: 5 MB of numbers."""


@dataclass(frozen=True)
class Match:
    """An evaluation text, and the training text that is most similar to it (the first of equally similar ones)."""

    place: str
    text: str
    trained_place: str
    trained_text: str
    similarity: float
    is_equal: bool = False


@dataclass
class Duplicates:
    """The matches of `find_duplicates`, of ``compared`` distinct evaluation texts and ``trained`` training texts."""

    compared: int = 0
    trained: int = 0
    short: int = 0
    equal: list[Match] = field(default_factory=list)
    near: list[Match] = field(default_factory=list)


def find_duplicates(
    train: Sequence[Path],
    against: Sequence[Path],
    *,
    threshold: float | None = 0.8,
    words: int = 5,
    split: str = "train",
) -> Duplicates:
    """Compare every text of every column in ``train`` with every one in ``against``.

    Evaluation texts are in memory, training texts are read one after the other.

    Args:
        train: files, folders of ``datasets`` or of BEIR, or ids of the hub, as `read_table` takes them.
        against: the evaluation texts, likewise.
        threshold: Jaccard similarity of the sets of five characters in a row; None looks for equal texts alone.
        words: texts with fewer words are not compared, and counted.
        split: the split of data sets of the hub.

    Raises:
        DataError: a file cannot be read, or holds no text to compare.
        ModuleNotFoundError: ``datasketch`` is not installed.
    """
    found = Duplicates()
    texts: dict[str, tuple[str, str]] = {}
    for place, text in _texts(against, split):
        # Very short texts ("yes") are equal everywhere and say nothing about a leak.
        if len(text.split()) < words:
            found.short += 1
        else:
            texts.setdefault(same_text(text), (place, text))
    if not texts:
        raise DataError(f"{against[0]}: no evaluation text has {words} words or more; lower --words")
    found.compared = len(texts)
    index = None if threshold is None else _Index(texts, threshold)
    # The best match of each evaluation text: an equal text ends the search, a near one gives way to a nearer one.
    best: dict[str, Match] = {}
    for place, text in _texts(train, split):
        if len(text.split()) < words:
            found.short += 1
            continue
        found.trained += 1
        key = same_text(text)
        if key in texts and not (key in best and best[key].is_equal):
            best[key] = Match(*texts[key], place, text, 1.0, is_equal=True)
        if index is not None:
            for other, similarity in index.similar(key).items():
                known = best.get(other)
                if known is None or (similarity > known.similarity and not known.is_equal):
                    best[other] = Match(*texts[other], place, text, similarity)
    if not found.trained:
        raise DataError(f"{train[0]}: no training text has {words} words or more; lower --words")
    for match in (best[key] for key in texts if key in best):
        (found.equal if match.is_equal else found.near).append(match)
    return found


class _Index:
    """Locality-sensitive hashing of the evaluation texts; every candidate is compared exactly."""

    def __init__(self, texts: Mapping[str, object], threshold: float) -> None:
        self._threshold = threshold
        from datasketch import MinHash, MinHashLSH

        self._empty = MinHash(num_perm=_PERMUTATIONS, seed=1, hashfunc=crc32, scheme="affine32")
        # A missed pair counts more than a candidate too many.
        least = max(threshold - _MARGIN, 0.05)
        self._index = MinHashLSH(threshold=least, num_perm=_PERMUTATIONS, weights=(0.2, 0.8))
        for key in texts:
            self._index.insert(key, self._minhash(_shingles(key)))

    def _minhash(self, members: Iterable[str]) -> Any:
        made = self._empty.copy()
        left = iter(members)
        while some := [member.encode() for member in islice(left, _PERMUTED)]:
            made.update_batch(some)
        return made

    def similar(self, key: str) -> dict[str, float]:
        """The evaluation texts whose similarity to a text is the threshold or more."""
        own = _shingles(key)
        found = {}
        for candidate in self._index.query(self._minhash(own)):
            other = _shingles(candidate)
            similarity = len(own & other) / len(own | other)
            if similarity >= self._threshold:
                found[candidate] = similarity
        return found


def _shingles(key: str) -> set[str]:
    return {key[i : i + _CHARACTERS] for i in range(max(len(key) - _CHARACTERS + 1, 1))}


def _texts(paths: Sequence[Path], split: str) -> Iterator[tuple[str, str]]:
    """Every text of every column; of a BEIR folder its documents and queries."""
    for path in paths:
        tables = [table for stem in ("corpus", "queries") if (table := beir_file(path, stem)) is not None] or [path]
        for table in tables:
            for place, _, row in read_table(table, split):
                for text in _in_cell([value for name, value in row.items() if name != "_id"]):
                    yield place, text


def _in_cell(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _in_cell(list(value.values()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _in_cell(entry)

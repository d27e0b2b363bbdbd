"""Tokenize one unit of a corpus into a *part*: a folder that holds all that is needed of the unit from then on.

A part is a folder::

    train.tokens, train.ends, train.of      token ids, where each document ends, and its number; each split has these
    hashes                                  of each document 16 bytes, equal where documents are (step ``exact``)
    part.json                               counts

Documents are numbered as they leave the filters. Memory does not grow with the unit, but for some bytes a document.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
from jaxtyping import Shaped
from pydantic import Field

from capt.pretrain.base.arrays import Column
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import printable, write_json
from capt.pretrain.base.overlap import folded_text
from capt.pretrain.base.parallel import ProgressCallback, batched, ordered_map
from capt.pretrain.base.records import Record
from capt.pretrain.data.corpus import Corpus, Passage, is_held_out
from capt.pretrain.data.filters import DocumentFilters, filters_of
from capt.pretrain.data.shards import Tokenizer, token_dtype
from capt.pretrain.data.sources import Split

TokenArray = Shaped[np.ndarray, " tokens"]

PART = "part.json"
_PASSAGES_AT_ONCE = 64
_HEAD = 1 << 24
"""Characters of a document by which it is judged."""
_SHOWN = 200
_AROUND, _PLACES = 32, 1000
"""Characters that decide whether a text may be cut between them, and places that are tried."""


class LeftOutDocument(Record, extra="forbid"):
    """A document that a step has left out, or of several the first: which one of its unit, and how it begins."""

    document: int
    text: str


class SplitCounts(Record, extra="forbid"):
    """The content of a part: tokens and documents of a split."""

    tokens: int = 0
    documents: int = 0


class SourceCounts(Record, extra="forbid"):
    """The documents of a file, or of another source, in a part."""

    documents: int
    kept: int
    rows_without_text: int


class PartRecord(Record, extra="forbid", frozen=False):
    """The record of a part. ``documents`` are those that were read, ``kept`` those that the filters have
    left; ``seconds`` is time of the processor."""

    documents: int = 0
    characters: int = 0
    kept: int = 0
    removed: dict[str, int] = Field(default_factory=dict)
    examples: dict[str, LeftOutDocument] = Field(default_factory=dict)
    splits: dict[str, SplitCounts] = Field(default_factory=dict)
    sources: list[SourceCounts] = Field(default_factory=list)
    seconds: float = 0.0


@dataclass
class DocumentJudge:
    """Applies the filters to documents, and counts."""

    filters: DocumentFilters
    record: PartRecord = field(default_factory=PartRecord)

    def __post_init__(self) -> None:
        self._filters = filters_of(self.filters)
        self.record.removed.update(dict.fromkeys(self._filters, 0))

    def keeps(self, text: str) -> bool:
        """Return whether all filters keep a document."""
        for name, leaves_out in self._filters.items():
            if leaves_out(text):
                self.record.removed[name] += 1
                example = LeftOutDocument(document=self.record.documents - 1, text=excerpt(text))
                self.record.examples.setdefault(name, example)
                return False
        return True

    def kept_passages(self, passages: Iterable[Passage]) -> Iterator[tuple[list[Passage], bool]]:
        """Passages of the documents that the filters keep, and whether these begin one.

        A document that is judged or compared comes whole, one of over 16 Mi characters in several pieces.
        """
        keeps = False
        # Where no document is judged or compared, none need be whole.
        for piece, begins in _pieces(passages, _HEAD if self.filters.names else 0):
            self.record.characters += sum(len(passage.text) for passage in piece)
            if begins:
                self.record.documents += 1
                keeps = not self._filters or self.keeps("".join(passage.text for passage in piece))
                self.record.kept += keeps
            if keeps:
                yield piece, begins


def _pieces(passages: Iterable[Passage], most: int) -> Iterator[tuple[list[Passage], bool]]:
    held: list[Passage] = []
    length, begins = 0, True
    for passage in passages:
        # A piece ends with its document, or when it is long enough to be judged by.
        if held and (passage.starts or length > most):
            yield held, begins
            held, length, begins = [], 0, passage.starts
        held.append(passage)
        length += len(passage.text)
    if held:
        yield held, begins


def excerpt(text: str) -> str:
    """The beginning of a text, in one line."""
    return printable(text, _SHOWN)


def write_part(
    folder: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    filters: DocumentFilters,
    *,
    splits: Sequence[Split],
    held_out: float = 0.0,
    has_first: bool,
    workers: int = 1,
    progress: ProgressCallback | None = None,
) -> PartRecord:
    """Write the part of a unit, whose text is ``corpus``, into a folder.

    Args:
        folder: an empty folder.
        corpus: the text.
        tokenizer: gives the ids.
        filters: the filters that are applied, and the duplicates that are prepared for.
        splits: the names of the splits. With two of them the second one gets the share ``held_out``, by passages.
        held_out: the share of the second split.
        has_first: whether the unit begins the whole corpus, whose first passage is never held out.
        workers: processes that encode.
        progress: gets ``corpus.position`` and ``corpus.size``.

    Raises:
        DataError: the corpus is not valid text.
    """
    began = time.process_time()
    judge = DocumentJudge(filters)
    record = judge.record
    compared = _Hashes(folder) if filters.exact else None
    streams = {split: _Split(folder, split, tokenizer) for split in splits}

    def passages() -> Iterator[Placed]:
        before: Split | None = None  # the split of the passage before
        for source in corpus.by_source():
            # The counts of the corpus run over all sources; the difference is this one's.
            documents, kept, without = record.documents, record.kept, corpus.rows_without_text
            for piece, begins in judge.kept_passages(source):
                if compared is not None:
                    compared.add(piece, begins)
                for passage in piece:
                    first = has_first and before is None
                    apart = len(splits) == 2 and not first and is_held_out(passage.text, held_out)
                    # The flag as an index: 0 the first split, 1 the held-out one.
                    split = splits[apart]
                    # A document that goes over to the other split begins anew there.
                    yield split, record.kept - 1, replace(passage, starts=passage.starts or before != split)
                    before = split
            record.sources.append(
                SourceCounts(
                    documents=record.documents - documents,
                    kept=record.kept - kept,
                    rows_without_text=corpus.rows_without_text - without,
                )
            )

    for (split, document, passage), ids in _encoded(passages(), tokenizer, workers):
        streams[split].append(ids, document if passage.starts else None)
        if progress is not None:
            progress(corpus.position, corpus.size)
    for split, stream in streams.items():
        record.splits[split] = stream.finish()
    if compared is not None:
        compared.finish()
    record.seconds = time.process_time() - began
    write_json(folder / PART, record.model_dump())
    return record


class PassageEncoder:
    """Encodes passages in a worker process; refuses ids that are not of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._dtype = tokenizer, token_dtype(tokenizer.vocab_size)

    def __call__(self, texts: list[str]) -> list[TokenArray]:
        """The token ids of each passage. Raises ``DataError``."""
        encoded = self._tokenizer.encode_batch(texts)
        largest = max((int(ids.max()) for ids in encoded if len(ids)), default=0)
        if largest >= self._tokenizer.vocab_size:
            raise DataError(f"the tokenizer gave the id {largest}, but its vocabulary has {self._tokenizer.vocab_size}")
        return [ids.astype(self._dtype) for ids in encoded]


Placed = tuple[Split, int, Passage]
"""A passage, with the split to which it belongs and the number of its document."""


def _encoded(placed: Iterable[Placed], tokenizer: Tokenizer, workers: int) -> Iterator[tuple[Placed, TokenArray]]:
    """Yield every passage with its token ids, in order."""
    # Passages whose ids are not back yet, in order: the workers return ids alone.
    waiting: list[list[Placed]] = []

    def tasks() -> Iterator[list[str]]:
        for task in batched(placed, _PASSAGES_AT_ONCE):
            waiting.append(task)
            yield [passage.text for _, _, passage in task]

    for encoded in ordered_map(PassageEncoder(tokenizer), tasks(), workers):
        yield from zip(waiting.pop(0), encoded, strict=True)


class _Split:
    """The token ids of a split: each document is followed by ``</s>``; one without ids is left out."""

    def __init__(self, folder: Path, split: Split, tokenizer: Tokenizer) -> None:
        self._end = np.array([tokenizer.special.eos], dtype=token_dtype(tokenizer.vocab_size))
        self._tokens = Column(folder / f"{split}.tokens", self._end.dtype)
        self._ends, self._of = Column(folder / f"{split}.ends", "<i8"), Column(folder / f"{split}.of", "<i8")
        self._begin = self._document = 0

    def append(self, ids: TokenArray, begins: int | None) -> None:
        """Append the ids of a passage; with ``begins`` it begins the document of that number."""
        if begins is not None:
            self._end_document()
            self._document = begins
        self._tokens.append(ids)

    def _end_document(self) -> None:
        if len(self._tokens) > self._begin:
            self._tokens.append(self._end)
            self._begin = len(self._tokens)
            self._ends.append([self._begin])
            self._of.append([self._document])

    def finish(self) -> SplitCounts:
        """End the last document, and write what is left."""
        self._end_document()
        for column in (self._tokens, self._ends, self._of):
            column.finish()
        return SplitCounts(tokens=len(self._tokens), documents=len(self._ends))


class _TextHash:
    """A hash of `same_text` of a text that comes in pieces, wherever they are cut."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._left = ""
        self._begun = self._apart = False  # whether there were words, and a space after the last one

    def update(self, text: str) -> None:
        text = self._left + text
        cut = _independent_cut(text)
        self._add(text[:cut])
        self._left = text[cut:]

    def digest(self) -> bytes:
        self._add(self._left)
        self._left = ""
        return self._hash.digest()

    def _add(self, text: str) -> None:
        folded = folded_text(text)
        if words := " ".join(folded.split()):
            # Words are joined by one space, also where a piece ends between two.
            self._hash.update((" " if self._begun and (self._apart or folded[0].isspace()) else "").encode())
            self._hash.update(words.encode())
            self._begun, self._apart = True, folded[-1].isspace()
        elif folded:
            self._apart = True


def _independent_cut(text: str) -> int:
    """The last place, but for some characters, at which a text may be cut before Unicode's normal form is taken.

    The accents of a letter are not cut off from it; only where no such place is near are they.
    """
    last = max(0, len(text) - _AROUND)
    for place in range(last, max(0, last - _PLACES), -1):
        before, behind = text[max(0, place - _AROUND) : place], text[place : place + _AROUND]
        # Normal forms of both sides together and apart agree: no accent or syllable lies across the cut.
        if folded_text(before) + folded_text(behind) == folded_text(before + behind):
            return place
    return last if last > _PLACES else 0


class _Hashes:
    """Writes a hash of the words of each document, by which it is compared with those of other units."""

    def __init__(self, folder: Path) -> None:
        self._words: _TextHash | None = None
        self._hashes = Column(folder / "hashes", "<u8")

    def add(self, piece: list[Passage], begins: bool) -> None:
        """Take a piece of a document, which may begin one."""
        if begins:
            self._end_document()
            self._words = _TextHash()
        assert self._words is not None, "the first piece begins a document"
        self._words.update("".join(passage.text for passage in piece))

    def _end_document(self) -> None:
        if self._words is not None:
            self._hashes.append(np.frombuffer(self._words.digest(), "<u8"))

    def finish(self) -> None:
        """End the last document, and write what is left."""
        self._end_document()
        self._hashes.finish()

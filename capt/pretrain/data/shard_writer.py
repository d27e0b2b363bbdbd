"""Shard sets from parts: each file is made by itself, from what the parts hold of its piece of the stream.

The first run of a job makes one part of its whole text, by any number of processes that encode, and joins that; the
preparation of a corpus of any size (`capt.pretrain.data.bulk`) makes many.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64

from capt.pretrain.base.arrays import Column, map_whole
from capt.pretrain.base.atomic import sync
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.locks import make_folder_once
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.base.verification import Verifier
from capt.pretrain.data.corpus import Corpus
from capt.pretrain.data.filters import DocumentFilters
from capt.pretrain.data.parts import write_part
from capt.pretrain.data.shards import (
    DOCUMENTS,
    MANIFEST,
    ShardFile,
    ShardManifest,
    ShardSet,
    Tokenizer,
    TokenizerRecord,
    token_dtype,
)
from capt.pretrain.data.sources import Split

SHARD_TOKENS = 1 << 27
"""Tokens of a shard: 256 MiB of uint16."""
MOST_SOURCES = 10_000
"""Files of text that a manifest lists one by one; of more it says how many, their bytes and a hash over their list."""

ShardOptions = dict[str, str | int | float | bool | None]


@dataclass(frozen=True)
class ShardStream:
    """The stream of a split, over all parts.

    Attributes:
        parts: the folders of the parts.
        split: the name of the split.
        tokens: how many tokens of each part stay in the stream.
        dtype: of a token.
        mask: whether each document stays, by part; None where all do.
    """

    parts: Sequence[Path]
    split: Split
    tokens: Int64[np.ndarray, " parts"]
    dtype: np.dtype[np.unsignedinteger]
    mask: Sequence[np.ndarray] | None = None

    @property
    def total(self) -> int:
        """Tokens of the stream."""
        return int(self.tokens.sum())

    def write_shard(self, begin: int, end: int, file: Column) -> None:
        """Write the tokens ``begin .. end-1`` of the stream."""
        ends = np.cumsum(self.tokens)
        # From the part in which `begin` lies, until a part begins behind `end`.
        for part in range(int(np.searchsorted(ends, begin, side="right")), len(self.parts)):
            base = int(ends[part] - self.tokens[part])
            if base >= end:
                return
            for start, stop in self._runs(part, max(begin - base, 0), min(end - base, int(self.tokens[part]))):
                for at in range(start, stop, _AT_ONCE):
                    # Read, not mapped: a process would count the whole part as its memory.
                    count, place = min(_AT_ONCE, stop - at), at * self.dtype.itemsize
                    file.append(np.fromfile(self._file(part, "tokens"), self.dtype, count, offset=place))

    def write_documents(self, file: Column) -> None:
        """Write where each document of the stream begins, and where the last one ends."""
        place = 0
        for part in range(len(self.parts)):
            ends, stay, before = self._ends(part), self._stay(part), 0
            for first in range(0, len(ends), _AT_ONCE):
                some = slice(first, first + _AT_ONCE)
                lengths = np.diff(ends[some], prepend=before)
                before = int(ends[some][-1])
                # Documents that were left out take no place in the stream.
                if stay is not None:
                    lengths = lengths[stay[some]]
                begins = place + np.cumsum(lengths) - lengths
                file.append(begins)
                place += int(lengths.sum())
        file.append([place])

    def files(self, shard_tokens: int) -> list[str]:
        """The names of the files of the shard set."""
        shards = -(-self.total // shard_tokens)
        return [*(f"shard-{number:05}.bin" for number in range(shards)), DOCUMENTS]

    def counts(self, part: int) -> tuple[int, int]:
        """Tokens and documents of a part that stay."""
        lengths, stay = _lengths(self._ends(part)), self._stay(part)
        if stay is not None:
            lengths = lengths[stay]
        return int(lengths.sum()), len(lengths)

    def _runs(self, part: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The places in the file of a part that hold the tokens ``begin .. end-1`` of those that stay of it."""
        stay = self._stay(part)
        if stay is None or stay.all():
            if begin < end:
                yield begin, end
            return
        ends = self._ends(part)
        lengths = _lengths(ends)
        # Runs of documents that stay: each begins at one edge and ends at the next.
        edges = np.flatnonzero(np.diff(np.concatenate([[False], stay, [False]]).astype(np.int8)))
        starts = (ends - lengths)[edges[::2]]  # of each run of documents that stay
        sizes = ends[edges[1::2] - 1] - starts
        before = np.cumsum(sizes) - sizes
        for start, size, place in zip(starts.tolist(), sizes.tolist(), before.tolist(), strict=True):
            first, last = max(begin - place, 0), min(end - place, size)
            if first < last:
                yield start + first, start + last

    def _stay(self, part: int) -> Bool[np.ndarray, " documents"] | None:
        # `of` has the number of each document, for some have no tokens in this split.
        return None if self.mask is None else self.mask[part][map_whole(self._file(part, "of"), "<i8")]

    def _ends(self, part: int) -> Int64[np.ndarray, " documents"]:
        return map_whole(self._file(part, "ends"), "<i8")

    def _file(self, part: int, what: str) -> Path:
        return self.parts[part] / f"{self.split}.{what}"


_AT_ONCE = 1 << 20
"""Tokens, or documents, that are in memory at a time."""


def _lengths(ends: Int64[np.ndarray, " documents"]) -> Int64[np.ndarray, " documents"]:
    return np.diff(ends, prepend=0)


def write_file(stream: ShardStream, name: str, shard_tokens: int, folder: Path) -> ShardFile:
    """Write the file ``name`` of a shard set into ``folder``."""
    file = Column(folder / name, "<i8" if name == DOCUMENTS else stream.dtype)
    if name == DOCUMENTS:
        stream.write_documents(file)
    else:
        number = int(name.removeprefix("shard-").removesuffix(".bin"))
        stream.write_shard(number * shard_tokens, min((number + 1) * shard_tokens, stream.total), file)
    file.finish()
    sync(folder / name)
    return ShardFile(name=name, bytes=len(file) * file.dtype.itemsize, sha256=file.sha256)


def write_shards(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    key: str,
    options: ShardOptions,
    workers: int,
    shard_tokens: int = SHARD_TOKENS,
    verifier: Verifier,
    verify: bool = True,
    progress: ProgressCallback | None = None,
) -> ShardSet:
    """Tokenize ``corpus`` into the shard set ``folder`` with ``workers`` processes, and open it.

    The result is the same for any number of workers. It appears whole, by a rename, or not at all; of several processes
    that write the same folder, one does and the others wait for it. ``key`` and ``options`` go into the manifest; a
    shard set with this key that is there already is used (``verify``: once its hashes are checked). All ranks of
    ``verifier`` call this alike. ``progress`` gets ``corpus.position`` and ``corpus.size``.

    Raises ``DataError`` when the corpus is not valid text or is empty, ``folder`` holds something else, or the disk is
    full.
    """
    corpus.contents()  # all ranks together; the one that writes will only look it up
    wrote = False

    def write(partial: Path) -> None:
        nonlocal wrote
        wrote, part = True, partial / "part"
        part.mkdir()
        record = write_part(
            part, corpus, tokenizer, DocumentFilters(), splits=("train",), has_first=True, workers=workers,
            progress=progress,
        )  # fmt: skip
        counts = record.splits["train"]
        if not counts.tokens:
            raise DataError(f"no text in {', '.join(str(source['name']) for source in corpus.contents())}")
        stream = ShardStream([part], "train", np.array([counts.tokens]), token_dtype(tokenizer.vocab_size))
        files = [write_file(stream, name, shard_tokens, partial) for name in stream.files(shard_tokens)]
        shutil.rmtree(part)
        manifest = ShardManifest(
            key=key,
            tokenizer=TokenizerRecord.from_tokenizer(tokenizer),
            source=source_records(corpus.contents()),
            options=options,
            documents=counts.documents,
            tokens=counts.tokens,
            shard_tokens=shard_tokens,
            files=tuple(files),
        )
        (partial / MANIFEST).write_text(manifest.model_dump_json(indent=1))

    with verifier.ranks.synchronize_errors():
        try:
            make_folder_once(folder, write, is_made=(folder / MANIFEST).is_file)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DataError(f"no space left for the shard set {folder}: free some, or set data.cache") from error
        if wrote:
            trust_written(folder, verifier)
        # The folder may have been there before, with the shards of another text.
        if ShardManifest.read(folder).key != key:
            raise DataError(f"{folder} holds other shards than this job makes: take another folder, or remove it")
    return ShardSet.open(folder, verifier, verify=verify)


def trust_written(folder: Path, verifier: Verifier) -> None:
    """Tell the verifier the hashes of the files just written, so that it need not read them."""
    manifest = ShardManifest.read(folder)
    inspections = manifest.inspections()
    for name, record in manifest.records().items():
        verifier.trust(folder / name, record.sha256, inspections[name].name)


def source_records(contents: list[dict[str, str | int]]) -> list[dict[str, str | int]]:
    """The records of the sources in the manifest: one per file, or one for all of a long list.

    Every rank reads the whole manifest, so it must stay small.
    """
    if len(contents) <= MOST_SOURCES:
        return contents
    listing = json.dumps(contents, sort_keys=True).encode()
    return [
        {
            "name": f"{len(contents)} files, the first {contents[0]['name']}"[:10_000],
            "bytes": sum(int(part["bytes"]) for part in contents),
            "rows_without_text": sum(int(part.get("rows_without_text", 0)) for part in contents),
            "sha256": hashlib.sha256(listing).hexdigest(),
        }
    ]

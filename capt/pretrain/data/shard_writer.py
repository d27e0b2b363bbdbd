"""Tokenize a corpus into a shard set: one pass, in parallel, in constant memory, all or nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from capt.pretrain.base.atomic import new_folder
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.locks import make_once
from capt.pretrain.base.parallel import ProgressCallback, ordered_map
from capt.pretrain.base.verification import Verifier
from capt.pretrain.data.corpus import Corpus, Passage
from capt.pretrain.data.shards import (
    DOCUMENTS,
    MANIFEST,
    FileRecord,
    Manifest,
    ShardSet,
    Tokenizer,
    TokenizerRecord,
    token_dtype,
)

SHARD_TOKENS = 1 << 27
"""Tokens of a shard: 256 MiB of uint16."""
PASSAGES_AT_ONCE = 64
MOST_SOURCES = 10_000
"""Files of text that a manifest lists one by one; of more it says how many, their bytes and a hash over their list."""

TokenArray = Shaped[np.ndarray, " tokens"]
Options = dict[str, str | int | float | bool | None]


def write_shards(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    key: str,
    options: Options,
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
    manifest = folder / MANIFEST

    def make() -> None:
        _tokenize(corpus, tokenizer, folder, key, options, workers, shard_tokens, progress)
        trust_written(folder, verifier)

    with verifier.ranks.synchronize_errors():
        make_once(folder.with_name(f".{folder.name}.lock"), manifest.is_file, make)
        # The folder may have been there before, with the shards of another text.
        if Manifest.read(folder).key != key:
            raise DataError(f"{folder} holds other shards than this job makes: take another folder, or remove it")
    return ShardSet.open(folder, verifier, verify=verify)


def trust_written(folder: Path, verifier: Verifier) -> None:
    """Tell the verifier the hashes of the files just written, so that it need not read them."""
    manifest = Manifest.read(folder)
    inspections = manifest.inspections()
    for name, record in manifest.records().items():
        verifier.trust(folder / name, record.sha256, inspections[name].name)


def _tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    key: str,
    options: Options,
    workers: int,
    shard_tokens: int,
    progress: ProgressCallback | None,
) -> None:
    # Leftovers of killed writers; the lock is held, so no other one is at work.
    for abandoned in folder.parent.glob(f".{folder.name}.*.partial"):
        if abandoned.is_symlink():
            abandoned.unlink()
        else:
            shutil.rmtree(abandoned)
    try:
        with new_folder(folder) as partial, _Stream(partial, tokenizer, shard_tokens) as stream:
            for passage, ids in _encode_passages(corpus, tokenizer, workers):
                # A document ends where the next one begins, and the last in `finish`.
                if passage.starts:
                    stream.end_document()
                stream.append(ids)
                if progress is not None:
                    progress(corpus.position, corpus.size)
            manifest = stream.finish(corpus, tokenizer, key, options)
            (partial / MANIFEST).write_text(manifest.model_dump_json(indent=1))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(f"no space left for the shard set {folder}: free some, or set data.cache") from error


class Encoder:
    """Encodes passages in a worker process; refuses ids that are not of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._dtype = tokenizer, token_dtype(tokenizer.vocab_size)

    def __call__(self, passages: list[Passage]) -> list[TokenArray]:
        """The token ids of each passage. Raises ``DataError``."""
        encoded = self._tokenizer.encode_batch([passage.text for passage in passages])
        largest = max((int(ids.max()) for ids in encoded if len(ids)), default=0)
        if largest >= self._tokenizer.vocab_size:
            raise DataError(f"the tokenizer gave the id {largest}, but its vocabulary has {self._tokenizer.vocab_size}")
        return [ids.astype(self._dtype) for ids in encoded]


def _encode_passages(
    corpus: Iterable[Passage], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Passage, TokenArray]]:
    """Yield every passage with its token ids, in order."""
    # Passages whose ids are not back yet, in order: the workers return ids alone.
    waiting: list[list[Passage]] = []

    def tasks() -> Iterator[list[Passage]]:
        passages = iter(corpus)
        while task := list(islice(passages, PASSAGES_AT_ONCE)):
            waiting.append(task)
            yield task

    for encoded in ordered_map(Encoder(tokenizer), tasks(), workers):
        yield from zip(waiting.pop(0), encoded, strict=True)


class _Stream(AbstractContextManager["_Stream"]):
    """Writes the token stream and the document starts."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self._folder, self._shard_tokens = folder, shard_tokens
        self._end = np.array([tokenizer.special.eos], dtype=token_dtype(tokenizer.vocab_size))
        self._shards: list[HashedFile] = []
        self._index = HashedFile(folder / DOCUMENTS)
        self._tokens = self._document_start = self._documents = 0

    def __exit__(self, *error: object) -> None:
        for file in [*self._shards, self._index]:
            file.close()

    def append(self, ids: TokenArray) -> None:
        """Append token ids to the current document."""
        while len(ids):
            used = self._tokens % self._shard_tokens
            if used == 0:
                if self._shards:
                    self._shards[-1].close()
                self._shards.append(HashedFile(self._folder / f"shard-{len(self._shards):05}.bin"))
            now, ids = ids[: self._shard_tokens - used], ids[self._shard_tokens - used :]
            self._shards[-1].write(now)
            self._tokens += len(now)

    def end_document(self) -> None:
        """End the current document, unless it has no tokens."""
        if self._tokens > self._document_start:
            self.append(self._end)
            self._index.write(np.array([self._document_start], dtype="<i8"))
            self._document_start = self._tokens
            self._documents += 1

    def finish(self, corpus: Corpus, tokenizer: Tokenizer, key: str, options: Options) -> Manifest:
        """End the last document, close the files and describe them."""
        self.end_document()
        if not self._tokens:
            raise DataError(f"no text in {', '.join(str(part['name']) for part in corpus.contents())}")
        # One border more than documents: where the last one ends.
        self._index.write(np.array([self._tokens], dtype="<i8"))
        self.__exit__()
        return Manifest(
            key=key,
            tokenizer=TokenizerRecord.from_tokenizer(tokenizer),
            source=source_records(corpus.contents()),
            options=options,
            documents=self._documents,
            tokens=self._tokens,
            shard_tokens=self._shard_tokens,
            files=tuple(file.record() for file in [*self._shards, self._index]),
        )


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


class HashedFile:
    """A file that knows its size and SHA-256 without being read again."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._hash, self._bytes = path, path.open("wb", buffering=1 << 20), hashlib.sha256(), 0

    def write(self, values: np.ndarray) -> None:
        """Append an array's bytes."""
        data = values.tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def close(self) -> None:
        """Flush and close; more than once does no harm."""
        self._file.close()

    def record(self) -> FileRecord:
        """The record of the file for the manifest."""
        return FileRecord(name=self._path.name, bytes=self._bytes, sha256=self._hash.hexdigest())

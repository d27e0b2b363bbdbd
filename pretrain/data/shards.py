"""Token shards: a corpus as one long stream of token ids on disk, read by memory map.

A shard set is a folder::

    shard-00000.bin ...   the stream, cut every ``shard_tokens`` tokens; uint16 (uint32 for more than 65,536 ids)
    documents.bin         int64: where each document begins in the stream, and where the last one ends
    manifest.json         format, tokenizer, source, counts, and every file's size and SHA-256; written last

In the stream every document ends with ``</s>``, so that a training window is one slice of it
(``pretrain.data.packing``). ``pretrain.data.shard_writer`` writes shard sets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Int64
from pydantic import BaseModel, ConfigDict, ValidationError

from tokenizer.errors import DataError
from tokenizer.files import sha256
from tokenizer.special import SpecialIds

MANIFEST = "manifest.json"
DOCUMENTS = "documents.bin"


@runtime_checkable
class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer (``tokenizer.encode`` has it); sent to workers by pickle."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def special(self) -> SpecialIds:
        """Ids by role."""
        ...

    @property
    def special_ids(self) -> Collection[int]:
        """All ids that are not text."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when any text would be encoded differently."""
        ...

    def encode_batch(self, texts: list[str]) -> list[Int32[np.ndarray, " tokens"]]:
        """Token ids of each text, without special tokens."""
        ...


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenizerRecord(_Record):
    """The tokenizer that made a shard set."""

    fingerprint: str
    vocab_size: int
    bos: int
    pad: int
    eos: int
    mask: int
    special_ids: tuple[int, ...]


class FileRecord(_Record):
    """One file of a shard set."""

    name: str
    bytes: int
    sha256: str


class Manifest(_Record):
    """What ``manifest.json`` says. ``key`` stands for the text, the tokenizer and the options that it was made from."""

    format: Literal["capt-token-shards"] = "capt-token-shards"
    version: Literal[1] = 1
    key: str
    tokenizer: TokenizerRecord
    source: list[dict[str, str | int]]
    options: dict[str, str | int | float | bool | None]
    documents: int
    tokens: int
    shard_tokens: int
    files: tuple[FileRecord, ...]


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest unsigned type that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardSet:
    """An opened shard set. ``documents`` and ``tokens`` (document ends included) are its totals.

    Cheap to send to another process: only the folder travels.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.documents, self.tokens = manifest.documents, manifest.tokens

    @classmethod
    def open(cls, folder: Path, verify: bool = True) -> ShardSet:
        """Open the shard set in ``folder``; ``verify`` compares every file's SHA-256 (sizes are always compared).

        Raises ``DataError`` naming the missing, truncated or changed file, what was expected and what was found.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise DataError(f"{folder} is not a shard set: it has no {MANIFEST} (capt data prepare makes one)")
        try:
            manifest = Manifest.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "JSON"
            raise DataError(f"{path} is damaged or of another version: {where}: {first['msg']}") from None
        for record in manifest.files:
            _check(folder / record.name, record, verify)
        return cls(folder, manifest)

    def __reduce__(self) -> tuple[Callable[[Path, bool], ShardSet], tuple[Path, bool]]:
        return ShardSet.open, (self.folder, False)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise ``DataError`` when these shards were made with another tokenizer."""
        made_with = self.manifest.tokenizer.fingerprint
        if made_with != tokenizer.fingerprint:
            raise DataError(
                f"{self.folder} was tokenized with the tokenizer {made_with}, this job uses {tokenizer.fingerprint}:"
                " set tokenizer.path to that tokenizer, or prepare the data again"
            )

    def read(self, start: int, stop: int) -> Int32[np.ndarray, " tokens"]:
        """Tokens ``start .. stop-1`` of the stream (less at its end)."""
        size = self.manifest.shard_tokens
        stop = min(stop, self.tokens)
        out = np.empty(max(0, stop - start), dtype=np.int32)
        at = start
        while at < stop:
            shard, offset = divmod(at, size)
            part = self._shards[shard][offset : offset + stop - at]
            out[at - start : at - start + len(part)] = part
            at += len(part)
        return out

    @cached_property
    def starts(self) -> Int64[np.ndarray, " borders"]:
        """Where each document begins in the stream, and where the last one ends (memory-mapped)."""
        return np.memmap(self.folder / DOCUMENTS, dtype="<i8", mode="r")

    @cached_property
    def _shards(self) -> list[np.ndarray]:
        dtype = token_dtype(self.manifest.tokenizer.vocab_size)
        names = [record.name for record in self.manifest.files if record.name != DOCUMENTS]
        return [np.memmap(self.folder / name, dtype=dtype, mode="r") for name in names]


def _check(path: Path, record: FileRecord, verify: bool) -> None:
    if not path.is_file():
        raise DataError(f"{path} is missing: {MANIFEST} lists it with {record.bytes} bytes")
    found = path.stat().st_size
    if found != record.bytes:
        raise DataError(f"{path} is damaged: expected {record.bytes} bytes, found {found}; prepare the data again")
    if verify and (digest := sha256(path)) != record.sha256:
        raise DataError(f"{path} is damaged: expected SHA-256 {record.sha256}, found {digest}; prepare the data again")

"""``manifest.json`` of a shard set: its typed record, and the checks of the files that it lists."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32
from pydantic import Field, model_validator

from pretrain.base.errors import DataError
from pretrain.base.hashing import ExpectedFile, Inspection
from pretrain.base.records import Record, read_record
from tokenizer.special import SpecialIds

MANIFEST = "manifest.json"
DOCUMENTS = "documents.bin"

_MOST = 1 << 53
Count = Annotated[int, Field(ge=1, le=_MOST)]
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Name = Annotated[str, Field(max_length=128, pattern=r"\A[!-~]+\z")]
Text = Annotated[str, Field(max_length=10_000)]
Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


@runtime_checkable
class Tokenizer(Protocol):
    """The tokenizer that the data pipeline needs (``tokenizer.encode`` has one); it is sent to workers by pickle."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def special(self) -> SpecialIds:
        """The special ids by role."""
        ...

    @property
    def special_ids(self) -> Collection[int]:
        """All ids that represent no text."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash that changes when any text would be encoded differently."""
        ...

    def encode_batch(self, texts: list[str]) -> list[Int32[np.ndarray, " tokens"]]:
        """The token ids of each text, without special tokens."""
        ...


class TokenizerRecord(Record, extra="forbid"):
    """The tokenizer that made a shard set."""

    fingerprint: Name
    vocab_size: Annotated[int, Field(ge=1, le=1 << 31)]
    bos: Id
    pad: Id
    eos: Id
    mask: Id
    special_ids: Annotated[tuple[Id, ...], Field(strict=False)]

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> TokenizerRecord:
        """Record ``tokenizer``."""
        special = tokenizer.special
        return cls(
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            bos=special.bos,
            pad=special.pad,
            eos=special.eos,
            mask=special.mask,
            special_ids=tuple(sorted(tokenizer.special_ids)),
        )

    @model_validator(mode="after")
    def _ids_exist(self) -> TokenizerRecord:
        if max(self.bos, self.pad, self.eos, self.mask, *self.special_ids) >= self.vocab_size:
            raise ValueError(f"a special id is not below vocab_size {self.vocab_size}")
        return self


class FileRecord(Record, extra="forbid"):
    """One file of a shard set."""

    name: Annotated[str, Field(pattern=r"\A(shard-[0-9]{5,9}|documents)\.bin\z")]
    bytes: Count
    sha256: Digest


class Manifest(Record, extra="forbid"):
    """What ``manifest.json`` says. ``key`` represents the text, the tokenizer and the options that it was made from.

    The sizes of the files follow from the counts, and are checked against them here.
    """

    format: Literal["capt-token-shards"] = "capt-token-shards"
    version: Literal[1] = 1
    key: Name
    tokenizer: TokenizerRecord
    source: list[dict[Text, Text | int]]
    options: dict[Text, Text | int | float | bool | None]
    documents: Count
    tokens: Count
    shard_tokens: Count
    files: Annotated[tuple[FileRecord, ...], Field(strict=False)]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of ``folder``. Raises ``DataError`` naming what is wrong in it."""
        path = folder / MANIFEST
        if not path.is_file():
            inner = (folder / "train" / MANIFEST).is_file()
            remedy = f"name {folder / 'train'}" if inner else "capt data prepare makes one"
            raise DataError(f"{folder} is not a shard set: it has no {MANIFEST} ({remedy})")
        return read_record(cls, path, error=DataError)

    @model_validator(mode="after")
    def _files_fit_the_counts(self) -> Manifest:
        if self.documents > self.tokens:
            raise ValueError(f"{self.documents} documents cannot have {self.tokens} tokens, an end each included")
        shards = -(-self.tokens // self.shard_tokens)
        if len(self.files) != shards + 1:  # before lists of that length are made
            raise ValueError(f"{len(self.files)} files are listed; {shards} shards and {DOCUMENTS} are needed")
        width = token_dtype(self.tokenizer.vocab_size).itemsize
        needed = {f"shard-{i:05}.bin": self.shard_tokens * width for i in range(shards)}
        needed[f"shard-{shards - 1:05}.bin"] = (self.tokens - (shards - 1) * self.shard_tokens) * width
        needed[DOCUMENTS] = (self.documents + 1) * 8
        listed = {file.name: file.bytes for file in self.files}
        if wrong := [name for name in needed if listed.get(name) != needed[name]]:
            raise ValueError(f"files: {wrong[0]} must have {needed[wrong[0]]} bytes by tokens and documents")
        return self

    @property
    def shards(self) -> list[str]:
        """The names of the shards in the order of the stream."""
        return [f"shard-{i:05}.bin" for i in range(len(self.files) - 1)]

    def records(self) -> dict[str, ExpectedFile]:
        """The files by name, for verification."""
        return {file.name: ExpectedFile(file.bytes, file.sha256) for file in self.files}

    def inspections(self) -> dict[str, Inspection]:
        """The checks of the files' contents: every id is of the vocabulary, documents lie end to end."""
        size, dtype = self.tokenizer.vocab_size, token_dtype(self.tokenizer.vocab_size)
        ids = Inspection(f"ids below {size} of {dtype.str}", lambda: _ids_below(size, dtype))
        ends = Inspection(f"documents end at {self.tokens}", lambda: _documents_end_at(self.tokens))
        return {**dict.fromkeys(self.shards, ids), DOCUMENTS: ends}


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest unsigned type that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _ids_below(size: int, dtype: np.dtype[np.unsignedinteger]) -> Callable[[memoryview], None]:
    def look(chunk: memoryview) -> None:
        largest = int(np.frombuffer(chunk, dtype=dtype).max(initial=0))
        if largest >= size:
            raise DataError(f"it holds the id {largest}, but its vocabulary has {size}")

    return look


def _documents_end_at(tokens: int) -> Callable[[memoryview], None]:
    before = -1

    def look(chunk: memoryview) -> None:
        nonlocal before
        starts = np.frombuffer(chunk, dtype="<i8")
        if len(starts):
            if (before < 0 and starts[0] != 0) or starts[0] <= before or (np.diff(starts) <= 0).any():
                raise DataError("documents must begin at 0 and follow each other")
            before = int(starts[-1])
        elif before != tokens:
            raise DataError(f"it ends at token {before}, {MANIFEST} says {tokens}")

    return look

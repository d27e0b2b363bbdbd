"""Token shards: a corpus as one long stream of token ids on disk, read by memory map.

A shard set is a folder::

    shard-00000.bin ...   the stream, cut every ``shard_tokens`` tokens; uint16 (uint32 for more than 65,536 ids)
    documents.bin         int64: where each document begins in the stream, and where the last one ends
    manifest.json         format, tokenizer, source, counts, and every file's size and SHA-256; written last

In the stream every document ends with ``</s>``, so that a training window is one slice of it (`PackedDataset`).
``capt.pretrain.data.shard_writer`` writes shard sets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Int64
from pydantic import Field, model_validator

from capt.pretrain.base.arrays import map_whole
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.files import parse_json
from capt.pretrain.base.records import Record, parse_record, read_record
from capt.pretrain.base.stores import MissingError, read_small, without_secrets
from capt.pretrain.base.verification import ALONE, ExpectedFile, Inspection, Ranks, Verifier, check_size
from capt.pretrain.data.sampler import GroupedSampler
from capt.pretrain.data.shard_cache import ShardCache
from capt.tokenizer.special import SpecialIds

# ``manifest.json`` of a shard set: its typed record, and the checks of the files that it lists.


MANIFEST = "manifest.json"
DOCUMENTS = "documents.bin"

_MOST = 1 << 53
_Count = Annotated[int, Field(ge=1, le=_MOST)]
_Id = Annotated[int, Field(ge=0, lt=1 << 31)]
_Name = Annotated[str, Field(max_length=128, pattern=r"\A[!-~]+\z")]
_Text = Annotated[str, Field(max_length=10_000)]
_Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


@runtime_checkable
class Tokenizer(Protocol):
    """The tokenizer that the data pipeline needs (``capt.tokenizer.encode`` has one); it is sent to workers by
    pickle."""

    @property
    def vocab_size(self) -> int:
        """Largest id plus 1."""
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

    fingerprint: _Name
    vocab_size: Annotated[int, Field(ge=1, le=1 << 31)]
    bos: _Id
    pad: _Id
    eos: _Id
    mask: _Id
    special_ids: Annotated[tuple[_Id, ...], Field(strict=False)]

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


class ShardFile(Record, extra="forbid"):
    """A file of a shard set."""

    name: Annotated[str, Field(pattern=r"\A(shard-[0-9]{5,9}|documents)\.bin\z")]
    bytes: _Count
    sha256: _Digest


class ShardManifest(Record, extra="forbid"):
    """The content of ``manifest.json``. ``key`` represents the text, the tokenizer and the options of the set.

    The sizes of the files follow from the counts, and are checked against them here.
    """

    format: Literal["capt-token-shards"] = "capt-token-shards"
    version: Literal[1] = 1
    key: _Name
    tokenizer: TokenizerRecord
    source: list[dict[_Text, _Text | int]]
    options: dict[_Text, _Text | int | float | bool | None]
    documents: _Count
    tokens: _Count
    shard_tokens: _Count
    files: Annotated[tuple[ShardFile, ...], Field(strict=False)]

    @classmethod
    def read(cls, folder: Path) -> ShardManifest:
        """Read the manifest of ``folder``. Raises ``DataError`` naming what is wrong in it."""
        path = folder / MANIFEST
        if not path.is_file():
            inner = (folder / "train" / MANIFEST).is_file()
            remedy = f"name {folder / 'train'}" if inner else "capt data prepare makes one"
            raise DataError(f"{folder} is not a shard set: it has no {MANIFEST} ({remedy})")
        return read_record(cls, path, error=DataError)

    @classmethod
    def read_url(cls, url: str) -> ShardManifest:
        """Read the manifest of a folder in a store. Raises ``DataError`` as `read`."""
        place = f"{url.rstrip('/')}/{MANIFEST}"
        try:
            content = read_small(place)
        except MissingError:
            raise DataError(f"{without_secrets(url)} is not a shard set: it has no {MANIFEST}") from None
        return parse_record(cls, parse_json(content, place), place, error=DataError)

    @model_validator(mode="after")
    def _files_fit_the_counts(self) -> ShardManifest:
        if self.documents > self.tokens:
            raise ValueError(f"{self.documents} documents cannot have {self.tokens} tokens, an end each included")
        shards = -(-self.tokens // self.shard_tokens)
        if len(self.files) != shards + 1:  # before lists of that length are made
            raise ValueError(f"{len(self.files)} files are listed; {shards} shards and {DOCUMENTS} are needed")
        # Every size follows from the counts, so a manifest that was changed by hand is seen without reading a shard.
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


_WINDOWS = 256
"""Windows whose documents are looked at for `PackedDataset.tokens_seen`."""
_REMEDY = "; prepare the data again"


class ShardSet:
    """An opened shard set. ``documents`` and ``tokens`` (document ends included) are its totals.

    The files are in ``folder``; those of a folder in a store come by way of ``cache``. Sending a set of this host to
    another process is cheap: only the name of the folder is sent.
    """

    def __init__(self, folder: Path | str, manifest: ShardManifest, cache: ShardCache | None = None) -> None:
        self.folder, self.manifest, self.cache = folder, manifest, cache
        self.documents, self.tokens = manifest.documents, manifest.tokens
        self._names, self._dtype = manifest.shards, token_dtype(manifest.tokenizer.vocab_size)
        self._maps: dict[str, np.ndarray] = {}

    @classmethod
    def open(cls, folder: Path, verifier: Verifier | None = None, *, verify: bool = True) -> ShardSet:
        """Open the shard set in ``folder``; sizes are always compared with the manifest.

        ``verifier`` compares every file's SHA-256 as well, and looks at every id and document, all its ranks together.
        Without one, or with ``verify=False``, what the files hold is taken as it is.

        Raises ``DataError`` naming the missing, truncated or changed file, what was expected and what was found.
        """
        with verifier.ranks.synchronize_errors() if verifier is not None else nullcontext():
            manifest = ShardManifest.read(folder)
            for name, record in manifest.records().items():
                check_size(folder / name, record, DataError, _REMEDY)
        if verifier is not None and verify:
            verifier.verify(folder, manifest.records(), hint=_REMEDY, inspections=manifest.inspections())
        return cls(folder, manifest)

    @classmethod
    def open_url(
        cls, url: str, folder: Path, limit: int, ranks: Ranks = ALONE, *, at_once: int | None, check: bool = True
    ) -> ShardSet:
        """Open the shard set in the folder ``url`` of a store, whose files come by way of the cache ``folder``.

        All ``ranks`` call this. Without ``at_once``, the number of shards that a job uses at a time, every file is
        fetched before this returns. ``check=False`` takes what earlier jobs have left in the cache as it is.

        Raises:
            ConfigError: the files, or the shards of two groups, are larger than ``limit`` bytes.
            DataError: a file is missing or damaged, or the store does not answer.
        """
        found = ""
        with ranks.synchronize_errors():
            # One rank asks the store, and all see the same manifest.
            if ranks.rank == 0:
                found = ShardManifest.read_url(url).model_dump_json()
        manifest = ShardManifest.model_validate_json(ranks.broadcast(found))
        cache = ShardCache(
            url, manifest.shards, manifest.records(), manifest.inspections(), folder / "stored", limit, check=check
        )
        with ranks.synchronize_errors():
            cache.require_room(at_once)
            if at_once is None:
                cache.fetch_all()
        return cls(url, manifest, cache)

    def __reduce__(self) -> tuple[Callable[[Path], ShardSet], tuple[Path]]:
        assert isinstance(self.folder, Path), "loader workers inherit a set in a store"
        return ShardSet.open, (self.folder,)

    def _file(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _map(self, name: str, dtype: str | np.dtype[np.unsignedinteger]) -> np.ndarray:
        if self.cache is not None:
            return self.cache.map(name, np.dtype(dtype))
        if name not in self._maps:
            self._maps[name] = map_whole(Path(self._file(name)), dtype)
        return self._maps[name]

    @property
    def rows_without_text(self) -> int:
        """The rows of tables that were left out when the shards were made."""
        return sum(int(part.get("rows_without_text", 0)) for part in self.manifest.source)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise ``DataError`` when these shards were made with another tokenizer."""
        made_with = self.manifest.tokenizer
        if made_with.fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"{self.folder} was tokenized with the tokenizer {made_with.fingerprint}, this job uses"
                f" {tokenizer.fingerprint}: set tokenizer.path to that tokenizer, or prepare the data again"
            )
        if made_with != TokenizerRecord.from_tokenizer(tokenizer):
            raise DataError(f"{self._file(MANIFEST)} is damaged: its tokenizer's ids are not those of the tokenizer")

    def read(self, start: int, stop: int) -> Int32[np.ndarray, " tokens"]:
        """Read tokens ``start .. stop-1`` of the stream (fewer at its end)."""
        size = self.manifest.shard_tokens
        stop = min(stop, self.tokens)
        out = np.empty(max(0, stop - start), dtype=np.int32)
        at = start
        while at < stop:
            shard, offset = divmod(at, size)
            part = self._map(self._names[shard], self._dtype)[offset : offset + stop - at]
            # A map of a file that was cut short after it was opened.
            if not len(part):
                raise DataError(f"{self._file(self._names[shard])} ends before token {at}{_REMEDY}")
            out[at - start : at - start + len(part)] = part
            at += len(part)
        return out

    @property
    def starts(self) -> Int64[np.ndarray, " borders"]:
        """The place in the stream where each document begins, and where the last one ends (memory-mapped)."""
        return self._map(DOCUMENTS, "<i8")


# RoBERTa's FULL-SENTENCES packing (Liu et al. 2019, section 4.2) over a shard set.
#
# A window is ``<s>``, the next ``L - 2`` tokens of the stream, ``</s>``. Text runs on over document borders, where the
# stream holds an extra ``</s>``; the next window continues where the last one stopped. RoBERTa fills windows with
# whole sentences, which need not be known here: windows are cut at the exact length, so no token is padding except in
# the last window, and the place of any window is a product, without an index.


class PackedDataset:
    """The windows of ``shards``, each of ``sequence_length`` = L tokens, specials included.

    With ``by_shard`` no window goes over the end of a shard, where a window then holds padding; ``block`` is the number
    of windows of a shard. Raises ``ConfigError`` for windows too short to hold text.
    """

    def __init__(self, shards: ShardSet, sequence_length: int, *, by_shard: bool = False) -> None:
        if sequence_length < 3:
            raise ConfigError(f"data.sequence_length = {sequence_length} leaves no room for text; use at least 8")
        self.shards, self.sequence_length = shards, sequence_length
        self._text = sequence_length - 2
        self._special = shards.manifest.tokenizer
        self._part = shards.manifest.shard_tokens if by_shard else shards.tokens
        self.block = -(-self._part // self._text)

    def __len__(self) -> int:
        whole, rest = divmod(self.shards.tokens, self._part)
        # Rounded up: the rest fills one more window in part.
        return whole * self.block - (-rest // self._text)

    def follow(self, order: GroupedSampler, sample: int) -> None:
        """Let the cache of a set in a store fetch what a sample needs, and what comes after it."""
        if self.shards.cache is not None:
            self.shards.cache.follow(order, sample)

    def shards_of_group(self, at_once: int) -> int:
        """Shards that a group of ``at_once`` blocks needs at most."""
        return at_once

    def release(self) -> None:
        """Let go of what was read of a store, which may then give way to what others need."""
        if self.shards.cache is not None:
            self.shards.cache.release()

    @property
    def key(self) -> str:
        """The key of the shards from which the windows are cut: `ShardManifest.key`."""
        return self.shards.manifest.key

    def _span(self, index: int) -> tuple[int, int]:
        """The tokens of the stream that a window holds."""
        part, place = divmod(index, self.block)
        start = part * self._part + place * self._text
        # A window ends with its text, with its shard, or with the stream.
        return start, min(start + self._text, (part + 1) * self._part, self.shards.tokens)

    def window(self, index: int) -> Int32[np.ndarray, " L"]:
        """The token ids of the window with this index."""
        text = self.shards.read(*self._span(index))
        out = np.full(self.sequence_length, self._special.pad, dtype=np.int32)
        out[0] = self._special.bos
        out[1 : len(text) + 1] = text
        out[len(text) + 1] = self._special.eos
        return out

    def tokens_seen(self) -> float:
        """Tokens that a token attends to on average where attention keeps within documents, by some windows."""
        windows = np.linspace(0, len(self) - 1, min(len(self), _WINDOWS), dtype=np.int64)
        rows = [self.documents(int(window)) for window in windows]
        # Where the number of the document changes, both ends of the window included.
        borders = [np.flatnonzero(np.diff(row, prepend=row[0] - 1, append=row[-1] + 1)) for row in rows]
        # Each token of a document of n tokens attends to n.
        return float(np.mean([np.square(np.diff(each)).sum() / self.sequence_length for each in borders]))

    def documents(self, index: int) -> Int64[np.ndarray, " L"]:
        """The number of the document that each token of the window belongs to: 0, 1, ...; padding has -1.

        ``<s>`` counts to the first document, a separator to the document that it ends, the last ``</s>`` to the last
        document. Attention within documents is attention between equal numbers, so ``<s>`` then sees the first only.
        """
        start, stop = self._span(index)
        starts = self.shards.starts
        # A document that begins with the window is its number 0, and no border in it.
        first = int(np.searchsorted(starts, start, side="right"))
        borders = starts[first : first + self._text]
        begins = np.zeros(stop - start, dtype=np.int64)
        begins[borders[borders < stop] - start] = 1
        out = np.full(self.sequence_length, -1, dtype=np.int64)
        out[0] = 0
        out[1 : len(begins) + 1] = np.cumsum(begins)
        out[len(begins) + 1] = out[len(begins)]
        return out

    @property
    def real_tokens(self) -> float:
        """The share of tokens that are not padding."""
        return (self.shards.tokens + 2 * len(self)) / (len(self) * self.sequence_length)


# The numbers of a shard set that ``capt data inspect`` shows.


_DOCUMENTS_PER_BLOCK = 1 << 20


@dataclass(frozen=True)
class ShardSummary:
    """Totals, document lengths in tokens, and how the text packs into windows of ``sequence_length``.

    ``histogram`` maps the lower bound ``2**k`` to the number of documents of ``2**k .. 2**(k+1) - 1`` tokens, their
    ``</s>`` included; ``real_tokens`` is the share of window tokens that are not padding; ``samples`` are decoded
    windows, evenly spaced.
    """

    documents: int
    tokens: int
    shortest: int
    longest: int
    mean: float
    histogram: dict[int, int]
    windows: int
    real_tokens: float
    samples: list[str]


def summarize(
    shards: ShardSet, sequence_length: int, decode: Callable[[Int32[np.ndarray, " L"]], str], samples: int = 3
) -> ShardSummary:
    """Describe ``shards``; ``decode`` turns the token ids of a window into text."""
    counts = np.zeros(64, dtype=np.int64)
    shortest, longest = shards.tokens, 0
    for first in range(0, shards.documents, _DOCUMENTS_PER_BLOCK):
        lengths = np.diff(shards.starts[first : first + _DOCUMENTS_PER_BLOCK + 1])
        # The binary exponent: 2**k <= length < 2**(k+1).
        counts += np.bincount(np.frexp(lengths.astype(np.float64))[1] - 1, minlength=64)
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    windows = PackedDataset(shards, sequence_length)
    shown = np.unique(np.linspace(0, len(windows) - 1, samples).astype(np.int64))
    return ShardSummary(
        documents=shards.documents,
        tokens=shards.tokens,
        shortest=shortest,
        longest=longest,
        mean=shards.tokens / shards.documents,
        histogram={1 << k: int(count) for k, count in enumerate(counts) if count},
        windows=len(windows),
        real_tokens=windows.real_tokens,
        samples=[decode(windows.window(int(index))) for index in shown],
    )

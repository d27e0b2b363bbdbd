"""Vectors of texts on disk: memory-mapped, keyed by everything that decides a vector, complete after any kill.

``ROOT/<key>/`` holds the vectors of one `VectorIdentity`. A process appends to a segment of its own: ``<segment>.rows``
has the vectors one after the other, ``<segment>.ids`` the hash of each text with a checksum of its row. The vectors of
a batch are written before their ids, so that a killed process leaves no id without its vector. Vectors in int8 have the
ranges of their calibration beside them, ``ranges.json``, written before the first vector.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from jaxtyping import Float, Int64

from capt.pretrain.base.atomic import sync
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.files import read_json, write_json
from capt.pretrain.base.verification import digest_of
from capt.pretrain.retrieval.quantize import Ranges, bits_of, signs_of

DType = Literal["fp32", "fp16", "int8", "binary"]
FLOATS: tuple[DType, ...] = ("fp32", "fp16")
DTYPES: tuple[DType, ...] = (*FLOATS, "int8", "binary")
_TYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype("<f4"), "fp16": np.dtype("<f2"), "int8": np.dtype("i1"), "binary": np.dtype("u1"),
}  # fmt: skip
ID = np.dtype([("text", "V16"), ("check", "<u4")])
"""The record of a text beside its vector: its hash, and the CRC-32 of the vector."""
IDENTITY = "identity.json"
ENCODER = "encoder.json"
"""The file that says how vectors were made, for messages with the command that adds to them."""
RANGES = "ranges.json"
_SEGMENT_BYTES = 1 << 30
_BLOCK = 1 << 14
"""Rows that one rank compares with their checksums at a time."""
_ROW_BITS = 40
"""Bits of the place of a vector that are its row in a segment; the others are the number of that."""
_FORGOTTEN = bytes(16)
"""The id of a vector that was damaged."""


@dataclass(frozen=True)
class VectorIdentity:
    """Everything beside the text that decides a vector.

    Attributes:
        model: hash of weights and configuration.
        tokenizer: hash of the files of the tokenizer.
        prompt: what precedes every text, and the role of the text where the model has a path for each role.
        length: tokens of a text at most.
        pooling: how a vector is made of hidden states.
        dimension: numbers of a vector.
        precision: what the model computes in.
        dtype: what the store keeps.
    """

    model: str
    tokenizer: str
    prompt: str
    length: int
    pooling: str
    dimension: int
    precision: str = "fp32"
    dtype: DType = "fp32"

    @property
    def key(self) -> str:
        """The name of the folder of these vectors: 32 hexadecimal digits of a SHA-256."""
        return digest_of(asdict(self))

    @property
    def columns(self) -> int:
        """Stored numbers of a vector: a byte holds eight bits."""
        return (self.dimension + 7) // 8 if self.dtype == "binary" else self.dimension


Pair = tuple[str, str]
"""A query and a document."""


class Vectors(ABC):
    """The vectors of one identity. Several processes may add to it; `reload` shows what the others have added."""

    folder: Path | str
    """The place of the vectors: a folder, or an address in a store."""

    def __init__(self, identity: VectorIdentity) -> None:
        self.identity = identity
        self.added = 0
        """Vectors that this process has written."""
        self.ranges: Ranges | None = None
        """The ranges of vectors in int8; None: nothing is stored yet."""
        self.outside = 0
        """Numbers of added vectors that lie outside of the ranges."""
        self._type = _TYPES[identity.dtype]
        self._checks: list[np.ndarray] = []
        self._names: list[bytes] = []
        self._places: dict[bytes, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, text: bytes) -> bool:
        return text in self._places

    @abstractmethod
    def reload(self) -> None:
        """Find what all processes have written so far. Raises ``DataError``: a file is not one of a store."""

    @abstractmethod
    def repair(self, rank: int = 0, world: int = 1) -> int:
        """Compare stored vectors with their checksums, and forget those that are damaged; returns their number.

        A rank looks at its share of the blocks. The text of a forgotten vector is encoded again. What another process
        has forgotten is known after `reread`.
        """

    @abstractmethod
    def add(self, texts: Sequence[bytes], rows: Float[np.ndarray, "n d"]) -> None:
        """Append the vectors of a batch.

        Raises:
            DataError: a vector is not finite, or too large for fp16; or the store cannot be written.
        """

    @abstractmethod
    def calibrate(self, ranges: Ranges) -> None:
        """Write the ranges of int8 down, unless there are some: these count. Raises ``DataError``."""

    @abstractmethod
    def close(self) -> None:
        """Make durable what was added; the next vectors begin a segment. Raises ``DataError``."""

    @abstractmethod
    def _mapped(self, segment: int) -> AbstractContextManager[np.ndarray]:
        """The rows of a segment, as long as they are read."""

    @abstractmethod
    def _damaged(self, segment: int, row: int) -> str:
        """The message about a row that does not have its checksum."""

    @abstractmethod
    def note(self, encoder: Mapping[str, Any]) -> None:
        """Write down how the vectors were made, for `noted`, on one rank. Raises ``DataError``."""

    @abstractmethod
    def noted(self) -> dict[str, Any]:
        """Return what `note` has written: the model as it was named, the role and the options; empty without it."""

    def finish(self, added: int) -> None:  # noqa: B027  a folder needs nothing
        """Write down what is there, on one rank after all have closed; ``added`` is what they have added.

        Raises ``DataError``.
        """

    def reread(self) -> None:
        """Find everything anew."""
        self._checks, self._names, self._places = [], [], {}
        self.reload()

    def vectors(self, texts: Sequence[bytes]) -> Float[np.ndarray, "n d"]:
        """The vectors of texts by their hashes, in fp32; of bits 1 and -1, of int8 the middle of each step.

        Raises:
            DataError: a vector is damaged, or not there.
        """
        places = self.find(texts)
        if (places < 0).any():
            raise DataError(f"{self.folder}: the vector of a text is missing: start the command again")
        return self.at(places)

    def find(self, texts: Iterable[bytes]) -> Int64[np.ndarray, " n"]:
        """The place of the vector of each text by its hash, as `at` takes it; -1 where there is none."""
        found = (self._places.get(text) for text in texts)
        return np.array([-1 if place is None else place[0] << _ROW_BITS | place[1] for place in found], dtype=np.int64)

    def at(self, places: Int64[np.ndarray, " n"]) -> Float[np.ndarray, "n d"]:
        """The vectors at the places that `find` gives, as `vectors`. Raises ``DataError`` where one is damaged."""
        stored, dtype = self._stored(places), self.identity.dtype
        if dtype == "binary":
            return signs_of(stored, self.identity.dimension)
        if dtype == "int8" and len(stored):
            self.require_ranges()
            assert self.ranges is not None
            return self.ranges.restored(stored)
        return stored.astype(np.float32, copy=False)

    def require_ranges(self) -> None:
        """Raise ``DataError`` where vectors in int8 have lost their ranges."""
        if len(self) and self.identity.dtype == "int8" and self.ranges is None:
            raise DataError(f"{self.folder}: no {RANGES}, without which its numbers say nothing: remove the folder")

    def _stored(self, places: Int64[np.ndarray, " n"]) -> np.ndarray:
        out = np.empty((len(places), self.identity.columns), dtype=self._type)
        segments, in_segment = places >> _ROW_BITS, places & ((1 << _ROW_BITS) - 1)
        # Grouped by segment, so that each is mapped once.
        for segment in np.unique(segments).tolist():
            checks = self._checks[segment]
            with self._mapped(segment) as rows:
                for position in np.flatnonzero(segments == segment).tolist():
                    row = int(in_segment[position])
                    found = rows[row]
                    # The checksum on every read: a damaged vector would give wrong neighbours without a word.
                    if zlib.crc32(found.tobytes()) != checks[row]:
                        raise DataError(self._damaged(segment, row))
                    out[position] = found
        return out

    def _index(self, ids: np.ndarray, rows: Iterable[int]) -> None:
        """Take up a further segment, of which ``rows`` count."""
        segment, names = len(self._names), ids["text"].tobytes()
        self._checks.append(ids["check"])
        self._names.append(names)
        for row in rows:
            name = names[16 * row : 16 * row + 16]
            if name != _FORGOTTEN:
                # The first one of a text that is there twice stays.
                self._places.setdefault(name, (segment, row))

    def _packed(self, texts: Sequence[bytes], rows: Float[np.ndarray, "n d"]) -> tuple[np.ndarray, np.ndarray]:
        """The vectors of a batch as they are stored, and their ids."""
        dtype = self.identity.dtype
        if rows.shape != (len(texts), self.identity.dimension):
            raise AssertionError(f"vectors of shape {rows.shape} for {len(texts)} texts")
        # A number too large for fp16 becomes infinite, and is named below.
        with np.errstate(over="ignore"):
            kept = np.ascontiguousarray(rows, dtype=self._type if dtype in FLOATS else np.float32)
        if not np.isfinite(kept).all():
            what = "use --dtype fp32" if np.isfinite(rows).all() else "its weights or its precision are at fault"
            raise DataError(f"the model gives numbers that {dtype} cannot hold: {what}")
        if dtype == "binary":
            kept = bits_of(kept)
        elif dtype == "int8":
            assert self.ranges is not None, "`embed` calibrates before it adds"
            self.outside += self.ranges.outside(kept)
            kept = self.ranges.codes(kept)
        ids = np.empty(len(texts), dtype=ID)
        ids["text"] = np.frombuffer(b"".join(texts), dtype="V16")
        ids["check"] = [zlib.crc32(row.tobytes()) for row in kept]
        return kept, ids


class VectorStore(Vectors):
    """The vectors of one identity in a folder. A kill loses nothing of what was added."""

    folder: Path

    def __init__(self, root: Path, identity: VectorIdentity) -> None:
        super().__init__(identity)
        self.folder = root / identity.key
        self._rows: list[np.memmap[Any, np.dtype[Any]]] = []
        self._read: dict[str, int] = {}
        self._writing: tuple[IO[bytes], IO[bytes]] | None = None
        self._written = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        about = self.folder / IDENTITY
        if not about.exists():
            write_json(about, asdict(identity))
        self._find_ranges()
        self.reload()

    def _find_ranges(self) -> None:
        path = self.folder / RANGES
        if self.identity.dtype == "int8" and path.is_file():
            self.ranges = Ranges.read(read_json(path), self.identity.dimension, path)

    def calibrate(self, ranges: Ranges) -> None:
        """Write the ranges down, unless there are some. Raises ``DataError``."""
        path = self.folder / RANGES
        if not path.exists():
            # A link is made where there is none yet: of two processes that begin in the same moment one writes.
            own = path.with_name(f".{RANGES}.{secrets.token_hex(8)}")
            write_json(own, ranges.record())
            try:
                with suppress(FileExistsError):
                    os.link(own, path)
            finally:
                own.unlink()
        self._find_ranges()

    def reload(self) -> None:
        """Map what all processes have written so far. Raises ``DataError``: a file is not one of a store."""
        width = self.identity.columns * self._type.itemsize
        for path in sorted(self.folder.glob("*.ids")):
            rows = path.with_suffix(".rows")
            if not rows.is_file():
                raise DataError(f"{rows} is missing: remove {path}, its texts are encoded again")
            # Another process may be at work: of ids and rows, what both files have is whole.
            count = min(path.stat().st_size // ID.itemsize, rows.stat().st_size // width)
            before = self._read.get(path.name, 0)
            if count <= before:
                continue
            ids = np.fromfile(path, dtype=ID, count=count)
            mapped = np.memmap(rows, dtype=self._type, mode="r", shape=(count, self.identity.columns))
            self._rows.append(mapped)
            # After a loss of power the end of a file may be zeros: its texts are encoded again.
            while count > before and zlib.crc32(mapped[count - 1].tobytes()) != ids["check"][count - 1]:
                count -= 1
            self._index(ids, range(before, count))
            self._read[path.name] = count

    def repair(self, rank: int = 0, world: int = 1) -> int:
        """Forget damaged vectors: their ids become zeros. Returns their number."""
        damaged = 0
        blocks = [(number, start) for number, rows in enumerate(self._rows) for start in range(0, len(rows), _BLOCK)]
        for number, start in blocks[rank::world]:
            block = np.asarray(self._rows[number][start : start + _BLOCK])
            checks = self._checks[number][start : start + _BLOCK].tolist()
            wrong = [start + i for i, row in enumerate(block) if zlib.crc32(row.data) != checks[i]]
            wrong = [row for row in wrong if self._names[number][16 * row : 16 * row + 16] != _FORGOTTEN]
            if wrong:
                self._forget(number, wrong)
            damaged += len(wrong)
        return damaged

    def _forget(self, number: int, rows: Sequence[int]) -> None:
        path = Path(str(self._rows[number].filename)).with_suffix(".ids")
        with path.open("r+b") as file:
            for row in rows:
                file.seek(row * ID.itemsize)
                file.write(_FORGOTTEN)
        sync(path)

    def reread(self) -> None:
        """Map all files anew."""
        self._rows, self._read = [], {}
        super().reread()

    def add(self, texts: Sequence[bytes], rows: Float[np.ndarray, "n d"]) -> None:
        """Append the vectors of a batch, which a kill from now on does not lose. Raises ``DataError``."""
        kept, ids = self._packed(texts, rows)
        if self._writing is None:
            name = f"segment-{secrets.token_hex(8)}"
            self._writing = (
                # x: a segment has one writer, whatever other processes do.
                (self.folder / f"{name}.rows").open("xb", buffering=0),
                (self.folder / f"{name}.ids").open("xb", buffering=0),
            )
        for file, content in zip(self._writing, (kept, ids), strict=True):
            _write_all(file, content.tobytes())
        self.added += len(texts)
        self._written += kept.nbytes
        if self._written > _SEGMENT_BYTES:
            self.close()

    def close(self) -> None:
        """Make durable what was added; the next vectors begin a segment."""
        for file in self._writing or ():
            file.close()
            sync(Path(file.name))
        self._writing, self._written = None, 0

    def note(self, encoder: Mapping[str, Any]) -> None:
        """Write ``encoder.json``."""
        write_json(self.folder / ENCODER, dict(encoder))

    def noted(self) -> dict[str, Any]:
        """Read ``encoder.json``."""
        path = self.folder / ENCODER
        found: dict[str, Any] = read_json(path) if path.is_file() else {}
        return found

    @contextmanager
    def _mapped(self, segment: int) -> Iterator[np.ndarray]:
        yield self._rows[segment]

    def _damaged(self, segment: int, row: int) -> str:
        return (
            f"{self._rows[segment].filename} was damaged while it was read (row {row}): start the command again, "
            "which encodes it"
        )


def _write_all(file: IO[bytes], content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def require_dtype(name: str, known: Sequence[DType] = FLOATS) -> DType:
    """Return the type of stored numbers called ``name``, one of ``known``. Raises ``ConfigError``."""
    for each in known:
        if each == name:
            return each
    raise ConfigError(f"dtype {name!r}: choose {', '.join(known[:-1])} or {known[-1]}")


def digest(parts: Iterable[tuple[str, str]]) -> str:
    """Return a SHA-256 of names and hashes of files, in the order of the names."""
    return hashlib.sha256(json.dumps(sorted(parts)).encode()).hexdigest()

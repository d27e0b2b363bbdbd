"""The files of the ledger, of which every rank writes one in every launch, and their reader.

``RUN/ledger/launch-0003/rank-00001.ledger`` is a line of JSON (`Header`) and 20 bytes for every step (`ROW`): its
number, how many rows this rank was fed, the digests of their ids and of their contents. A killed process may leave half
a row at the end, and a host that loses power rows of zeros; neither is a row.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import numpy as np
from jaxtyping import Int64, UInt64
from pydantic import Field, model_validator

from capt.pretrain.base.atomic import sync
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import open_regular
from capt.pretrain.base.randomness import GOLDEN, UInt64Array, mix64, unmix64
from capt.pretrain.base.records import Count, Record, parse_record
from capt.pretrain.config.ramp import BatchSizeSchedule
from capt.pretrain.data.mixture import MixtureSampler
from capt.pretrain.data.sampler import BlockMixtureSampler, GroupedSampler, Sampler
from capt.pretrain.engine.durable import GrowingFile

# Digests of the rows of a step that do not depend on how ranks and micro-batches share them.
#
# The digest of a set of rows is the sum modulo 2^64 of a hash of each, so the digests of parts add up to that of the
# whole. The hash of an id is a bijection of 64 bits: where one id is missing, one too many, or in the place of
# another, the difference of two digests tells which (`find_exchange`).


Ids = Int64[np.ndarray, "..."]


def hash_ids(ids: Ids) -> UInt64Array:
    """The hash of each id."""
    return mix64(np.asarray(ids).astype(np.uint64) + GOLDEN)


def digest_ids(ids: Ids) -> int:
    """``sum_i hash(ids_i) mod 2^64``: the same for the same ids in any order; an id that comes twice counts twice."""
    return int(hash_ids(ids).sum(dtype=np.uint64))


def digest_contents(ids: Ids, arrays: Sequence[np.ndarray]) -> int:
    """A digest, modulo 2^32, of rows: of each its id and its row of each array, whose values are compared bit by bit.

    A row of an array enters by a linear hash with random odd factors, which a change of one element always changes.
    """
    rows = hash_ids(ids)
    for number, array in enumerate(arrays):
        bits = _bits(array.reshape(len(rows), -1))
        rows = mix64(rows ^ (bits @ _factors(number, bits.shape[1])))
    return int(rows.sum(dtype=np.uint64)) & 0xFFFFFFFF


def _bits(array: np.ndarray) -> UInt64[np.ndarray, "n k"]:
    if array.dtype.kind == "f":
        array = array.view(f"u{array.dtype.itemsize}")
    return array.astype(np.uint64)


@lru_cache(maxsize=64)
def _factors(number: int, width: int) -> UInt64[np.ndarray, " k"]:
    # Places in another array are 2^40 further, so that no two share a factor.
    places = np.arange(width, dtype=np.uint64) + np.uint64(number << 40)
    return mix64(places * GOLDEN + GOLDEN) | np.uint64(1)


def find_exchange(
    planned: Int64[np.ndarray, " n"], rows: int, digest: int, samples: int
) -> tuple[int | None, int | None] | None:
    """Find the id of ``0 .. samples - 1`` that was used though not ``planned``, and the planned one that was not.

    ``rows`` ids of this ``digest`` were used. Either is None where an id was only added or only left out. None is
    returned where more ids differ than one, which cannot be told from digests.
    """
    difference = np.uint64((digest - digest_ids(planned)) % (1 << 64))
    hashes = hash_ids(planned)
    # One too few: the digest lacks the hash of the lost id.
    if rows == len(planned) - 1:
        lost = np.flatnonzero(hashes + difference == 0)
        return (None, int(planned[lost[0]])) if len(lost) else None
    # One too many: the difference is the hash of the added id.
    if rows == len(planned) + 1:
        hashes = np.zeros(1, dtype=np.uint64)
    elif rows != len(planned):
        return None
    # For each planned id, the one whose hash in its place makes the difference; few of them are ids at all.
    candidates = unmix64(hashes + difference) - GOLDEN
    found = np.flatnonzero(candidates < samples)
    if not len(found) or (rows == len(planned) and difference == 0):
        return None
    used = int(candidates[found[0]])
    return used, (int(planned[found[0]]) if rows == len(planned) else None)


LEDGER = "ledger"
ROW = np.dtype([("step", "<u4"), ("rows", "<u4"), ("ids", "<u8"), ("contents", "<u4")])
"""A step of a rank: its number (the first of a run is 1), rows, `digest_ids` and `digest_contents`."""
_PACKED = struct.Struct("<IIQI")
_UNLEARNT = 1 << 31
"""Bit of ``rows`` that marks a step whose update was left out."""
_LAUNCH = re.compile(r"launch-(\d{4,9})", re.ASCII)
_RANK = re.compile(r"rank-(\d{5,9})\.ledger", re.ASCII)
_LONGEST_HEADER = 1 << 16
_LARGEST = 1 << 33
_AT_ONCE = ROW.itemsize << 12


class Order(Record):
    """`capt.pretrain.engine.task.SampleOrder`, written down."""

    samples: int = Field(ge=1, le=1 << 40)
    seed: Count
    data: str = Field(max_length=1000)
    noise: str = Field(max_length=1000)
    shuffle: bool
    sizes: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    weights: Annotated[tuple[float, ...], Field(strict=False)] = ()
    block: Count = 0
    mixed: bool = False
    at_once: Count = 0
    names: Annotated[tuple[str, ...], Field(strict=False)] = ()
    course: Annotated[tuple[Annotated[tuple[float, ...], Field(strict=False)], ...], Field(strict=False)] = ()
    limits: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    blocks: Annotated[tuple[Count, ...], Field(strict=False)] = ()

    def sampler(self) -> Sampler | BlockMixtureSampler | GroupedSampler | MixtureSampler:
        """Return the sampler that says where each sample lies."""
        if self.course:
            return MixtureSampler(
                self.names, self.sizes, self.course, self.limits, self.seed, self.blocks, self.at_once
            )
        if self.at_once:
            return GroupedSampler(self.samples, self.block, self.at_once, self.seed)
        if self.sizes:
            return BlockMixtureSampler(self.sizes, self.weights, self.block, self.seed, self.mixed)
        return Sampler(self.samples, self.seed, self.shuffle)

    def past_epochs(self, samples: int) -> list[str]:
        """The sources of a mixture of which the first ``samples`` hold more than their epochs."""
        sampler = self.sampler()
        return sampler.past_epochs(samples) if isinstance(sampler, MixtureSampler) else []


_Stage = Annotated[tuple[Count, Annotated[int, Field(ge=1, le=1 << 31)]], Field(strict=False)]


class Header(Record):
    """The first line of a file: the launch, and where it begins (``step`` steps and ``samples`` samples are done)."""

    format: Literal[1] = 1
    rank: Count
    world: int = Field(ge=1, le=10_000_000)
    step: int = Field(ge=0, lt=1 << 32)
    samples: Count
    batch: int = Field(ge=1, le=1 << 31)
    """Samples of a step, over all ranks."""
    ramp: Annotated[tuple[_Stage, ...], Field(strict=False)] = ()
    """The schedule of the samples of a step with ``batch.ramp``: (steps done, samples of a step from there on)."""
    left_out: Count = 0
    """Samples before ``samples`` that the run leaves out (``guard.spike=rollback``)."""
    order: Order
    checkpoint: str | None = Field(None, max_length=10_000)
    """Checkpoint from which the launch was resumed."""

    @model_validator(mode="after")
    def _ramp_goes_forward(self) -> Header:
        steps = [step for step, _ in self.ramp]
        if steps and (steps[0] or any(a >= b for a, b in pairwise(steps))):
            raise ValueError("the steps of a ramp begin at 0 and grow")
        return self

    @cached_property
    def batch_sizes(self) -> BatchSizeSchedule:
        """Number of samples of each step."""
        return BatchSizeSchedule.of_steps(self.ramp or [(0, self.batch)])


@dataclass(frozen=True)
class LedgerHead:
    """The beginning of one rank's file in a launch; without a header it was killed before its first step."""

    path: Path
    header: Header | None
    has_rows: bool


@dataclass(frozen=True)
class LedgerFile:
    """Rows that one rank has written in a launch."""

    path: Path
    header: Header
    rows: np.ndarray
    unlearnt: np.ndarray
    """Marks of the rows whose step's update was left out (``guard.spike=skip``)."""


def launches_of(run: Path) -> list[tuple[int, Path]]:
    """The launches of a run that have a ledger: numbers, from 1 on, and folders."""
    folder = run / LEDGER
    names = list(folder.iterdir()) if folder.is_dir() else []
    return sorted((int(match[1]), path) for path in names if (match := _LAUNCH.fullmatch(path.name)))


def new_launch(run: Path) -> int:
    """Make the folder of a new launch and return its number. Raises ``OSError``."""
    number = max((number for number, _ in launches_of(run)), default=0) + 1
    folder = launch_folder(run, number)
    folder.mkdir(parents=True)
    sync(folder.parent)
    return number


def launch_folder(run: Path, number: int) -> Path:
    """The folder of a launch."""
    return run / LEDGER / f"launch-{number:04d}"


class LedgerWriter:
    """Appends a row for every step. What cannot be written (a full disk) is kept and tried again with the next row."""

    def __init__(self, folder: Path, header: Header) -> None:
        self._file = GrowingFile(folder / f"rank-{header.rank:05d}.ledger")
        self._file.append(header.model_dump_json().encode() + b"\n")
        sync(folder)

    def append(self, step: int, rows: int, ids: int, contents: int, *, learnt: bool = True) -> None:
        """Add a step, which the model has ``learnt`` from or not. Raises ``OSError``: it cannot be written now.

        It is not lost then.
        """
        self._file.append(_PACKED.pack(step, rows if learnt else rows | _UNLEARNT, ids, contents))

    def sync(self) -> None:
        """Make all steps durable, before a checkpoint that contains them is. Raises ``CheckpointError``."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_heads(folder: Path) -> list[LedgerHead]:
    """The beginnings of the files of a launch, by rank. Raises ``DataError``: one is damaged, or not a ledger's."""
    return [_read_head(path, rank) for rank, path in _files(folder)]


def read_launch(folder: Path) -> Iterator[LedgerFile]:
    """The files of a launch that have a header, by rank, one at a time: of a thousand ranks all are gigabytes.

    Raises:
        DataError: a file is damaged, or is not a ledger's.
    """
    return (file for rank, path in _files(folder) if (file := _read_file(path, rank)) is not None)


def _files(folder: Path) -> list[tuple[int, Path]]:
    return sorted((int(match[1]), path) for path in folder.iterdir() if (match := _RANK.fullmatch(path.name)))


def _read_head(path: Path, rank: int) -> LedgerHead:
    with open_regular(path) as file:
        header = _header(file, path, rank)
        while header is not None and (some := _rows(file.read(_AT_ONCE))).size:
            if some["step"].any():
                return LedgerHead(path, header, has_rows=True)
    return LedgerHead(path, header, has_rows=False)


def _read_file(path: Path, rank: int) -> LedgerFile | None:
    with open_regular(path) as file:
        if (header := _header(file, path, rank)) is None:
            return None
        rows = _rows(file.read())
    # Rows of zeros at the end are what a host leaves that loses power.
    written = np.flatnonzero(rows["step"])
    rows = (rows[: written[-1] + 1] if len(written) else rows[:0]).copy()
    unlearnt = rows["rows"] >= _UNLEARNT
    rows["rows"] &= np.uint32(_UNLEARNT - 1)
    return LedgerFile(path, header, rows, unlearnt)


def _rows(content: bytes) -> np.ndarray:
    return np.frombuffer(content[: len(content) // ROW.itemsize * ROW.itemsize], dtype=ROW)


def _header(file: BinaryIO, path: Path, rank: int) -> Header | None:
    """The header, at the beginning of an open file; None where there is only a part of one."""
    if os.fstat(file.fileno()).st_size > _LARGEST:
        raise DataError(f"{path}: over {_LARGEST:,} bytes: not a ledger")
    line = file.readline(_LONGEST_HEADER)
    if not line.endswith(b"\n"):
        if len(line) == _LONGEST_HEADER:
            raise DataError(f"{path}: the first line is not a header of a ledger")
        return None
    try:
        content_of_line = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{path}: the first line is not a header of a ledger") from None
    header = parse_record(Header, content_of_line, path, error=DataError)
    if header.rank != rank:
        raise DataError(f"{path}: its header names rank {header.rank}")
    return header

"""Which file of a checkpoint holds which elements of which tensor, checked against the manifest before any is read."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pretrain.base import distributed
from pretrain.base.errors import CheckpointError
from pretrain.engine.checkpoint.fragments import WEIGHT
from pretrain.engine.checkpoint.manifest import Manifest
from pretrain.engine.optim.average import AVERAGE
from pretrain.engine.optim.build import STATE_TENSORS

_KINDS = (WEIGHT, AVERAGE, *sorted({kind for kinds in STATE_TENSORS.values() for kind in kinds}))
_KEY = re.compile(rf"({'|'.join(_KINDS)})/(.+)@(\d{{1,18}})", re.ASCII | re.DOTALL)


_AT_ONCE = 1 << 24
"""Elements (64 MiB) read in one call. Files are then closed, so that fewer than twice this number are mapped."""


@dataclass(frozen=True, order=True)
class Piece:
    """Elements ``start : end`` of a flattened tensor, under ``key`` in the file ``name``."""

    start: int
    end: int
    name: str
    key: str


class Index:
    """Where every stored range of a module's tensors lies. Made by :func:`read_index`."""

    def __init__(self, checkpoint: Path, pieces: Mapping[tuple[str, str], list[Piece]]) -> None:
        self.checkpoint = checkpoint
        self._pieces = pieces

    def kinds(self) -> set[str]:
        """``weight``, and the names of the optimizer's tensors that are stored."""
        return {kind for kind, _ in self._pieces}

    def updated(self) -> set[str]:
        """Names of the parameters for which the optimizer's state is stored: those that have ever had a gradient."""
        return {name for kind, name in self._pieces if kind != WEIGHT}

    def require(self, kind: str, name: str, numel: int) -> None:
        """Raise ``CheckpointError`` unless all ``numel`` elements of a tensor are stored."""
        self._covering(kind, name, 0, numel)

    def _covering(self, kind: str, name: str, start: int, end: int) -> list[Piece]:
        """Return the pieces that hold ``start : end``, in order (there are no overlaps)."""
        found = [p for p in self._pieces.get((kind, name), []) if p.start < end and p.end > start]
        done = start
        for piece in found:
            if piece.start > done:
                break
            done = piece.end
        if done < end:
            raise CheckpointError(f"{self.checkpoint}: holds no element {done} of {kind} {name!a}")
        return found

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Read tensors; a file is opened when the first of its elements is asked for."""
        with ExitStack() as stack:
            yield Reader(self, stack)


class Reader:
    """Fills any element range of any stored tensor from the fragments that hold it.

    Files are mapped, and pages once read are memory of this process until their file is closed. So all files are closed
    whenever `_AT_ONCE` elements have been read.
    """

    def __init__(self, index: Index, stack: ExitStack) -> None:
        self._index = index
        self._stack = stack
        self._open: dict[str, Any] = {}
        self._mapped = 0

    def fill(self, kind: str, name: str, start: int, out: Tensor) -> None:
        """Copy elements ``start : start + len(out)`` of the flattened tensor into ``out``.

        Raises:
            CheckpointError: the checkpoint does not hold them all.
        """
        end = start + out.numel()
        for piece in self._index._covering(kind, name, start, end):
            first, last = max(start, piece.start), min(end, piece.end)
            for low in range(first, last, _AT_ONCE):
                high = min(low + _AT_ONCE, last)
                stored = self._file(piece.name).get_slice(piece.key)[low - piece.start : high - piece.start]
                out[low - start : high - start].copy_(stored)
                del stored  # which would keep its file mapped
                self._mapped += high - low
                if self._mapped >= _AT_ONCE:
                    self._close()

    def _close(self) -> None:
        self._stack.close()
        self._open.clear()
        self._mapped = 0

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(_opened(self._index.checkpoint / name))
        return self._open[name]


def read_index(checkpoint: Path, manifest: Manifest, module: str, parts: tuple[str, ...]) -> Index:
    """Read the index of a module's ``weights``, ``optimizer`` files, or both, from the heads of all those files.

    Raises:
        CheckpointError: a file is damaged, or its tensors are not those of the manifest.
    """
    return _join(checkpoint, manifest, module, [_pieces(checkpoint, name) for name in _names(manifest, module, parts)])


def read_index_together(checkpoint: Path, manifest: Manifest, module: str, parts: tuple[str, ...]) -> Index:
    """Do `read_index` on all ranks, each head read by one of them. Collective."""
    mine = _names(manifest, module, parts)[distributed.rank() :: distributed.world_size()]
    with distributed.synchronize_errors():
        found = [_pieces(checkpoint, name) for name in mine]
    told = [[(kind, name, astuple(piece)) for kind, name, piece in part] for part in found]
    parts_of_all = [
        [(kind, name, Piece(*piece)) for kind, name, piece in part]
        for each in distributed.gather_objects(told)
        for part in each
    ]
    with distributed.synchronize_errors():
        return _join(checkpoint, manifest, module, parts_of_all)


def _names(manifest: Manifest, module: str, parts: tuple[str, ...]) -> list[str]:
    pattern = re.compile(rf"{re.escape(module)}-({'|'.join(parts)})-\d{{5,}}-of-\d{{5,}}\.safetensors", re.ASCII)
    return sorted(name for name in manifest.files if pattern.fullmatch(name))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged: {' '.join(str(error).split())[:300]}") from None


def _pieces(checkpoint: Path, name: str) -> list[tuple[str, str, Piece]]:
    """Yield what the head of a file says: kind, tensor, piece."""
    found = []
    with _opened(checkpoint / name) as file:
        for key in file.keys():  # noqa: SIM118 (a safetensors handle is no dict)
            match, part = _KEY.fullmatch(key), file.get_slice(key)
            shape, dtype = part.get_shape(), part.get_dtype()
            if match is None or len(shape) != 1 or dtype != "F32":
                raise CheckpointError(
                    f"{checkpoint / name}: {ascii(key)[:200]} is {dtype} of shape {shape}; "
                    "a checkpoint holds flat F32 under KIND/PARAMETER@START"
                )
            kind, parameter, start = match.groups()
            found.append((kind, parameter, Piece(int(start), int(start) + shape[0], name, key)))
    return found


def _join(checkpoint: Path, manifest: Manifest, module: str, heads: list[list[tuple[str, str, Piece]]]) -> Index:
    shapes = manifest.modules[module].shapes
    pieces: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    for kind, parameter, piece in (entry for head in heads for entry in head):
        where = f"{checkpoint / piece.name}: {ascii(piece.key)[:200]}"
        if parameter not in shapes:
            raise CheckpointError(f"{where}: the manifest has no such parameter")
        if piece.end > math.prod(shapes[parameter]):
            raise CheckpointError(f"{where}: ends at {piece.end}, the parameter has shape {shapes[parameter]}")
        if piece.end > piece.start:
            pieces[kind, parameter].append(piece)
    for each in pieces.values():
        each.sort()
        for before, after in itertools.pairwise(each):
            if after.start < before.end:
                raise CheckpointError(
                    f"{checkpoint}: {before.name} and {after.name} both hold {ascii(after.key)[:200]}"
                )
    return Index(checkpoint, pieces)

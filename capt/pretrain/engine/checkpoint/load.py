"""Reads checkpoints: whole tensors for conversion, fragments for a resumed run; only ranks that need a byte read it.

Each rank reads the elements of its own fragments, from the files that hold them. What every rank needs whole (the
module's weights; at ZeRO 0 the moments, too) rank 0 reads and sends to the others. Of a module whose rows are shared
out over the ranks each rank reads its own, weights and moments.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.engine.checkpoint.fragments import (
    WEIGHT,
    Fragment,
    allocate_optimizer_state,
    fragments,
    set_optimizer_step_count,
)
from capt.pretrain.engine.checkpoint.layout import EngineState, Manifest, ModuleRecord, read_manifest
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.engines.places import first_element, global_shape, is_row_sharded
from capt.pretrain.engine.optim.build import STATE_TENSORS
from capt.pretrain.engine.optim.optimizers import AVERAGE

# Which file of a checkpoint holds which elements of which tensor, checked against the manifest before any is read.


_KINDS = (WEIGHT, AVERAGE, *sorted({kind for kinds in STATE_TENSORS.values() for kind in kinds}))
_KEY = re.compile(rf"({'|'.join(_KINDS)})/(.+)@(\d{{1,18}})", re.ASCII | re.DOTALL)


_AT_ONCE = 1 << 24
"""Elements (64 MiB) read in one call. Files are then closed, so that fewer than twice this number are mapped."""


@dataclass(frozen=True, order=True)
class TensorPiece:
    """Elements ``start : end`` of a flattened tensor, under ``key`` in the file ``name``."""

    start: int
    end: int
    name: str
    key: str


class Index:
    """Places of every stored range of a module's tensors. Made by :func:`read_index`."""

    def __init__(self, checkpoint: Path, pieces: Mapping[tuple[str, str], list[TensorPiece]]) -> None:
        self.checkpoint = checkpoint
        self._pieces = pieces

    def kinds(self) -> set[str]:
        """``weight``, and the names of the optimizer's tensors that are stored."""
        return {kind for kind, _ in self._pieces}

    def updated(self) -> set[str]:
        """Names of the parameters for which the optimizer's state is stored: those that have ever had a gradient."""
        return {name for kind, name in self._pieces if kind != WEIGHT}

    def has(self, kind: str, name: str) -> bool:
        """Return whether anything is stored of a tensor."""
        return (kind, name) in self._pieces

    def require(self, kind: str, name: str, numel: int) -> None:
        """Raise ``CheckpointError`` unless all ``numel`` elements of a tensor are stored."""
        self._covering(kind, name, 0, numel)

    def _covering(self, kind: str, name: str, start: int, end: int) -> list[TensorPiece]:
        """Return the pieces that hold ``start : end``, in order (there are no overlaps)."""
        found = [p for p in self._pieces.get((kind, name), []) if p.start < end and p.end > start]
        done = start
        for piece in found:
            # A gap, which no later piece fills.
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
    # Plain tuples, because ranks tell each other JSON.
    sent = [[(kind, name, astuple(piece)) for kind, name, piece in part] for part in found]
    parts_of_all = [
        [(kind, name, TensorPiece(*piece)) for kind, name, piece in part]
        for each in distributed.gather_objects(sent)
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


def _pieces(checkpoint: Path, name: str) -> list[tuple[str, str, TensorPiece]]:
    """Yield what the head of a file says: kind, tensor, piece."""
    found = []
    with _opened(checkpoint / name) as file:
        for key in file.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
            match, part = _KEY.fullmatch(key), file.get_slice(key)
            shape, dtype = part.get_shape(), part.get_dtype()
            if match is None or len(shape) != 1 or dtype != "F32":
                raise CheckpointError(
                    f"{checkpoint / name}: {ascii(key)[:200]} is {dtype} of shape {shape}; "
                    "a checkpoint holds flat F32 under KIND/PARAMETER@START"
                )
            kind, parameter, start = match.groups()
            found.append((kind, parameter, TensorPiece(int(start), int(start) + shape[0], name, key)))
    return found


def _join(checkpoint: Path, manifest: Manifest, module: str, heads: list[list[tuple[str, str, TensorPiece]]]) -> Index:
    shapes = manifest.modules[module].shapes
    pieces: dict[tuple[str, str], list[TensorPiece]] = defaultdict(list)
    for kind, parameter, piece in (entry for head in heads for entry in head):
        where = f"{checkpoint / piece.name}: {ascii(piece.key)[:200]}"
        if parameter not in shapes:
            raise CheckpointError(f"{where}: the manifest has no such parameter")
        if piece.end > math.prod(shapes[parameter]):
            raise CheckpointError(f"{where}: ends at {piece.end}, the parameter has shape {shapes[parameter]}")
        # The last ranks may have written a part without elements.
        if piece.end > piece.start:
            pieces[kind, parameter].append(piece)
    for each in pieces.values():
        # By the first element, so that pieces which overlap are neighbours.
        each.sort()
        for before, after in itertools.pairwise(each):
            if after.start < before.end:
                raise CheckpointError(
                    f"{checkpoint}: {before.name} and {after.name} both hold {ascii(after.key)[:200]}"
                )
    return Index(checkpoint, pieces)


M = TypeVar("M", bound=nn.Module)


_OTHER_PARAMETERS = (
    "; set model.*, contrast.weight and contrast.temperature.type as in its config.yaml, or start a new run from it "
    "(model.init)"
)


def read_weights(checkpoint: Path, module: str = "model") -> dict[str, Tensor]:
    """Read all weights of a module of a verified checkpoint as whole fp32 tensors, tied names included.

    Raises:
        CheckpointError: the checkpoint has no such module, or not all of it, or a weight is not finite.
    """
    with stored_weights(checkpoint, module) as (described, read):
        weights = {name: read(name) for name in described.shapes}
    weights.update({alias: weights[name] for alias, name in described.ties.items()})
    return weights


@contextmanager
def stored_weights(
    checkpoint: Path, module: str, *, average: bool = False
) -> Iterator[tuple[ModuleRecord, Callable[[str], Tensor]]]:
    """Yield what a verified checkpoint has of a module, and a function that reads one whole fp32 tensor by its name.

    With ``average`` a weight that the optimizer keeps an average of is that average.

    Raises:
        CheckpointError: as `read_weights`, or no averages are kept.
    """
    described, index = _require_all(checkpoint, module)
    if average:
        index = read_index(checkpoint, read_manifest(checkpoint), module, ("weights", "optimizer"))
        if AVERAGE not in index.kinds():
            raise CheckpointError(f"{checkpoint}: {module} has no averages of its weights (checkpoint.ema)")
    with index.reader() as reader:

        def read(name: str) -> Tensor:
            tensor = torch.empty(described.shapes[name])
            kind = AVERAGE if average and index.has(AVERAGE, name) else WEIGHT
            reader.fill(kind, name, 0, tensor.view(-1))
            _require_finite(checkpoint, [(name, tensor)])
            return tensor

        yield described, read


def _require_finite(checkpoint: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights that are not finite: nothing that is measured or made with them would be."""
    for name, tensor in weights:
        if not tensor.isfinite().all():
            raise CheckpointError(f"{checkpoint}: {name} holds weights that are not finite; name another checkpoint")


def load_module_weights(checkpoint: Path, name: str, module: nn.Module) -> None:
    """Copy a verified checkpoint's weights, or the rows that this rank holds, into a module that no engine has wrapped.

    Raises:
        CheckpointError: the checkpoint is of another architecture; the first differing parameter is named.
    """
    check_architecture(checkpoint, name, module)
    described, index = _require_all(checkpoint, name)
    _fill(module, described, index)


def _fill(module: nn.Module, described: ModuleRecord, index: Index) -> None:
    with index.reader() as reader, torch.no_grad():
        for name, parameter in module.named_parameters():
            # A tied parameter is stored under its first name alone.
            stored = described.ties.get(name, name)
            # A parameter that is not one block of memory has no flat view to fill.
            if parameter.is_contiguous():
                reader.fill(WEIGHT, stored, first_element(parameter), parameter.view(-1))
            else:
                flat = torch.empty(parameter.numel())
                reader.fill(WEIGHT, stored, first_element(parameter), flat)
                parameter.copy_(flat.view(parameter.shape))


class _Undrawn(TorchFunctionMode):
    """Without memory there is nothing to draw; that torch would try takes a second and a half, once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is nn.init.normal_:
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)


def load_module(checkpoint: Path, name: str, build: Callable[[], M]) -> M:
    """Return the module that ``build`` makes, with a verified checkpoint's weights.

    A configuration of a kilobyte can ask for a terabyte. So the module is made without memory first, and made at all
    only when the checkpoint holds every element of it.

    Raises:
        CheckpointError: as `load_module_weights`, or a weight is not finite.
    """
    with torch.device("meta"), _Undrawn():
        check_architecture(checkpoint, name, build())
    _require_all(checkpoint, name)
    module = build()
    load_module_weights(checkpoint, name, module)
    _require_finite(checkpoint, module.named_parameters())
    return module


def load_module_weights_together(checkpoint: Path, name: str, module: nn.Module) -> None:
    """Do `load_module_weights` on all ranks; rank 0 reads, or each rank its own rows. Collective."""
    # Rows of a table: each rank reads its own. The heads of the files are shared out among the ranks.
    if is_row_sharded(module):
        manifest = read_manifest(checkpoint)
        with distributed.synchronize_errors():
            check_architecture(checkpoint, name, module)
        index = read_index_together(checkpoint, manifest, name, ("weights",))
        with distributed.synchronize_errors(patient=True):
            _fill(module, _described(checkpoint, manifest, name), index)
        return
    # Whole on every rank: read once, then sent.
    with distributed.synchronize_errors(patient=True):
        check_architecture(checkpoint, name, module)
        if distributed.rank() == 0:
            load_module_weights(checkpoint, name, module)
    for parameter in module.parameters():
        distributed.broadcast_tensor(parameter.data)


def check_architecture(checkpoint: Path, name: str, module: nn.Module) -> None:
    """Raise ``CheckpointError`` where the manifest's shapes are not the module's; no tensor is read."""
    described = _described(checkpoint, read_manifest(checkpoint), name)
    stored = {**described.shapes, **{alias: described.shapes[first] for alias, first in described.ties.items()}}
    for parameter_name, parameter in module.named_parameters():
        if parameter_name not in stored:
            raise CheckpointError(
                f"{checkpoint}: another architecture: it has no parameter {parameter_name!r}{_OTHER_PARAMETERS}"
            )
        if tuple(stored[parameter_name]) != (shape := global_shape(parameter)):
            raise CheckpointError(
                f"{checkpoint}: another architecture: {parameter_name} has shape "
                f"{tuple(stored[parameter_name])}, the configured model {shape}; "
                "set model.* and tokenizer.* as in its config.yaml"
            )
    surplus = stored.keys() - dict(module.named_parameters(remove_duplicate=False)).keys()
    if surplus:
        raise CheckpointError(
            f"{checkpoint}: another architecture: the configured model has no {min(surplus)!r}{_OTHER_PARAMETERS}"
        )


def load_engine(checkpoint: Path, engine: Engine, state: EngineState) -> None:
    """Fill an engine's master weights, moments, update count and loss scale from a verified checkpoint. Collective.

    ``state`` is what ``begin_save`` stored for this engine. The module must have been given the weights before the
    engine was built (:func:`load_module_weights_together`); the master copies are then made exact here.

    Raises:
        CheckpointError: tensors are missing or damaged.
    """
    manifest = read_manifest(checkpoint)
    shapes = {name: list(global_shape(parameter)) for name, parameter in engine.module.named_parameters()}
    assert shapes == manifest.modules[engine.name].shapes, "load_module_weights has checked the architecture"
    index = read_index_together(checkpoint, manifest, engine.name, ("weights", "optimizer"))
    updated = index.updated()
    same_everywhere = engine.zero_stage == 0 and not is_row_sharded(engine.module)
    # Memory first, then a check of what is stored, then the elements.
    with distributed.synchronize_errors(patient=True):  # files of many gigabytes, at different speeds
        if state.has_moments:
            allocate_optimizer_state(engine, updated)
        other = {fragment.kind for fragment in fragments(engine, whole=True)} - index.kinds()
        if AVERAGE in other:
            raise CheckpointError(
                f"{checkpoint}: {engine.name} has no averages of its weights, for it was trained without "
                "contrast.momentum or checkpoint.ema; set that to null, or start a new run from it (model.init)"
            )
        if other:
            raise CheckpointError(
                f"{checkpoint}: {engine.name} has no optimizer state {', '.join(sorted(other))}, which optimizer.type "
                f"{engine.optimizer_settings.section.type} needs; set optimizer.type as in its config.yaml"
            )
        if distributed.rank() == 0 or not same_everywhere:
            with index.reader() as reader:
                for fragment in _stored(engine, updated):
                    reader.fill(fragment.kind, fragment.name, fragment.start, fragment.view)
    if same_everywhere:
        for fragment in _stored(engine, updated):
            distributed.broadcast_tensor(fragment.view)
    if state.has_moments:
        set_optimizer_step_count(engine, state.optimizer_steps)
    engine.load_loss_scale_state(state.loss_scale)


def _stored(engine: Engine, updated: set[str]) -> Iterator[Fragment]:
    """Yield what a checkpoint fills: all weights, and the optimizer's state of the parameters that it had updated."""
    return (f for f in fragments(engine, whole=True) if f.kind == WEIGHT or f.name in updated)


def _require_all(checkpoint: Path, module: str) -> tuple[ModuleRecord, Index]:
    """Return the manifest's record of a module and where its weights lie, all of them, before memory is asked for."""
    manifest = read_manifest(checkpoint)
    described = _described(checkpoint, manifest, module)
    index = read_index(checkpoint, manifest, module, ("weights",))
    for name, shape in described.shapes.items():
        index.require(WEIGHT, name, math.prod(shape))
    return described, index


def _described(checkpoint: Path, manifest: Manifest, module: str) -> ModuleRecord:
    if module not in manifest.modules:
        raise CheckpointError(f"{checkpoint}: no module {module!r}; it holds {', '.join(manifest.modules)}")
    return manifest.modules[module]

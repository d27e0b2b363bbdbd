"""Reads checkpoints: whole tensors for conversion, fragments for a resumed run; only ranks that need a byte read it.

Each rank reads the elements of its own fragments, from the files that hold them. What every rank needs whole (the
module's weights; at ZeRO 0 the moments, too) rank 0 reads and sends to the others. Of a module whose rows are shared
out over the ranks each rank reads its own, weights and moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pretrain.base import distributed
from pretrain.base.errors import CheckpointError
from pretrain.engine.checkpoint.fragments import (
    WEIGHT,
    Fragment,
    allocate_optimizer_state,
    first_element,
    fragments,
    global_shape,
    set_optimizer_step_count,
    trainable,
)
from pretrain.engine.checkpoint.index import Index, read_index, read_index_together
from pretrain.engine.checkpoint.manifest import EngineState, Manifest, ModuleRecord, read_manifest
from pretrain.engine.engines.base import Engine
from pretrain.engine.optim.average import AVERAGE
from pretrain.engine.row_shard import is_row_sharded

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
    described, index = _require_all(checkpoint, module)
    weights: dict[str, Tensor] = {}
    with index.reader() as reader:
        for name, shape in described.shapes.items():
            weights[name] = torch.empty(shape)
            reader.fill(WEIGHT, name, 0, weights[name].view(-1))
    _require_finite(checkpoint, weights.items())
    weights.update({alias: weights[name] for alias, name in described.ties.items()})
    return weights


def _require_finite(checkpoint: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights that are no numbers: whatever is measured or made with them is none either."""
    for name, tensor in weights:
        if not tensor.isfinite().all():
            raise CheckpointError(f"{checkpoint}: {name} holds weights that are not finite; name another checkpoint")


def restore_weights(checkpoint: Path, name: str, module: nn.Module) -> None:
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
            stored = described.ties.get(name, name)
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


def restored(checkpoint: Path, name: str, build: Callable[[], M]) -> M:
    """Return the module that ``build`` makes, with a verified checkpoint's weights.

    A configuration of a kilobyte can ask for a terabyte. So the module is made without memory first, and made at all
    only when the checkpoint holds every element of it.

    Raises:
        CheckpointError: as `restore_weights`, or a weight is not finite.
    """
    with torch.device("meta"), _Undrawn():
        check_architecture(checkpoint, name, build())
    _require_all(checkpoint, name)
    module = build()
    restore_weights(checkpoint, name, module)
    _require_finite(checkpoint, module.named_parameters())
    return module


def restore_weights_together(checkpoint: Path, name: str, module: nn.Module) -> None:
    """Do `restore_weights` on all ranks; rank 0 reads, or each rank its own rows. Collective."""
    if is_row_sharded(module):
        manifest = read_manifest(checkpoint)
        with distributed.synchronize_errors():
            check_architecture(checkpoint, name, module)
        index = read_index_together(checkpoint, manifest, name, ("weights",))
        with distributed.synchronize_errors(patient=True):
            _fill(module, _described(checkpoint, manifest, name), index)
        return
    with distributed.synchronize_errors(patient=True):
        check_architecture(checkpoint, name, module)
        if distributed.rank() == 0:
            restore_weights(checkpoint, name, module)
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


def restore_engine(checkpoint: Path, engine: Engine, state: EngineState) -> None:
    """Fill an engine's master weights, moments, update count and loss scale from a verified checkpoint. Collective.

    ``state`` is what ``begin_save`` stored for this engine. The module must have been given the weights before the
    engine was built (:func:`restore_weights_together`); the master copies are then made exact here.

    Raises:
        CheckpointError: tensors are missing or damaged.
    """
    manifest = read_manifest(checkpoint)
    shapes = {name: list(global_shape(parameter)) for name, parameter in trainable(engine.module)}
    assert shapes == manifest.modules[engine.name].shapes, "restore_weights has checked the architecture"
    index = read_index_together(checkpoint, manifest, engine.name, ("weights", "optimizer"))
    updated = index.updated()
    same_everywhere = engine.zero_stage == 0 and not is_row_sharded(engine.module)
    with distributed.synchronize_errors(patient=True):  # files of many gigabytes, at different speeds
        if state.has_moments:
            allocate_optimizer_state(engine, updated)
        other = {fragment.kind for fragment in fragments(engine, whole=True)} - index.kinds()
        if AVERAGE in other:
            raise CheckpointError(
                f"{checkpoint}: {engine.name} has no averages of its weights, for it was trained without "
                "contrast.momentum; set contrast.momentum=null, or start a new run from it (model.init)"
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
    """What a checkpoint fills: all weights, and the optimizer's state of the parameters that it had updated."""
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

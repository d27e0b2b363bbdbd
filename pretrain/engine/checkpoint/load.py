"""Reading checkpoints: whole tensors for conversion, fragments for a resumed run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from pretrain.engine.checkpoint.layout import read_manifest
from pretrain.engine.engines import Engine
from pretrain.engine.fragments import (
    WEIGHT,
    create_moments,
    fragments,
    global_shape,
    set_loss_scale_state,
    set_optimizer_step_count,
    trainable,
)
from tokenizer.errors import CheckpointError


class _Reader:
    """Fills any element range of any stored tensor from the fragments that hold it."""

    def __init__(self, files: list[Any]) -> None:
        self._pieces: dict[str, list[tuple[int, int, Any, str]]] = defaultdict(list)
        for file in files:
            for key in file.keys():  # noqa: SIM118 (a safetensors handle is no dict)
                name, _, start = key.rpartition("@")
                numel = file.get_slice(key).get_shape()[0]
                self._pieces[name].append((int(start), numel, file, key))
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece[0])

    def fill(self, kind: str, name: str, start: int, out: Tensor) -> None:
        """Copy elements ``start : start + len(out)`` of the flattened tensor into ``out``."""
        end, done = start + out.numel(), start
        for first, numel, file, key in self._pieces.get(f"{kind}/{name}", []):
            low, high = max(done, first), min(end, first + numel)
            if low < high and low == done:
                out[low - start : high - start].copy_(file.get_slice(key)[low - first : high - first])
                done = high
        if done != end:
            raise CheckpointError(f"the checkpoint holds no element {done} of {kind} {name!r}")


@contextmanager
def _open(checkpoint: Path, module: str, part: str) -> Iterator[_Reader]:
    with ExitStack() as stack:
        paths = sorted(checkpoint.glob(f"{module}-{part}-*-of-*.safetensors"))
        yield _Reader([stack.enter_context(safe_open(path, framework="pt")) for path in paths])


def read_weights(checkpoint: Path, module: str = "model") -> dict[str, Tensor]:
    """All weights of a module as whole fp32 tensors, tied names included, whatever wrote the checkpoint.

    Raises:
        CheckpointError: the checkpoint has no such module, or not all of it.
    """
    manifest = read_manifest(checkpoint)
    if module not in manifest["modules"]:
        raise CheckpointError(f"{checkpoint}: no module {module!r}; it holds {', '.join(manifest['modules'])}")
    described = manifest["modules"][module]
    weights: dict[str, Tensor] = {}
    with _open(checkpoint, module, "weights") as reader:
        for name, shape in described["shapes"].items():
            weights[name] = torch.empty(shape)
            reader.fill(WEIGHT, name, 0, weights[name].view(-1))
    weights.update({alias: weights[name] for alias, name in described["ties"].items()})
    return weights


def restore_weights(checkpoint: Path, name: str, module: nn.Module) -> None:
    """Copy a checkpoint's weights into a module that no engine has wrapped yet.

    Raises:
        CheckpointError: the checkpoint is of another architecture; the first differing parameter is named.
    """
    stored = read_weights(checkpoint, name)
    for parameter_name, parameter in module.named_parameters():
        if parameter_name not in stored:
            raise CheckpointError(f"{checkpoint}: another architecture: it has no parameter {parameter_name!r}")
        if stored[parameter_name].shape != parameter.shape:
            raise CheckpointError(
                f"{checkpoint}: another architecture: {parameter_name} has shape "
                f"{tuple(stored[parameter_name].shape)}, the configured model {tuple(parameter.shape)}"
            )
    surplus = stored.keys() - dict(module.named_parameters(remove_duplicate=False)).keys()
    if surplus:
        raise CheckpointError(f"{checkpoint}: another architecture: the configured model has no {min(surplus)!r}")
    with torch.no_grad():
        for parameter_name, parameter in module.named_parameters():
            parameter.copy_(stored[parameter_name])


def restore_engine(checkpoint: Path, engine: Engine, state: dict[str, Any]) -> None:
    """Fill an engine's master weights, moments, update count and loss scale from a checkpoint.

    ``state`` is what ``begin_save`` stored for this engine. The module must have been given the weights before the
    engine was built (:func:`restore_weights`); the master copies are then made exact here.
    """
    shapes = {name: global_shape(parameter) for name, parameter in trainable(engine.module)}
    stored = {name: tuple(shape) for name, shape in read_manifest(checkpoint)["modules"][engine.name]["shapes"].items()}
    assert shapes == stored, "restore_weights has checked the architecture"
    if state["has_moments"]:
        create_moments(engine)
    with _open(checkpoint, engine.name, "weights") as weights, _open(checkpoint, engine.name, "optimizer") as moments:
        for fragment in fragments(engine, whole=True):
            reader = weights if fragment.kind == WEIGHT else moments
            reader.fill(fragment.kind, fragment.name, fragment.start, fragment.view)
    if state["has_moments"]:
        set_optimizer_step_count(engine, state["optimizer_steps"])
    set_loss_scale_state(engine, state["loss_scale"])

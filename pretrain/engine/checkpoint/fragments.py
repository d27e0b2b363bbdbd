"""Which elements of which parameter this rank holds, whatever the ZeRO stage: the basis of the checkpoint format.

A *fragment* is a run of consecutive elements of one flattened parameter, or of one of its optimizer moments, aliasing
live fp32 storage. Over all ranks the fragments of a parameter cover it exactly once, so that

* saving writes each rank's fragments and needs no communication, and
* loading fills each rank's fragments from whatever fragments a checkpoint holds,

which is why a checkpoint does not remember the world size or the ZeRO stage it was written with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.engine import distributed
from pretrain.engine.engines.deepspeed import Engine

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Fragment:
    """Elements ``start : start + view.numel()`` of the flattened parameter ``name`` (or of its moment ``kind``)."""

    name: str
    kind: str
    start: int
    view: Tensor


@dataclass(frozen=True)
class _Place:
    """Where a rank keeps its part of a parameter: ``flat[offset : offset + numel]`` holds elements from ``start``."""

    name: str
    flat: Tensor
    offset: int
    start: int
    numel: int


def share(numel: int, rank: int, world: int) -> tuple[int, int]:
    """The half-open range of ``numel`` elements that ``rank`` of ``world`` writes where all ranks hold all of them."""
    size = -(-numel // world)
    return min(rank * size, numel), min((rank + 1) * size, numel)


def trainable(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Named parameters, each once (a tied parameter under its first name); ZeRO hangs attributes of its own on them."""
    return ((name, p) for name, p in module.named_parameters() if p.requires_grad)


def global_shape(parameter: Any) -> tuple[int, ...]:
    """The parameter's shape, also when ZeRO 3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _places(engine: Engine) -> Iterator[_Place]:
    zero = engine.zero_optimizer
    for name, p in trainable(engine.module):
        if engine.zero_stage == 0:
            yield _Place(name, p, 0, 0, p.numel())
        elif engine.zero_stage == 3:
            group, offset, _ = zero.grad_position[zero.get_param_id(p)]
            start = distributed.rank() * p.ds_tensor.ds_numel
            numel = min(p.ds_tensor.ds_numel, p.ds_numel - start)  # the last partitions are padded
            if numel > 0:
                yield _Place(name, zero.fp32_partitioned_groups_flat[group], offset, start, numel)
        elif p._hp_mapping is not None:
            mapping = p._hp_mapping
            yield _Place(
                name,
                zero.single_partition_of_fp32_groups[mapping.param_group_index],
                mapping.hp_fragment_address.start,
                mapping.lp_fragment_address.start,
                mapping.lp_fragment_address.numel,
            )


def fragments(engine: Engine, *, whole: bool = False) -> Iterator[Fragment]:
    """This rank's fragments: weights, then each moment that the optimizer has.

    At ZeRO 0 every rank holds everything; then each rank gets an equal share, or all of it with ``whole``.
    """
    state = engine.base_optimizer.state
    for place in _places(engine):
        begin, end = 0, place.numel
        if engine.zero_stage == 0 and not whole:
            begin, end = share(place.numel, distributed.rank(), distributed.world_size())
        if begin == end:
            continue
        tensors = {
            WEIGHT: place.flat,
            **{key: value for key, value in state.get(place.flat, {}).items() if key in MOMENTS},
        }
        for kind, tensor in tensors.items():
            view = tensor.detach().view(-1)[place.offset + begin : place.offset + end]
            yield Fragment(place.name, kind, place.start + begin, view)


def create_moments(engine: Engine) -> None:
    """Make the optimizer allocate its moments, as zeros, before a checkpoint is loaded into them.

    Done by one update with zero gradients and learning rate 0, which changes no weight and works for any optimizer.
    """
    optimizer = engine.base_optimizer
    flats: dict[int, list[Tensor]] = {}
    zero = engine.zero_optimizer
    if engine.zero_stage == 3:
        for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
            flats.setdefault(zero.sub_group_to_group_id[index], []).append(flat)
    for index, group in enumerate(optimizer.param_groups):
        parameters, rate = group["params"], group["lr"]
        group["params"], group["lr"] = flats.get(index, parameters), 0.0
        gradients = [p.grad for p in group["params"]]
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
        others = [g for g in optimizer.param_groups if g is not group]
        optimizer.param_groups[:] = [group]
        optimizer.step()
        optimizer.param_groups[:] = [*others[:index], group, *others[index:]]
        for p, gradient in zip(group["params"], gradients, strict=True):
            p.grad = gradient
        group["params"], group["lr"] = parameters, rate


def optimizer_step_count(engine: Engine) -> int:
    """Updates the optimizer has applied (Adam's bias correction needs it)."""
    for state in engine.base_optimizer.state.values():
        if "step" in state:
            return int(state["step"])
    return int(engine.base_optimizer.param_groups[0].get("step", 0))


def set_optimizer_step_count(engine: Engine, count: int) -> None:
    """Set the number of applied updates, wherever this optimizer keeps it."""
    for state in engine.base_optimizer.state.values():
        if "step" in state:
            state["step"] = torch.full_like(state["step"], count) if torch.is_tensor(state["step"]) else count
    for group in engine.base_optimizer.param_groups:
        if "step" in group:
            group["step"] = torch.full_like(group["step"], count) if torch.is_tensor(group["step"]) else count


_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def loss_scale_state(engine: Engine) -> dict[str, Any]:
    """The dynamic loss scaler's state as JSON (empty unless fp16)."""
    if engine.job.engine.precision != "fp16":
        return {}
    if engine.zero_stage == 0:
        return dict(engine.deepspeed.torch_autocast_z0_gradscaler.state_dict())
    scaler = engine.zero_optimizer.loss_scaler
    return {key: getattr(scaler, key) for key in _SCALER if hasattr(scaler, key)}


def set_loss_scale_state(engine: Engine, state: Mapping[Any, Any]) -> None:
    """Restore what :func:`loss_scale_state` returned; a state from another kind of scaler gives only its scale."""
    if engine.job.engine.precision != "fp16" or not state:
        return
    if engine.zero_stage == 0:
        scaler = engine.deepspeed.torch_autocast_z0_gradscaler
        scale = state.get("scale", state.get("cur_scale"))
        scaler.load_state_dict({**scaler.state_dict(), **(state if "scale" in state else {"scale": scale})})
        return
    scaler = engine.zero_optimizer.loss_scaler
    for key, value in (state if "cur_scale" in state else {"cur_scale": state["scale"]}).items():
        if key in _SCALER:
            setattr(scaler, key, value)

"""Finds which elements of which parameter this rank holds, sharded or not: the basis of the checkpoint format.

A *fragment* is a run of consecutive elements of one flattened parameter, or of a tensor that the optimizer keeps for
it, and aliases live fp32 storage. Over all ranks the fragments of a parameter cover it exactly once, so that

* saving writes each rank's fragments and needs no communication, and
* loading fills each rank's fragments from whatever fragments a checkpoint holds,

which is why a checkpoint does not remember the world size or the ZeRO stage it was written with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.engines.places import is_row_sharded, places, trainable
from capt.pretrain.engine.optim.build import STATE_TENSORS
from capt.pretrain.engine.optim.optimizers import AVERAGE

WEIGHT = "weight"


@dataclass(frozen=True)
class Fragment:
    """Elements ``start : start + view.numel()`` of the flattened parameter ``name``, or of its optimizer state.

    ``kind`` is :data:`WEIGHT`, or the name of the tensor in the optimizer's state.
    """

    name: str
    kind: str
    start: int
    view: Tensor


def share(numel: int, rank: int, world: int) -> tuple[int, int]:
    """Return the half-open range of ``numel`` elements that ``rank`` writes where all ranks hold all of them."""
    size = -(-numel // world)
    return min(rank * size, numel), min((rank + 1) * size, numel)


def fragments(engine: Engine, *, whole: bool = False) -> Iterator[Fragment]:
    """Return this rank's fragments: weights, then each tensor of the optimizer's state.

    Of what every rank holds (ZeRO 0 without row shards) each rank gets an equal share, or all of it with ``whole``.
    """
    state, kinds = engine.base_optimizer.state, (*STATE_TENSORS[engine.optimizer_settings.section.type], AVERAGE)
    for place in places(engine):
        begin, end = 0, place.numel
        if place.everywhere and not whole:
            begin, end = share(place.numel, distributed.rank(), distributed.world_size())
        if begin == end:
            continue
        tensors = {
            WEIGHT: place.flat,
            **{kind: state[place.flat][kind] for kind in kinds if kind in state.get(place.flat, {})},
        }
        for kind, tensor in tensors.items():
            view = tensor.detach().view(-1)[place.offset + begin : place.offset + end]
            yield Fragment(place.name, kind, place.start + begin, view)


def differing_masters(engine: Engine) -> list[str]:
    """Names of the parameters whose fp32 master weights on this rank differ in any bit from the weights that it uses.

    Each update of ZeRO 1 to 3 rounds its shard of the master weights to the working precision and shares it, so both
    are equal until the next update. At ZeRO 0 there is one copy, and nothing to compare. The host waits for the device
    once.
    """
    names, unequal = [], []
    for place in places(engine) if engine.zero_stage else ():
        parameter: Any = engine.module.get_parameter(place.name)
        # ZeRO 3 keeps this rank's part of a weight in `ds_tensor`, padded.
        if engine.zero_stage == 3:
            used = parameter.ds_tensor.detach().view(-1)[: place.numel]
        else:
            used = parameter.detach().view(-1)[place.start : place.start + place.numel]
        master = place.flat.detach().view(-1)[place.offset : place.offset + place.numel]
        if master.shape != used.shape:  # offloaded to a file: it is not in memory now
            continue
        # Compared as integers: NaN equals itself then, and -0 is not 0.
        bits = torch.int32 if used.element_size() == 4 else torch.int16
        names.append(place.name)
        unequal.append((master.to(used).view(bits) != used.view(bits)).any())
    return (
        [name for name, differs in zip(names, torch.stack(unequal).tolist(), strict=True) if differs] if names else []
    )


def first_not_finite(engine: Engine) -> str | None:
    """The first of this rank's weights and optimizer tensors that holds a number which is not finite; None: all are.

    A sum is finite only where all its terms are, and costs a third of looking at each; where one overflows, all terms
    are looked at. The host waits for the device once.
    """
    own = list(fragments(engine))
    # To one device: offloaded tensors are on the host.
    sums = [fragment.view.sum().float().to(engine.device) for fragment in own]
    sound = torch.stack(sums).isfinite().tolist() if sums else []
    suspects = (fragment for fragment, is_sound in zip(own, sound, strict=True) if not is_sound)
    return next((f"{f.kind} of {f.name}" for f in suspects if not f.view.isfinite().all()), None)


def allocate_optimizer_state(engine: Engine, updated: Collection[str]) -> None:
    """Make the optimizer allocate its state, before a checkpoint is loaded into it.

    Done by one update with zero gradients and learning rate 0, which changes no weight and works for any optimizer.
    Parameters that are not among ``updated`` have had no gradient so far, as the part of a last layer that fine-tuning
    does not read: they have zeros, or at ZeRO 0 no state, as before the checkpoint.
    """
    optimizer, zero = engine.base_optimizer, engine.zero_optimizer
    before = [(group["params"], group["lr"]) for group in optimizer.param_groups]
    for index, group in enumerate(optimizer.param_groups):
        if engine.zero_stage == 3:  # whose groups hold their parameters only during an update
            group["params"] = [
                flat for number, flat in enumerate(zero.fp32_partitioned_groups_flat)
                if zero.sub_group_to_group_id[number] == index
            ]  # fmt: skip
        group["lr"] = 0.0
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    # SparseAdam takes no dense gradient, and an empty sparse one needs no memory of a table's size.
    sparse = isinstance(optimizer, torch.optim.SparseAdam) or is_row_sharded(engine.module)
    for p in parameters:
        p.grad = torch.zeros_like(p, layout=torch.sparse_coo) if sparse else torch.zeros_like(p)
    optimizer.step()
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    for group, (own, rate) in zip(optimizer.param_groups, before, strict=True):
        group["params"], group["lr"] = own, rate
    if engine.zero_stage == 0:
        for name, p in trainable(engine.module):
            if name not in updated:
                optimizer.state.pop(p, None)


def optimizer_step_count(engine: Engine) -> int:
    """Return how many updates the optimizer has applied (Adam's bias correction needs it)."""
    for state in engine.base_optimizer.state.values():
        if "step" in state:
            return int(state["step"])
    # Fused optimizers (apex) count in the group and not for each parameter.
    return int(engine.base_optimizer.param_groups[0].get("step", 0))


def set_optimizer_step_count(engine: Engine, count: int) -> None:
    """Set the number of applied updates, wherever this optimizer keeps it."""
    for state in engine.base_optimizer.state.values():
        if "step" in state:
            state["step"] = torch.full_like(state["step"], count) if torch.is_tensor(state["step"]) else count
    for group in engine.base_optimizer.param_groups:
        if "step" in group:
            group["step"] = torch.full_like(group["step"], count) if torch.is_tensor(group["step"]) else count

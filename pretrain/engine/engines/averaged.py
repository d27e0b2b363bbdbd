"""Runs a module with the averages of its weights (:mod:`pretrain.engine.optim.average`), in any engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from pretrain.base.errors import ConfigError
from pretrain.engine.engines.base import Engine
from pretrain.engine.optim.average import AVERAGE


@contextmanager
def averaged_weights(engine: Engine) -> Iterator[None]:
    """Run the engine's module with the averages of its weights; afterwards the weights are the same bits as before.

    Only for passes without a graph, between updates, and not between a forward pass and its backward pass. Collective.
    Weights that were never updated are as they are. What raises within ends the run: the averages stay in place.

    At ZeRO 0 averages and weights change places and nothing is copied. At ZeRO 1 and 2 every rank casts its partition,
    and the partitions are gathered as after an update, in and out. At ZeRO 3 a rank puts its partition aside for as
    long, and weights that DeepSpeed keeps whole are gathered again.

    Raises:
        ConfigError: DeepSpeed updates some partitions with an optimizer of its own, which keeps no average.
    """
    if engine.zero_stage == 0:
        live = _exchange_whole(engine)
        yield
        for p, data in live.items():
            p.data = data
        return
    averages = _of_partitions(engine)
    if not averages:
        yield
    elif engine.zero_stage == 3:
        kept = [flat.clone() for flat in engine.zero_optimizer.fp16_partitioned_groups_flat]
        _fill_partitions(engine.zero_optimizer, averages)
        yield
        _fill_partitions(engine.zero_optimizer, kept)
    else:
        zero = engine.zero_optimizer
        masters = zero.single_partition_of_fp32_groups
        zero.single_partition_of_fp32_groups = averages
        zero.update_lp_params()
        zero.single_partition_of_fp32_groups = masters
        yield
        zero.update_lp_params()  # a weight is its master copy, cast


def _exchange_whole(engine: Engine) -> dict[Tensor, Tensor]:
    """Let every parameter that has an average be it; returns what each was."""
    state, live = engine.base_optimizer.state, dict[Tensor, Tensor]()
    for p in engine.module.parameters():
        if AVERAGE in state.get(p, {}):
            live[p], p.data = p.data, state[p][AVERAGE]
    return live


def _of_partitions(engine: Engine) -> list[Tensor]:
    """The averages of this rank's flat partitions; none before the first update."""
    zero, state = engine.zero_optimizer, engine.base_optimizer.state
    flats = zero.fp32_partitioned_groups_flat if engine.zero_stage == 3 else zero.single_partition_of_fp32_groups
    found = [state[flat][AVERAGE] for flat in flats if AVERAGE in state.get(flat, {})]
    if 0 < len(found) < len(flats):
        raise ConfigError(
            "contrast.momentum: DeepSpeed updates a part of the weights with an optimizer of its own, which keeps no "
            "average; leave out engine.deepspeed_extra.zero_optimization.offload_optimizer.ratio, or set "
            "contrast.momentum=null"
        )
    return found


def _fill_partitions(zero: Any, values: list[Tensor]) -> None:
    """Put values into the partitions that ZeRO 3 gathers weights from, between two passes."""
    zero.checkpoint_event_prologue()  # nothing is whole now
    for flat, value in zip(zero.fp16_partitioned_groups_flat, values, strict=True):
        flat.copy_(value)
    zero.checkpoint_event_epilogue()  # small weights are whole again, as after an update

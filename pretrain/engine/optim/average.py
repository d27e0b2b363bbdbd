r"""An exponential moving average of the weights that an optimizer updates.

After update :math:`t` the average of every weight that is trained is

.. math::
    a_t = \beta a_{t-1} + (1 - \beta) w_t, \qquad a_0 = w_0,

in fp32: in bf16 an average of decay .9995 would not move. It is part of the optimizer's state beside the moments, one
more tensor of the weight's size, sharded as they are. So a checkpoint holds it as it holds them, for any number of
ranks and any ZeRO stage. Updates that the optimizer did not make (fp16 that overflowed) do not count.

`capt.pretrain.engine.engines.base` runs a module with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

AVERAGE = "average"
"""Its name in the optimizer's state, and in checkpoints."""


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Make ``optimizer`` keep the average of the weights that it updates, from its next update on."""
    first: dict[Tensor, Tensor] = {}

    def weights(averaged: bool) -> list[Tensor]:
        every = (p for group in optimizer.param_groups for p in group["params"])
        return [p for p in every if (AVERAGE in optimizer.state.get(p, {})) == averaged]

    @torch.no_grad()
    def before(*_: Any) -> None:
        # Kept aside: an optimizer whose state is not empty would not make its moments.
        first.update({p: p.clone() for p in weights(averaged=False) if p.grad is not None})

    @torch.no_grad()
    def after(*_: Any) -> None:
        for p, start in first.items():
            optimizer.state[p][AVERAGE] = start
        first.clear()
        if live := weights(averaged=True):
            torch._foreach_lerp_([optimizer.state[p][AVERAGE] for p in live], live, 1 - decay)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)

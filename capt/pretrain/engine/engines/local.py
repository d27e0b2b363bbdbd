"""An engine of plain PyTorch, for one rank or for modules with sharded rows, in fp32 or bf16."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.engines.base import EngineBase, clip_gradients, measure_gradients
from capt.pretrain.engine.engines.places import is_row_sharded
from capt.pretrain.engine.optim.build import build_optimizer
from capt.pretrain.engine.optim.optimizers import keep_average
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.own_time import own_section


class LocalEngine(EngineBase):
    """Forward, backward and update of a module on one rank, as one would write them by hand.

    DeepSpeed would add a millisecond to each update, half of its time where modules are small. A row-sharded module
    (:mod:`capt.pretrain.engine.engines.places`) brings its gradients to their owners itself; only their norm is of all
    ranks.
    """

    zero_stage = 0

    def __init__(self, name: str, module: nn.Module, job: Job, settings: ModuleOptimizer) -> None:
        super().__init__(name, job, settings)
        self.device = distributed.device()
        self.module = module.to(self.device)
        self.base_optimizer = self.zero_optimizer = build_optimizer(settings.section, job.engine, module)
        if settings.average is not None:
            keep_average(self.base_optimizer, settings.average)
        self._parameters = list(module.parameters())
        self._bf16 = job.engine.precision == "bf16"
        self._sharded = is_row_sharded(module)
        self._norm = torch.full((), float("nan"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, under autocast in bf16."""
        with own_section(), torch.autocast(self.device.type, torch.bfloat16) if self._bf16 else nullcontext():
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Add the gradient of ``loss``, divided by the number of micro-batches, to that of the parameters."""
        (loss / self._accumulation if self._accumulation > 1 else loss).backward()

    def step(self, loss: Tensor | None = None) -> None:
        """Clip and update at the last micro-batch of an optimizer step."""
        self._guard.add(loss)
        if self.at_boundary:
            with self._guard.update():
                self._update()
        self._micro_steps += 1

    def _update(self) -> None:
        self._norm = measure_gradients(self._parameters)
        if self._sharded and distributed.world_size() > 1:
            self._norm = distributed.all_reduce_sum(self._norm.to(self.device).square()).sqrt()
        if not self._guard.vetoes(self._norm):
            clip_gradients(self._parameters, self.optimizer_settings.section.clip, self._norm)
            self.base_optimizer.step()
        # Also after a veto: the gradients of that step must not enter the next.
        self.base_optimizer.zero_grad()

    def accumulate(self, micro_batches: int) -> None:
        """Let the coming optimizer steps consist of this number of micro-batches."""
        self._accumulation = self._guard.accumulation = micro_batches
        self._micro_steps = 0

    def train(self) -> None:
        """Switch to training mode (dropout on)."""
        self.module.train()

    def eval(self) -> None:
        """Switch to evaluation mode (dropout off)."""
        self.module.eval()

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate of the next update; a parameter group takes its ``lr_scale`` of it."""
        self._rate = value
        for group in self.base_optimizer.param_groups:
            group["lr"] = value * group.get("lr_scale", 1.0)

    def gradient_norm(self) -> Tensor:
        """Gradient norm of the last update, before clipping."""
        return self._norm

    def update_was_skipped(self) -> bool:
        """Return False: there is no fp16 here."""
        return False

    def loss_scale_state(self) -> dict[str, Any]:
        """Return nothing: there is no fp16 here."""
        return {}

    def load_loss_scale_state(self, state: Mapping[Any, Any]) -> None:
        """Do nothing: a run that was saved in fp16 continues without a loss scale."""

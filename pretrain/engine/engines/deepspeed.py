"""DeepSpeed engines built from a job, behind the few calls a task needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME
from torch import Tensor, nn

from pretrain.config.schema import Job
from pretrain.engine import distributed
from pretrain.engine.engines.deepspeed_config import clips_here, deepspeed_config
from pretrain.engine.optim.build import FusedUpdate, Moments, build_optimizer
from pretrain.engine.optim.settings import ModuleOptimizer

logger = logging.getLogger(__name__)

# DeepSpeed would compile this operator with g++ in the first run on CPUs (minutes) and load it in every other one. It
# serves `inference_all_reduce` alone, which training never calls.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

_WIRE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Engine:
    """A module under DeepSpeed: forward by calling it, then ``backward`` and ``step`` once a micro-batch.

    Every forward pass of training goes through the engine, never through ``.module`` (DeepSpeed's gradient hooks are
    installed by its forward). Gradients are averaged over micro-batches and over ranks.

    One rank at ZeRO 0 shares nothing and partitions nothing: forward, backward and update are then plain torch, which
    saves a millisecond an update (half of the time, where modules are as small as a critic).
    """

    def __init__(
        self, name: str, module: nn.Module, job: Job, optimizer_settings: ModuleOptimizer | None = None
    ) -> None:
        self.name = name
        self.job = job
        self.optimizer_settings = optimizer_settings or ModuleOptimizer(job.optimizer)
        section = self.optimizer_settings.section
        self.zero_stage = job.engine.zero_stage
        self._parameters = list(module.parameters())
        self._norm: Tensor | None = None
        self._updated = True
        self._clips = clips_here(job.engine)
        _name_wire_type(module, job)
        optimizer = build_optimizer(section, job.engine, module)
        alone = self.zero_stage == 0 and distributed.world_size() == 1
        self._plain = alone and job.engine.precision != "fp16" and not job.engine.deepspeed_extra
        if self.zero_stage == 0 and not self._plain:
            optimizer.register_step_pre_hook(lambda *_: self._measure_and_clip())
        self.deepspeed, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=deepspeed_config(job, distributed.world_size(), section),
            dist_init_required=False,
        )
        if alone:
            # It would flatten all gradients, reduce them over one rank, and copy them back.
            self.deepspeed.enable_backward_allreduce = False
        if self._plain:  # its forward hooks keep time and count for a pass of its own
            self.deepspeed.module_forward_pre_hook.remove()
            self.deepspeed.module_forward_post_hook.remove()
        self._accumulation = job.accumulation(distributed.world_size())
        self._micro_steps = 0
        self._used = False  # the gradients have had their update, and are there until the next pass to tell their norm
        # torch's AdamW leaves gradients as they are; apex's FusedLAMB, for one, writes its update over them
        self._measures_late = False
        self._update: Callable[[], Any] = optimizer.step
        if self._plain and isinstance(optimizer, torch.optim.AdamW):
            self._measures_late, self._update = True, FusedUpdate(optimizer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, under the engine's precision."""
        if not self._plain:
            return self.deepspeed(*args, **kwargs)
        self._forget_used()
        if self.job.engine.precision == "fp32":
            return self.module(*args, **kwargs)
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.module(*args, **kwargs)

    @property
    def at_boundary(self) -> bool:
        """Whether this micro-batch is the last of its optimizer step."""
        return (self._micro_steps + 1) % self._accumulation == 0

    @property
    def module(self) -> nn.Module:
        """The wrapped module, for reading (names, shapes, ``eval()``); not for training passes."""
        module: nn.Module = self.deepspeed.module
        return module

    @property
    def device(self) -> torch.device:
        """Where inputs belong."""
        return torch.device(self.deepspeed.device)

    @property
    def zero_optimizer(self) -> Any:
        """DeepSpeed's optimizer wrapper (at ZeRO 0 the plain optimizer)."""
        return self.deepspeed.optimizer

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that holds the moments: the one ``build_optimizer`` made."""
        optimizer: torch.optim.Optimizer = getattr(self.zero_optimizer, "optimizer", self.zero_optimizer)
        return optimizer

    def moments(self) -> list[Moments]:
        """The state of plain torch's AdamW, which a compiled step updates; empty elsewhere, and before any update."""
        return self._update.groups() if isinstance(self._update, FusedUpdate) else []

    def backward(self, loss: Tensor, leaf: Tensor | None = None, *, last: bool = True) -> Tensor | None:
        """Accumulate the gradient of ``loss`` (one micro-batch; divided by the accumulation, scaled for fp16).

        With ``last`` false another pass of the same micro-batch follows, and the ranks' gradients are not summed yet
        (at ZeRO 0; the others need every pass's).

        Returns:
            The gradient that ``leaf`` has now, an input of the pass, where one is named.
        """
        if self._plain:
            self._forget_used()
            (loss / self._accumulation if self._accumulation > 1 else loss).backward()
        else:
            reduces = self.deepspeed.enable_backward_allreduce
            self.deepspeed.enable_backward_allreduce = reduces and (last or self.zero_stage > 0)
            self.deepspeed.backward(loss)
            self.deepspeed.enable_backward_allreduce = reduces
        return None if leaf is None else leaf.grad

    def take_gradients(self, gradients: Sequence[Tensor]) -> None:
        """The same as ``backward`` where the gradients are known: one for each of the module's ``parameters()``.

        Not under ZeRO 3, whose parameters are elsewhere, and not beside ``backward`` in one update.
        """
        pairs = list(zip(self._parameters, gradients, strict=True))
        if not self._plain or self._accumulation > 1:
            assert self.zero_stage < 3
            self.backward(torch.stack([(p * g).sum() for p, g in pairs]).sum())
            return
        self._forget_used()
        for parameter, gradient in pairs:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def step(self) -> None:
        """After each micro-batch's ``backward``; updates the parameters at the accumulation boundary."""
        self._updated = False
        if not self._plain:
            if self._clips and self.zero_stage and self.at_boundary:
                self._measure_and_clip_shards()
            self.deepspeed.step()
        elif self.at_boundary:
            self._measure_and_clip()
            self._update()
            self._used = True
        self._micro_steps += 1

    def train(self) -> None:
        """Training mode (dropout on)."""
        self.deepspeed.train()

    def eval(self) -> None:
        """Evaluation mode (dropout off)."""
        self.deepspeed.eval()

    def set_learning_rate(self, value: float) -> None:
        """Learning rate of the next update, for every parameter group."""
        for group in self.zero_optimizer.param_groups:
            group["lr"] = value

    def learning_rate(self) -> float:
        """That of the next update."""
        rate: float = self.zero_optimizer.param_groups[0]["lr"]
        return rate

    def gradient_norm(self) -> Tensor:
        """Global gradient norm of the last update, before clipping: a scalar that the host has not waited for."""
        if self._measures_late and self._norm is None and self._used:  # nothing was clipped
            self._norm = self._measure()
        norm = self._norm if self._clips else self.deepspeed.get_global_grad_norm()
        return torch.as_tensor(float("nan") if norm is None else norm)

    def update_was_skipped(self) -> bool:
        """True when the last update was dropped because of an fp16 overflow (the loss scale has been lowered)."""
        if self.zero_stage == 0:
            return not self._updated  # only a gradient scaler leaves an update out
        # DeepSpeed sets `overflow` for any norm that is not finite; only fp16 has a scaler that answers it.
        return self.job.engine.precision == "fp16" and bool(getattr(self.zero_optimizer, "overflow", False))

    def _forget_used(self) -> None:
        if self._used:
            for parameter in self._parameters:  # zero_grad() without its profiler's range: 20 us
                parameter.grad = None
            self._used = False

    def _measure(self) -> Tensor:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        # what get_total_norm does, without sorting tensors by device and type, half of its time for small modules
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return norm

    def _measure_and_clip(self) -> None:
        self._updated = True
        clip = self.optimizer_settings.section.clip
        self._norm = self._measure() if clip or not self._measures_late else None
        if clip and self._norm is not None:
            nn.utils.clip_grads_with_norm_(self._parameters, clip, self._norm)

    def _measure_and_clip_shards(self) -> None:
        """DeepSpeed's arithmetic at ZeRO 1 and 2 on the reduced gradients of this rank's shard; no host reads the norm.

        DeepSpeed drops an update whose norm is not finite; here that update is made, and the run ends.
        """
        zero = self.zero_optimizer
        groups = [zero.averaged_gradients[i] for i in range(len(zero.bit16_groups))]
        squares = []
        for gradients, parameters in zip(groups, zero.params_in_partition, strict=True):
            filled = (g for g in gradients if not getattr(g, "_zero_padding", False))  # `parameter_alignment` pads each
            own = [g for g, _ in zip(filled, parameters, strict=False)]  # behind them, padding
            norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in own]
            squares.append(torch.stack(norms).square().sum().float() if own else torch.zeros((), device=self.device))
        of_groups = distributed.all_reduce_sum(torch.stack(squares)).sqrt()
        self._norm = torch.linalg.vector_norm(of_groups)
        clip = self.optimizer_settings.section.clip
        if clip:
            factor = 1.0 / ((self._norm + 1e-6) / clip).clamp(min=1.0)
            for gradients in groups:
                torch._foreach_mul_(gradients, factor)


def _name_wire_type(module: nn.Module, job: Job) -> None:
    """DeepSpeed reads ``communication_data_type`` only where no engine of the process uses autocast; elsewhere the type
    in which a gradient is reduced is asked of its parameter."""
    if "communication_data_type" in job.engine.deepspeed_extra:
        for parameter in module.parameters():
            name = job.engine.deepspeed_extra["communication_data_type"]
            setattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME, _WIRE_TYPES[name])


def build_engines(
    modules: Mapping[str, nn.Module], job: Job, optimizers: Mapping[str, ModuleOptimizer] | None = None
) -> dict[str, Engine]:
    """One engine per module, in the mapping's order (the same on every rank).

    Args:
        modules: what the task's ``build_modules`` returned.
        job: the job; its ``optimizer`` section is that of modules which ``optimizers`` does not name.
        optimizers: what the task's ``optimizers`` returned.
    """
    optimizers = optimizers or {}
    assert not (unknown := optimizers.keys() - modules.keys()), f"optimizers() names no module: {unknown}"
    return {name: Engine(name, module, job, optimizers.get(name)) for name, module in modules.items()}

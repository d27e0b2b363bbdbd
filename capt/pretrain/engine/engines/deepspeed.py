"""Engines of DeepSpeed: several ranks, ZeRO, fp16, and DeepSpeed's own options."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import compiler
from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.engines.base import EngineBase, Judge, clip_gradients, measure_gradients, without_update
from capt.pretrain.engine.engines.deepspeed_config import clips_here, deepspeed_config
from capt.pretrain.engine.engines.places import global_shape, places, trainable
from capt.pretrain.engine.optim.build import build_optimizer
from capt.pretrain.engine.optim.muon import MatrixPiece, MuonLayout, MuonWithAdamW
from capt.pretrain.engine.optim.optimizers import ParameterPart, StableAdamW, keep_average
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.own_time import own_section


def keep_deepspeed_lean() -> None:
    """Spare every rank seconds of start-up for which training has no use; call it before the first engine is built.

    No number depends on it. What another release of DeepSpeed does not have is left alone.

    To find out which of its operators a machine could build, DeepSpeed runs a compiler, unless somebody has said so
    before. It asks for one of them alone, which it would build with g++ in the first run on CPUs (minutes) and load in
    every other one: it serves ``inference_all_reduce``, which training never calls.

    Every engine imports its Muon, which is not ours and which no job can choose. Importing it compiles its functions,
    and so loads the whole of torch's compiler.
    """
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    compiling = getattr(compiler, "compile", None)
    if compiling is None:
        return
    compiler.compile = lambda: lambda function: function
    try:
        with suppress(ImportError):
            from deepspeed.runtime.zero.muon import original_muon  # noqa: F401
    finally:
        compiler.compile = compiling


keep_deepspeed_lean()

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Names of the parts of DeepSpeed's loss-scaler state."""

_WIRE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeedEngine(EngineBase):
    """A module under DeepSpeed, behind the calls of :class:`capt.pretrain.engine.engines.base.Engine`."""

    def __init__(self, name: str, module: nn.Module, job: Job, settings: ModuleOptimizer) -> None:
        super().__init__(name, job, settings)
        self.zero_stage = job.engine.zero_stage
        self._fp16 = job.engine.precision == "fp16"
        self._clips = clips_here(job.engine)
        self._parameters = list(module.parameters())
        self._norm: Tensor | None = None
        self._updated = True
        _name_wire_type(module, job)
        optimizer = build_optimizer(settings.section, job.engine, module)
        if settings.section.type in ("stable_adamw", "muon"):
            _require_in_memory(job, f"optimizer.type {settings.section.type}", "optimizer.type=adamw")
        if settings.average is not None:
            key = "contrast.momentum" if job.checkpoint.ema is None else "checkpoint.ema"
            _require_in_memory(job, key, f"{key}=null")
            keep_average(optimizer, settings.average)
        # At ZeRO 0 this optimizer steps itself, when gradients are reduced and unscaled.
        if self.zero_stage == 0:
            optimizer.register_step_pre_hook(lambda *_: self._measure_and_clip())
        self.deepspeed, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=deepspeed_config(job, distributed.world_size(), settings.section),
            # The process group is there already.
            dist_init_required=False,
        )
        # ZeRO has cut and flattened the parameters by now: the optimizer is told what lies where.
        if isinstance(optimizer, StableAdamW) and self.zero_stage:
            self._lay_out(optimizer)
        if isinstance(optimizer, MuonWithAdamW) and self.zero_stage:
            self._lay_out_matrices(optimizer)
        if self.zero_stage == 0 and distributed.world_size() == 1:
            # It would flatten all gradients, reduce them over one rank, and copy them back.
            self.deepspeed.enable_backward_allreduce = False

    def _lay_out(self, optimizer: StableAdamW) -> None:
        """Tell the optimizer which parts of which parameters are in this rank's flat partitions."""
        numbers = {name: number for number, (name, _) in enumerate(trainable(self.module))}
        parts: dict[Tensor, list[ParameterPart]] = defaultdict(list)
        for place in (place for place in places(self) if place.name in numbers):
            parts[place.flat].append(ParameterPart(numbers[place.name], place.offset, place.offset + place.numel))
        optimizer.lay_out([math.prod(global_shape(p)) for _, p in trainable(self.module)], parts)

    def _lay_out_matrices(self, optimizer: MuonWithAdamW) -> None:
        """Tell the optimizer what is in this rank's flat partitions, and which matrices ranks hold parts of.

        Collective.
        """
        zero, shapes = self.zero_optimizer, [global_shape(p) for _, p in trainable(self.module)]
        flats = zero.fp32_partitioned_groups_flat if self.zero_stage == 3 else zero.single_partition_of_fp32_groups
        order = {flat: index for index, flat in enumerate(flats)}
        numbers = {name: number for number, (name, _) in enumerate(trainable(self.module))}
        pieces: list[list[MatrixPiece]] = [[] for _ in flats]
        for place in (place for place in places(self) if place.name in numbers):
            piece = MatrixPiece(numbers[place.name], place.offset, place.start, place.numel)
            pieces[order[place.flat]].append(piece)
        # A matrix is cut where a rank holds fewer elements of it than it has.
        here = [[each.number for each in own if each.numel < math.prod(shapes[each.number])] for own in pieces]
        everywhere = zip(*distributed.gather_objects(here), strict=True)
        cut = [sorted({number for of_rank in ranks for number in of_rank}) for ranks in everywhere]
        layouts = {flat: MuonLayout(pieces[index], cut[index]) for flat, index in order.items()}
        optimizer.lay_out(shapes, layouts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, under the engine's precision."""
        with own_section():
            return self.deepspeed(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped module, for reading and for evaluation; not for training passes."""
        module: nn.Module = self.deepspeed.module
        return module

    @property
    def device(self) -> torch.device:
        """The device that inputs belong on."""
        return torch.device(self.deepspeed.device)

    @property
    def zero_optimizer(self) -> Any:
        """DeepSpeed's optimizer wrapper (at ZeRO 0 the plain optimizer)."""
        return self.deepspeed.optimizer

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that holds the state: the one ``build_optimizer`` made."""
        optimizer: torch.optim.Optimizer = getattr(self.zero_optimizer, "optimizer", self.zero_optimizer)
        return optimizer

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Accumulate the gradient of ``loss`` (one micro-batch; divided by the accumulation, scaled for fp16).

        With ``last`` false another pass of the same micro-batch follows, and the ranks' gradients are not summed yet
        (at ZeRO 0; the others need every pass's).
        """
        reduces = self.deepspeed.enable_backward_allreduce
        self.deepspeed.enable_backward_allreduce = reduces and (last or self.zero_stage > 0)
        begins_backward = getattr(self.zero_optimizer, "clear_backward_seen_flag", None)
        if begins_backward is not None:  # which DeepSpeed does in a forward pass; other forward passes may come between
            begins_backward()
        self.deepspeed.backward(loss)
        self.deepspeed.enable_backward_allreduce = reduces

    def step(self, loss: Tensor | None = None) -> None:
        """End a micro-batch; the last one of an optimizer step updates the parameters."""
        # An update says that it was made; at ZeRO 0 a gradient scaler may leave it out.
        self._updated = False
        self._guard.add(loss)
        if self.at_boundary:
            with self._guard.update():
                self._update()
        else:
            self.deepspeed.step()
        self._micro_steps += 1

    def _update(self) -> None:
        vetoed = False
        # At ZeRO 0 norm and judge are within the optimizer's step, see `guard`.
        if self.zero_stage:
            if self._clips:
                self._measure_and_clip_shards()
            vetoed = self._guard.vetoes(self._norm)
        with without_update(self.zero_optimizer) if vetoed else nullcontext():
            self.deepspeed.step()

    def accumulate(self, micro_batches: int) -> None:
        """Let the coming optimizer steps consist of this number of micro-batches."""
        if micro_batches == self._accumulation:
            return
        self._accumulation = self._guard.accumulation = micro_batches
        of_a_pass = self.deepspeed.train_batch_size() // self.deepspeed.gradient_accumulation_steps()
        self.deepspeed.set_train_batch_size(of_a_pass * micro_batches)
        # Both count micro-batches from the first step on, and find the end of a step by the remainder.
        self._micro_steps = self.deepspeed.micro_steps = 0
        # By a copy of its own it tells accumulated gradients from those of one micro-batch.
        if self.zero_stage in (1, 2):
            self.zero_optimizer.gradient_accumulation_steps = micro_batches

    def guard(self, judge: Judge) -> None:
        """Ask ``judge`` before each update whether it is to be left out.

        The gradient norm is not known before an update at ZeRO 3, with offloading, and in fp16 at ZeRO 1 and 2.
        """
        super().guard(judge)
        if self.zero_stage == 0:  # where a gradient scaler has unscaled the gradients only when it calls this
            optimizer = self.base_optimizer
            update = optimizer.step

            def update_unless_vetoed() -> Any:
                self._norm = measure_gradients(self._parameters)
                self._updated = True
                return None if self._guard.vetoes(self._norm) else update()

            optimizer.step = update_unless_vetoed  # type: ignore[assignment]

    def train(self) -> None:
        """Switch to training mode (dropout on)."""
        self.deepspeed.train()

    def eval(self) -> None:
        """Switch to evaluation mode (dropout off)."""
        self.deepspeed.eval()

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate of the next update; a parameter group takes its ``lr_scale`` of it."""
        self._rate = value
        for group in self.zero_optimizer.param_groups:
            group["lr"] = value * group.get("lr_scale", 1.0)

    def gradient_norm(self) -> Tensor:
        """Global gradient norm of the last update, before clipping: a scalar that the host has not waited for."""
        norm = self._norm if self._clips else self.deepspeed.get_global_grad_norm()
        return torch.as_tensor(float("nan") if norm is None else norm)

    def update_was_skipped(self) -> bool:
        """True if the last update was left out because fp16 overflowed (the loss scale has been lowered)."""
        if self.zero_stage == 0:
            return not self._updated  # only a gradient scaler leaves an update out
        # DeepSpeed sets `overflow` for any norm that is not finite; only fp16 has a scaler that answers it.
        return self._fp16 and bool(getattr(self.zero_optimizer, "overflow", False))

    def loss_scale_state(self) -> dict[str, Any]:
        """The state of fp16's dynamic loss scaler as JSON; empty in other precisions."""
        if not self._fp16:
            return {}
        if self.zero_stage == 0:
            return dict(self.deepspeed.torch_autocast_z0_gradscaler.state_dict())
        scaler = self.zero_optimizer.loss_scaler
        return {key: getattr(scaler, key) for key in _SCALER if hasattr(scaler, key)}

    def load_loss_scale_state(self, state: Mapping[Any, Any]) -> None:
        """Restore a :meth:`loss_scale_state`; one of another kind of scaler gives only its scale."""
        if not self._fp16 or not state:
            return
        if self.zero_stage == 0:
            scaler = self.deepspeed.torch_autocast_z0_gradscaler
            # torch's scaler says `scale` where DeepSpeed's says `cur_scale`.
            scale = state.get("scale", state.get("cur_scale"))
            scaler.load_state_dict({**scaler.state_dict(), **(state if "scale" in state else {"scale": scale})})
            return
        scaler = self.zero_optimizer.loss_scaler
        for key, value in (state if "cur_scale" in state else {"cur_scale": state["scale"]}).items():
            if key in _SCALER:
                setattr(scaler, key, value)

    def _measure_and_clip(self) -> None:
        """Measure and clip the reduced gradients at ZeRO 0, before the optimizer's step."""
        self._updated = True
        self._norm = measure_gradients(self._parameters)
        clip_gradients(self._parameters, self.optimizer_settings.section.clip, self._norm)

    def _measure_and_clip_shards(self) -> None:
        """Clip this rank's shard of the reduced gradients at ZeRO 1 and 2 as DeepSpeed would; no host reads the norm.

        DeepSpeed drops an update whose norm is not finite; here that update is made, and the run ends.
        """
        zero = self.zero_optimizer
        groups = [zero.averaged_gradients[i] for i in range(len(zero.bit16_groups))]
        squares = []
        for gradients, parameters in zip(groups, zero.params_in_partition, strict=True):
            filled = (g for g in gradients if not getattr(g, "_zero_padding", False))  # `parameter_alignment` pads each
            own = [g for g, _ in zip(filled, parameters, strict=False)]  # after them, padding
            norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in own]
            squares.append(torch.stack(norms).square().sum().float() if own else torch.zeros((), device=self.device))
        of_groups = distributed.all_reduce_sum(torch.stack(squares)).sqrt()
        self._norm = torch.linalg.vector_norm(of_groups)
        clip = self.optimizer_settings.section.clip
        if clip:
            factor = 1.0 / ((self._norm + 1e-6) / clip).clamp(min=1.0)
            for gradients in groups:
                torch._foreach_mul_(gradients, factor)


def _require_in_memory(job: Job, key: str, without: str) -> None:
    """Raise ``ConfigError`` where a part of the optimizer's tensors is in files, or another optimizer updates it."""
    for name in ("offload_optimizer", "offload_param"):
        section = job.engine.deepspeed_extra.get("zero_optimization", {}).get(name) or {}
        place = f"engine.deepspeed_extra.zero_optimization.{name}"
        if section.get("device") == "nvme":
            raise ConfigError(f"{key} needs all tensors in memory; set {place}.device=cpu, not nvme, or {without}")
        if section.get("ratio", 1.0) != 1.0:
            raise ConfigError(
                f"{key}: DeepSpeed would update a part with an optimizer of its own; leave out {place}.ratio, or set "
                f"{without}"
            )


def _name_wire_type(module: nn.Module, job: Job) -> None:
    """DeepSpeed reads ``communication_data_type`` only where no engine of the process uses autocast; elsewhere the type
    in which a gradient is reduced is asked of its parameter."""
    if "communication_data_type" in job.engine.deepspeed_extra:
        for parameter in module.parameters():
            name = job.engine.deepspeed_extra["communication_data_type"]
            setattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME, _WIRE_TYPES[name])

"""Simulation of one rank of many on tensors without data: its traffic, memory and work.

A fake process group answers every collective immediately and moves nothing; a tensor has a shape, a type and a storage
of a size, and no numbers. So the code of a job runs as rank ``r`` of any number of ranks, with queues and batches of
any size, in seconds. What depends on values cannot run (``stats``, ``only``, rows that are not known to be equal).

The fake tensors say that they are on a CPU, for a build of torch may know no other device. Where our code treats CPUs
and GPUs differently, `rank_of` takes the GPU's side unless asked for a CPU's (`capt.pretrain.base.traits`): blocks of a
GPU's size, masks of bytes, torch's own dropout, and attention that keeps no weights (`_Flash`).
"""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capt.pretrain.base.traits import DeviceTraits, using

_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}
"""Matrix products, and the place of their first factor among the arguments."""
_FREE = ("detach", "empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "alias")
"""Operators that touch no element."""


_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_")
"""Operators in place that do not read what they overwrite."""


def _adds_in_another_type() -> bool:
    x = torch.empty(1, 1, device="meta")
    factor = x.bfloat16()
    try:
        torch.addmm(x, factor, factor, out_dtype=x.dtype, out=x)
    except TypeError:
        return False
    return True


ADDS_IN_ANOTHER_TYPE = _adds_in_another_type()
"""True if torch knows the shape of a product that is added in another type than its factors': 2.11 does not."""


@dataclass(frozen=True)
class Work:
    """Work of a rank, in the units that a device's rates are of.

    Attributes:
        flops_of: floating-point operations of matrix products, by the type of their factors.
        moved: bytes read and written by the other operators.
        operators: kernels that are launched, about.
    """

    flops_of: Mapping[str, int | float] = field(default_factory=dict)
    moved: int | float = 0
    operators: int | float = 0

    @property
    def flops(self) -> int | float:
        """Operations of all types."""
        return sum(self.flops_of.values())

    def __add__(self, other: Work) -> Work:
        summed = Counter(dict(self.flops_of))
        summed.update(other.flops_of)
        return Work(dict(summed), self.moved + other.moved, self.operators + other.operators)

    def __sub__(self, other: Work) -> Work:
        return self + other * -1

    def __mul__(self, factor: int | float) -> Work:
        scaled = {name: factor * value for name, value in self.flops_of.items()}
        return Work(scaled, factor * self.moved, factor * self.operators)


class OnTheHost(DeviceTraits):
    """Build and compute on the CPU, where this host has a GPU as well: fake tensors of both do not mix."""

    is_here = False

    def gpu_is_here(self) -> bool:
        """Return false."""
        return False


class AsOnGPU(OnTheHost):
    """The side of a GPU, with tensors on a CPU; works with real numbers as well."""

    def is_gpu(self, device: torch.device) -> bool:
        """Return true."""
        return True


class _WithoutValues(OnTheHost):
    """Tensors without numbers."""

    has_values = False

    def blocks(self, length: int, size: int) -> Iterator[slice]:
        """Yield the blocks that differ: the first, the second for all that follow, and the last where it is shorter.

        An operator in a block counts for all that the block is for. The second is not like the first: a loop still
        holds some of the block before.
        """
        whole, rest = divmod(length, size)
        for place, times in ((0, min(whole, 1)), (1, whole - 1), (whole, min(rest, 1))):
            if times > 0:
                with _repeat(times):
                    yield slice(place * size, min((place + 1) * size, length))


class _SimulatedGPU(_WithoutValues, AsOnGPU):
    """Tensors without numbers on the side of a GPU."""

    adds_products = ADDS_IN_ANOTHER_TYPE

    def __init__(self) -> None:
        self.attend_runs = _flash_of_runs


@contextmanager
def _replace_kernels(*, gpu: bool) -> Iterator[None]:
    """Put kernels that hold and compute what fused ones do in place of torch's attention (on a GPU) and LSTM.

    The functions of torch itself are replaced, for models of transformers call them, and so does a backward pass that
    computes layers anew: a `TorchFunctionMode` is off in that pass.
    """
    attend, lstm = F.scaled_dot_product_attention, torch._VF.lstm
    if gpu:
        F.scaled_dot_product_attention = _flash  # type: ignore[assignment]
    torch._VF.lstm = _lstm  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention, torch._VF.lstm = attend, lstm


@contextmanager
def rank_of(world: int, rank: int = 0, *, gpu: bool = True) -> Iterator[None]:
    """Be rank ``rank`` of ``world``, with fake tensors and a fake process group, until the block ends.

    With ``gpu`` false the code takes the side of a CPU wherever that does not depend on values.

    Raises:
        RuntimeError: this process already belongs to a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("a simulated rank needs a process of its own: this one has a process group")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    # Of all that the imports made, collections took a fifth of the time: fake tensors bring them about often.
    gc.freeze()
    chosen = _SimulatedGPU() if gpu else _WithoutValues()
    try:
        with using(chosen), FakeTensorMode(allow_non_fake_inputs=True), _replace_kernels(gpu=gpu):
            yield
    finally:
        gc.unfreeze()
        dist.destroy_process_group()


def _repeat(times: int) -> Any:
    tracer = OpTracer.current
    return nullcontext() if tracer is None else tracer.counted(times)


class _Flash(torch.autograd.Function):
    """Memory and work of a fused attention kernel of a GPU: its output and a number a row, and no weights.

    Forward it takes two products of (rows, e, keys seen), backward five (Dao et al. 2022, appendix B).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: int) -> Tensor:
        out = torch.empty_like(q)
        # The last one is the log-sum-exp of each row, held for its size alone.
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        ctx.seen = seen
        _count_attention(q, k, seen, forward=True)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, _, _ = ctx.saved_tensors
        _count_attention(q, k, ctx.seen, forward=False)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _flash(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    return _Flash.apply(q, k, v, k.shape[-2])  # type: ignore[no-any-return]


def _flash_of_runs(qkv: Tensor, longest: int, window: int | None) -> Tensor:
    """`capt.pretrain.models.modernbert.attention.by_kernel` of runs that are all as long as the longest."""
    q, k, v = qkv.transpose(0, 2).unbind(1)
    seen = longest if window is None else min(longest, 2 * window + 1)
    return _Flash.apply(q, k, v, seen).transpose(0, 1).flatten(1)  # type: ignore[no-any-return]


def _count_attention(q: Tensor, k: Tensor, seen: int, *, forward: bool) -> None:
    tracer = OpTracer.current
    if tracer is not None:
        heads, rows, e = math.prod(q.shape[:-2]), *q.shape[-2:]
        tracer.operators += 1 if forward else 2
        tracer.count_products(q.dtype, (rows, e, seen), heads * (2 if forward else 5))


class _Lstm(torch.autograd.Function):
    """Memory and work of one layer of a fused LSTM.

    Forward it multiplies all inputs in one product, then the hidden state of each time step, backward twice as much. It
    keeps four gates and the cell of every time step. A time step counts as an operator, for the next one waits for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = x.new_empty(*x.shape[:-1], h.shape[-1])
        ctx.save_for_backward(x, h, c, *weights, out, x.new_empty(*x.shape[:-1], 5 * h.shape[-1]))
        _count_lstm(x, h, 1)
        return out, torch.empty_like(h), torch.empty_like(c)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        x, h, c, *weights, _, _ = ctx.saved_tensors
        gates = x.new_empty(*x.shape[:-1], 4 * h.shape[-1])
        _count_lstm(x, h, 2)
        # All gradients are made while the gates are there, which counts for the peak.
        inputs = tuple(torch.empty_like(each) for each in (x, h, c, *weights))
        del gates
        return inputs


def _lstm(x: Tensor, state: tuple[Tensor, Tensor], weights: list[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return _Lstm.apply(*(each.to(low) for each in (x, *state, *weights)))  # type: ignore[no-any-return]


def _count_lstm(x: Tensor, h: Tensor, times: int) -> None:
    tracer = OpTracer.current
    if tracer is not None:
        length, n, k = *x.shape[:2], h.shape[-1]
        tracer.operators += times * length
        tracer.count_products(x.dtype, (length * n, x.shape[-1], 4 * k), times)
        tracer.count_products(x.dtype, (n, k, 4 * k), times * length)
        # Four gates, the cell and the hidden state of each time step.
        tracer.moved += times * length * n * 6 * k * x.element_size()


class OpTracer(TorchDispatchMode):
    """Follows every storage that operators of its scope make, from its birth to its death.

    Attributes:
        live: bytes of the storages that are alive now, of those that were made in the scope.
        peak: the largest ``live`` so far.
        operators: number of operators that compute something (no views).
        moved: bytes that operators other than matrix products read and wrote: each operand once, and twice where it
            is changed in place; a fused kernel would move fewer.
        flops_of: floating-point operations of matrix products, by the type of their factors, a multiply-add being 2.
    """

    current: OpTracer | None = None
    """The innermost one that is in force; what is no operator of torch counts itself there."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.operators = self.moved = 0
        self.flops_of: Counter[str] = Counter()
        self._times = 1
        self._known: dict[int, weakref.ref[Any]] = {}
        self._outer: OpTracer | None = None

    def __enter__(self) -> OpTracer:
        self._outer, OpTracer.current = OpTracer.current, self
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exception: Any) -> None:
        OpTracer.current = self._outer
        super().__exit__(*exception)

    def reset(self) -> None:
        """Count from here: the next peak begins with what is alive now."""
        self.peak, self.operators, self.moved = self.live, 0, 0
        self.flops_of.clear()

    @contextmanager
    def counted(self, times: int) -> Iterator[None]:
        """Count every operator ``times`` times until the block ends; its storages live once."""
        before, self._times = self._times, times * self._times
        try:
            yield
        finally:
            self._times = before

    @property
    def work(self) -> Work:
        """Everything that has been counted since the last reset."""
        return Work(dict(self.flops_of), self.moved, self.operators)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for result in results:
            self._follow(result)
        name = func._schema.name.split("::")
        if name[0] == "aten" and results and not func.is_view:
            operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._count(name[1], args, operands, results)
        return out

    def _count(self, name: str, args: Any, operands: list[Tensor], results: list[Tensor]) -> None:
        if name in _FREE:
            return
        self.operators += self._times
        if name in _PRODUCTS:
            a, b = args[_PRODUCTS[name] :][:2]
            shape = (a.shape[-2], a.shape[-1], b.shape[-1])
            self.count_products(a.dtype, shape, a.shape[0] if a.dim() == 3 else 1)
            return
        # An operand that is given twice is read once.
        self.moved += self._times * sum(
            each.nbytes for each in {id(each): each for each in operands + results}.values()
        )
        if name.endswith("_") and name not in _OVERWRITES:
            self.moved += self._times * sum(each.nbytes for each in results)

    def count_products(self, dtype: torch.dtype, shape: tuple[int, int, int], times: int) -> None:
        """Add matrix products of (rows, inner, columns) with factors of ``dtype``."""
        self.flops_of[_type(dtype)] += 2 * math.prod(shape) * times * self._times

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        # A view, or a result in place: its storage is followed already.
        if key in self._known and self._known[key]() is not None:
            return
        size = storage.nbytes()

        def died(_: Any, key: int = key, size: int = size) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, died)
        self.live += size
        self.peak = max(self.peak, self.live)


@dataclass(frozen=True)
class Sent:
    """A collective: its name, the type and number of the elements that this rank puts in, and the bytes that it gets of
    the others (a reduction: of the whole)."""

    name: str
    dtype: str
    elements: int
    received: int

    @property
    def reduces(self) -> bool:
        """Return true for a sum over ranks."""
        return self.name in ("allreduce_", "_reduce_scatter_base_")


class Wire(TorchDispatchMode):
    """Records every collective that is called in its scope."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            self.sent.append(_sent(name, args))
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Any) -> Sent:
    if name == "_allgather_base_":
        out, own = args[0], args[1]
        return Sent(name, _type(own.dtype), own.numel(), out.nbytes - own.nbytes)
    if name == "_reduce_scatter_base_":
        out, own = args[0], args[1]
        return Sent(name, _type(own.dtype), own.numel(), own.nbytes - out.nbytes)
    tensors: list[Tensor] = args[0]
    return Sent(name, _type(tensors[0].dtype), sum(map(Tensor.numel, tensors)), sum(t.nbytes for t in tensors))


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

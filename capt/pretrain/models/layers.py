"""The post-LN Transformer layer of BERT, RoBERTa and LXMERT, its activation checkpointing, and how weights begin."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from capt.pretrain.base.cache import use_own_compile_cache
from capt.pretrain.base.errors import ConfigError, how_to_install
from capt.pretrain.base.traits import traits
from capt.pretrain.models.heads import WordEmbedding, take_rows

# Dropout whose masks are cheap to draw on a CPU.


_LEVELS = 1 << 16


def keep_mask(shape: torch.Size, p: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Independent Bernoulli(1 - p) draws of ``shape`` as 0 and 1 of ``dtype``, on the CPU, and 1 / (1 - p).

    Four masks share one 64-bit draw of torch's default generator (so that its saved state replays them). ``p`` is
    rounded to a multiple of 2^-16 and the returned factor belongs to the rounded value: the mean is exactly kept.
    """
    # bernoulli_ costs 5.5 ms for a million masks, this 1.2 ms: it was a sixth of a bf16 step.
    count = math.prod(shape)
    # Four draws of 16 bits in each number; the range is the whole of int64.
    bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(1 << 63), None).view(torch.int16)
    # One level at least is kept, or the factor would be infinite.
    dropped = min(round(p * _LEVELS), _LEVELS - 1)
    # int16 is signed, so levels count from -2**15.
    mask = torch.ge(bits[:count].view(shape), dropped - _LEVELS // 2, out=torch.empty(shape, dtype=dtype))
    return mask, _LEVELS / (_LEVELS - dropped)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        mask, ctx.scale = keep_mask(x.shape, p, x.dtype)
        ctx.save_for_backward(mask)
        return (x * mask).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return (grads[0] * mask).mul_(ctx.scale), None


def dropout(x: Float[Tensor, "*shape"], p: float, training: bool) -> Float[Tensor, "*shape"]:
    """``x`` with elements zeroed with probability ``p`` and the rest divided by ``1 - p``; ``x`` when not training."""
    if not training or p == 0:
        return x
    if draws_own_masks(x):
        return _Dropout.apply(x, p)  # type: ignore[no-any-return]
    return F.dropout(x, p)


def draws_own_masks(x: Tensor) -> bool:
    """True where ``keep_mask`` is the faster generator: on a CPU, outside compiled code."""
    return not torch.compiler.is_compiling() and not traits().is_gpu(x.device)


# Multi-head self-attention, for all positions or only for those whose output is read.


class _DroppedAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(e) + mask), dropped out, times v. All tensors are (b, heads, rows, e)."""

    # torch's CPU kernel with dropout is a chain of unfused operations, and its flash backward is slow in bf16.
    # Forward and backward of one CAPT-small layer, one thread: 30 ms (torch 52 ms) in fp32, 15 ms (56 ms) in bf16.

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> Tensor:
        b, heads, _, e = q.shape
        q, k, v = (x.reshape(b * heads, -1, e) for x in (q, k, v))
        if mask is None:
            scores = torch.baddbmm(q.new_zeros(1), q, k.transpose(1, 2), beta=0, alpha=e**-0.5)
        else:
            # The lowest finite number and not -inf: a sequence of nothing but padding must not become NaN.
            bias = q.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(q.dtype).min)
            bias = bias.expand(b, heads, -1, -1).reshape(b * heads, *mask.shape[2:])
            scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=e**-0.5)
        weights = torch.softmax(scores, -1)
        keep, scale = keep_mask(weights.shape, p, weights.dtype)
        dropped = torch.mul(weights, keep, out=scores)
        ctx.save_for_backward(q, k, v, weights, keep)
        ctx.scale, ctx.heads = scale, heads
        return torch.baddbmm(q.new_zeros(1), dropped, v, beta=0, alpha=scale).view(b, heads, -1, e)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, weights, keep = ctx.saved_tensors
        e, unused = q.shape[-1], q.new_zeros(1)
        g = grads[0].reshape(-1, *grads[0].shape[2:])
        # Weights and mask are saved and not their product: one tensor of scores less in memory.
        buffer = weights * keep
        dv = torch.baddbmm(unused, buffer.transpose(1, 2), g, beta=0, alpha=ctx.scale)
        # The gradient of the weights, in the buffer of the product that is no longer needed.
        torch.baddbmm(unused, g, v.transpose(1, 2), beta=0, alpha=ctx.scale, out=buffer).mul_(keep)
        ds = torch._softmax_backward_data(buffer, weights, -1, weights.dtype)
        dq = torch.baddbmm(unused, ds, k, beta=0, alpha=e**-0.5)
        dk = torch.baddbmm(unused, ds.transpose(1, 2), q, beta=0, alpha=e**-0.5)
        dq, dk, dv = (x.view(-1, ctx.heads, *x.shape[1:]) for x in (dq, dk, dv))
        return dq, dk, dv, None, None


def attend(
    q: Float[Tensor, "b heads r e"],
    k: Float[Tensor, "b heads L e"],
    v: Float[Tensor, "b heads L e"],
    mask: Bool[Tensor, "#b 1 #r L"] | None,
    p: float,
) -> Float[Tensor, "b heads r e"]:
    """Scaled dot-product attention of ``r`` queries over ``L`` keys, its weights dropped out with probability ``p``.

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: True where a query may look; None = everywhere.
        p: dropout probability (0 when not training).
    """
    if p > 0 and draws_own_masks(q):
        with torch.autocast(q.device.type, enabled=False):
            return _DroppedAttention.apply(q, k, v, mask, p)  # type: ignore[no-any-return]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)


class Runs(NamedTuple):
    """A batch of windows, laid end to end, as runs of tokens that attend to each other and to nothing else.

    Run ``i`` is the tokens ``offsets[i]`` to ``offsets[i + 1] - 1`` of the ``b L``; none is longer than ``longest``.
    ``flash``: whether the device has flash attention, where it is a GPU.
    """

    offsets: Int32[Tensor, " n"]
    longest: int
    flash: bool = True


def document_runs(documents: Int[Tensor, "b L"], count: int) -> Runs:
    """The runs of equal numbers in each row of ``documents``.

    Args:
        documents: numbers that are equal in neighbouring tokens of one document, padding apart.
        count: the number of runs. The host knows it; to count them on a GPU would mean to wait for the GPU.
    """
    b, length = documents.shape
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    starts = torch.nonzero_static(begins.flatten(), size=count).flatten()
    return Runs(F.pad(starts, (0, 1), value=b * length).int(), length, has_flash(documents.device))


def has_flash(device: torch.device) -> bool:
    """True for a GPU with flash attention: from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def attend_within(
    q: Float[Tensor, "b L heads e"],
    k: Float[Tensor, "b L heads e"],
    v: Float[Tensor, "b L heads e"],
    runs: Runs,
    p: float,
) -> Float[Tensor, "b L heads e"]:
    """:func:`attend` where tokens attend to their own run only: what is computed grows with the lengths of the runs.

    On a GPU by torch's kernels for ragged sequences (flash attention in 16 bits from Ampere on, else a memory-efficient
    one), which can be traced; on a CPU by runs of like lengths together.
    """
    attend_runs = _attend_by_kernel if q.is_cuda else _attend_by_length
    flat_q, flat_k, flat_v = (x.flatten(0, 1).contiguous() for x in (q, k, v))
    attended = attend_runs(flat_q, flat_k, flat_v, runs, p)
    return attended.reshape(q.shape)


def _attend_by_kernel(
    q: Float[Tensor, "n heads e"], k: Float[Tensor, "n heads e"], v: Float[Tensor, "n heads e"], runs: Runs, p: float
) -> Float[Tensor, "n heads e"]:
    """:func:`attend_within` for rows laid end to end, on a GPU; the host waits for nothing."""
    offsets, longest = runs.offsets, runs.longest
    if q.dtype == torch.float32 or not runs.flash:
        grows = torch.is_grad_enabled()
        # Its own scale is the same; torch 2.13 cannot trace the backward pass of one that is given.
        y, *_ = torch.ops.aten._efficient_attention_forward(
            q[None], k[None], v[None], None, offsets, offsets, longest, longest, p, 0, grows
        )
        return y[0]  # type: ignore[no-any-return]
    narrow = [F.pad(x, (0, -x.shape[-1] % 8)) for x in (q, k, v)]  # the kernel reads eight features at a time
    y, *_ = torch.ops.aten._flash_attention_forward(
        *narrow, offsets, offsets, longest, longest, p, False, False, scale=q.shape[-1] ** -0.5
    )
    return y[..., : q.shape[-1]]  # type: ignore[no-any-return]


_LIKE = 16
"""Runs are padded to a multiple of this length, so that a few sizes serve all of them."""


def _attend_by_length(
    q: Float[Tensor, "n heads e"], k: Float[Tensor, "n heads e"], v: Float[Tensor, "n heads e"], runs: Runs, p: float
) -> Float[Tensor, "n heads e"]:
    """:func:`attend_within` for rows laid end to end: the runs of one length, rounded up, are a batch."""
    starts, lengths = runs.offsets[:-1].long(), runs.offsets.diff().long()
    sizes = -(-lengths // _LIKE) * _LIKE
    parts, places = [], []
    for size in sizes.unique().tolist():
        chosen = sizes == size
        # The longest of these runs is the length: the multiple alone would be padding.
        within = torch.arange(min(size, int(lengths[chosen].max())))
        real = within < lengths[chosen, None]
        # Places behind a run repeat its first row, which the mask hides.
        rows = starts[chosen, None] + torch.where(real, within, 0)
        q_size, k_size, v_size = (x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:]) for x in (q, k, v))
        y = attend(q_size.transpose(1, 2), k_size.transpose(1, 2), v_size.transpose(1, 2), real[:, None, None, :], p)
        parts.append(y.transpose(1, 2)[real])
        places.append(rows[real])
    # Back to the order in which the rows came.
    return torch.cat(parts).index_select(0, torch.cat(places).argsort())


class Packed(NamedTuple):
    """Sequences of different lengths without their padding: what each row of ``n`` packed rows is in ``b`` x ``L``.

    Attributes:
        rows: flat positions of the packed rows, ascending.
        shape: b, L.
        mask: True for keys that are not padding.
    """

    rows: Int[Tensor, " n"]
    shape: tuple[int, int]
    mask: Bool[Tensor, "b 1 1 L"]

    def pack(self, x: Float[Tensor, "b L h"]) -> Float[Tensor, "n h"]:
        """The rows of ``x`` that are not padding."""
        return x.reshape(-1, x.shape[-1]).index_select(0, self.rows)

    def position(self, flat: Int[Tensor, " k"]) -> Int[Tensor, " k"]:
        """The packed rows at these flat positions, none of which is padding."""
        return torch.searchsorted(self.rows, flat)

    def unpack(self, x: Float[Tensor, "n h"]) -> Float[Tensor, "b L h"]:
        """The inverse of `pack`, with zeros for padding."""
        b, length = self.shape
        full = x.new_zeros(b * length, x.shape[-1]).index_copy(0, self.rows, x)
        return full.view(b, length, -1)


def prefers_packing(x: Tensor) -> bool:
    """True where leaving out padding pays: on a CPU. A GPU would have to wait for the number of rows."""
    return x.device.type == "cpu"


_LONG = 256
"""Tokens of a window from which a CPU is faster run by run: 2.4 to 3.6 times at 512 tokens with dropout, 0.9 at 128."""


def prefers_runs(x: Float[Tensor, "b L h"], runs: int, compiled: bool) -> bool:
    """True where :func:`attend_within` is faster than a mask, with which torch cannot use flash attention.

    On a CPU it cannot be ``compiled``: its sizes depend on the lengths of the runs.
    """
    return x.is_cuda or (x.shape[1] >= _LONG and runs >= 2 * len(x) and not compiled)


def prefers_one_product(x: Tensor) -> bool:
    """True where queries, keys and values of the same rows are one matrix product: on a GPU, whose product of three
    widths is faster than two; a CPU would copy the weights for nothing."""
    return traits().is_gpu(x.device)


@runtime_checkable
class AttentionSizes(Protocol):
    """Sizes of an attention module, as a configuration has them."""

    @property
    def hidden(self) -> int:
        """Width of inputs and output."""

    @property
    def heads(self) -> int:
        """Attention heads, which share the width."""

    @property
    def attention_dropout(self) -> float:
        """Dropout of the attention weights."""


class SelfAttention(nn.Module):
    """Multi-head self-attention with its output projection (Vaswani et al. 2017)."""

    def __init__(self, config: AttentionSizes) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.attention_dropout
        # Keys and values are needed at every position, queries (in the last layer) only at some: two projections.
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key_value = nn.Linear(config.hidden, 2 * config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)

    def forward(
        self,
        queries: Float[Tensor, "b r h"],
        x: Float[Tensor, "b L h"],
        mask: Bool[Tensor, "b 1 #r L"] | Runs | Packed | None,
    ) -> Float[Tensor, "b r h"]:
        """The attention output of each of ``queries`` over the sequence ``x``.

        With runs or packed sequences, ``queries`` must be ``x``; packed sequences are one sequence of all their rows.
        """
        p = self.dropout if self.training else 0.0
        packed = mask if isinstance(mask, Packed) else None
        q, k, v = self._project(queries, x, packed)
        if isinstance(mask, Runs):
            return self.output(attend_within(q, k, v, mask, p).flatten(2))  # type: ignore[no-any-return]
        mask = mask.mask if isinstance(mask, Packed) else mask
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, p).transpose(1, 2).flatten(2)
        return self.output(y if packed is None else packed.pack(y)[None])  # type: ignore[no-any-return]

    def _project(self, queries: Tensor, x: Tensor, packed: Packed | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads, (b, rows, heads, e) each; packed sequences are unpacked."""
        shape = (self.heads, x.shape[-1] // self.heads)
        parts = (self.query, self.key_value)
        plain = all(isinstance(part, nn.Linear) for part in parts)  # and not one with an adapter
        if queries is x and packed is None and plain and prefers_one_product(x):
            weight = torch.cat([to_autocast(part.weight) for part in parts])
            qkv = F.linear(x, weight, torch.cat([part.bias for part in parts]))
            q, k, v = qkv.view(*qkv.shape[:-1], 3, *shape).unbind(2)
            return q, k, v
        q, kv = self.query(queries), self.key_value(x)
        if packed is not None:
            q, kv = packed.unpack(q[0]), packed.unpack(kv[0])
        return q.view(*q.shape[:-1], *shape), *kv.view(*kv.shape[:-1], 2, *shape).unbind(2)


@runtime_checkable
class LayerSizes(AttentionSizes, Protocol):
    """Sizes of a layer, as a configuration has them."""

    @property
    def ffn(self) -> int:
        """Inner width of the feed-forward part."""

    @property
    def dropout(self) -> float:
        """Dropout of both parts' outputs."""

    @property
    def layer_norm_eps(self) -> float:
        """Added to the variance in LayerNorm."""


_GRAPHS = 64
"""Most graphs that a layer may be compiled to: with and without gradient, dropout, mask and rows, of several shapes."""


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` to whole graphs.

    One graph more than the limit is an error: torch would run eagerly, which draws other dropout masks.
    """
    use_own_compile_cache()
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return torch.compile(function, fullgraph=True, recompile_limit=_GRAPHS)  # type: ignore[call-overload,no-any-return]
    torch._dynamo.config.recompile_limit = _GRAPHS  # in torch 2.11 one limit holds for all functions
    return torch.compile(function, fullgraph=True)


class EncoderLayer(nn.Module):
    """A post-LN Transformer layer."""

    def __init__(self, config: LayerSizes, compile: bool = False) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)
        self.ffn_in = nn.Linear(config.hidden, config.ffn)
        self.ffn_out = nn.Linear(config.ffn, config.hidden)
        self.ffn_norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)
        self._run = compile_whole(self._compute) if compile else self._compute

    def forward(
        self,
        x: Float[Tensor, "b L h"],
        mask: Bool[Tensor, "b 1 _ L"] | Runs | Packed | None,
        rows: Int[Tensor, "b r"] | None,
        autocast: torch.dtype | None,
    ) -> Float[Tensor, "b _ h"]:
        """The layer's output at all positions, or at ``rows`` only.

        ``autocast`` is the precision to enter; fairscale's recomputation would otherwise enter CUDA's default (fp16).
        """
        if autocast is None:
            return self._run(x, mask, rows)
        with torch.autocast(x.device.type, autocast):
            return self._run(x, mask, rows)

    def attend(
        self,
        x: Float[Tensor, "b L h"],
        mask: Bool[Tensor, "b 1 _ L"] | Runs | Packed | None,
        rows: Int[Tensor, "b r"] | None,
    ) -> Float[Tensor, "b _ h"]:
        """The first half: attention, residual, LayerNorm."""
        # Cast once for queries, keys and values; autocast would do it for each.
        low = to_autocast(x)
        # The residual stays in its precision, the queries are in that of the products.
        at = x if rows is None else take_rows(x, rows)
        queries = low if rows is None else take_rows(low, rows)
        return self.attention_norm(  # type: ignore[no-any-return]
            at + dropout(self.attention(queries, low, mask), self.dropout, self.training)
        )

    def feed_forward(self, x: Float[Tensor, "*rows h"]) -> Float[Tensor, "*rows h"]:
        """The second half, row by row: feed-forward network, residual, LayerNorm."""
        y = self.ffn_out(F.gelu(self.ffn_in(x)))
        return self.ffn_norm(x + dropout(y, self.dropout, self.training))  # type: ignore[no-any-return]

    def _compute(self, x: Tensor, mask: Tensor | Runs | Packed | None, rows: Tensor | None) -> Tensor:
        return self.feed_forward(self.attend(x, mask, rows))


def initialise_weights(module: nn.Module, std: float) -> None:
    """BERT's initialisation, in place: matrices N(0, ``std``), rows of padding and biases 0, LayerNorm the identity."""
    for part in module.modules():
        if isinstance(part, WordEmbedding):
            part.draw(std)
        elif isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, 0.0, std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            nn.init.zeros_(part.weight[part.padding_idx])


def to_autocast(x: Tensor) -> Tensor:
    """``x`` in the precision of the autocast that is in force, if one is."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The precision of the autocast that is in force on the device of ``x``."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None


def checkpointed(layer: nn.Module, kind: str) -> nn.Module:
    """``layer`` as ``model.activation_checkpointing`` says: its inputs alone are kept, the rest is computed again.

    ``offload`` keeps them in host memory. The recomputation draws the same random numbers and enters the same
    precision.

    Raises:
        ConfigError: fairscale is asked for, and is not installed.
    """
    offload = kind.endswith("offload")
    if kind.startswith("fairscale"):
        try:
            from fairscale.nn.checkpoint import checkpoint_wrapper
        except ImportError:
            raise ConfigError(
                f"model.activation_checkpointing={kind} needs fairscale: {how_to_install('fairscale')}; torch's own is "
                f"model.activation_checkpointing={'offload' if offload else 'full'}"
            ) from None
        wrapped: nn.Module = checkpoint_wrapper(layer, offload_to_cpu=offload)
        return wrapped
    if kind != "none":
        layer.forward = functools.partial(_recomputed, layer, offload)
    return layer


def _recomputed(layer: nn.Module, offload: bool, *args: Any) -> Any:
    # The method of the class, for `forward` of this layer is the wrapper itself.
    forward = functools.partial(type(layer).forward, layer)
    if not torch.is_grad_enabled():
        return forward(*args)
    with save_on_cpu(pin_memory=traits().gpu_is_here()) if offload else nullcontext():
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=traits().has_values)

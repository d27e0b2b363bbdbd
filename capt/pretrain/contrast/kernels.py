r"""Kernels: the arithmetic that one rank does for all anchors on the keys that it holds.

Shapes: ``N`` anchors (gathered from all ranks), ``c`` keys (held by this rank), ``d`` features. Anchors come divided by
the temperature, so that a logit is the plain dot product :math:`s_{ij} = q_i \cdot k_j`.

**Precisions.** Two fp32 matrices can be multiplied in several ways. The error of each, with
:math:`|\hat{ab} - ab| \le \delta\,|a|\,|b|` for the product of two numbers, before fp32 sums:

======== ============================================== =====================
name     what is multiplied                             :math:`\delta`
======== ============================================== =====================
fp32     the operands                                   0
tf32     the operands cut to 11 bits (CUDA GPUs)        :math:`2^{-9}`
bf16x6   three bf16 terms of each, six of nine products :math:`2^{-21}`
bf16x3   two bf16 terms of each, three of four products :math:`2^{-14}`
bf16     the operands rounded to bf16                   :math:`2^{-7} + 2^{-16}`
======== ============================================== =====================

``docs/contrast.md`` derives them, and what they do to the loss and its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from capt.pretrain.base.blocks import blocks
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.traits import traits
from capt.pretrain.contrast.masks import InstanceIds, KnownPairs, NegativeMask

Precision = Literal["fp32", "tf32", "bf16x6", "bf16x3", "bf16"]
Terms = tuple[Tensor, ...]
"""Matrices of one shape whose sum is an operand, the largest first."""

_TERMS: dict[Precision, int] = {"bf16": 1, "bf16x3": 2, "bf16x6": 3}


@dataclass(frozen=True)
class Products:
    """Matrix products in one precision. Rows stored in bf16 are one exact term in each bf16 kind."""

    precision: Precision = "fp32"

    def split(self, rows: Tensor, dtype: torch.dtype) -> Terms:
        """``rows`` as an operand of products that are summed in ``dtype``."""
        if self.precision not in _TERMS:
            return (rows.to(dtype),)
        terms: list[Tensor] = []
        rest = rows
        # Each term is what bf16 holds of the rest of the row.
        while len(terms) < _TERMS[self.precision]:
            terms.append(rest.to(torch.bfloat16))
            if rows.dtype == torch.bfloat16:
                break
            rest = rest - terms[-1]  # exact: what rounding to 8 of 24 bits leaves
        return tuple(terms)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which anchors are sent to other ranks, where all else is computed in ``dtype``."""
        return torch.bfloat16 if self.precision == "bf16" else dtype

    @contextmanager
    def applied_on(self, device: torch.device) -> Iterator[None]:
        """A context in which fp32 products on a GPU have this precision, whatever the process has set.

        ``fp32`` means IEEE's fp32 even where the process allows TF32. The setting is restored at the end.
        """
        if device.type != "cuda":
            yield
            return
        with _cuda_fp32_precision("tf32" if self.precision == "tf32" else "ieee"):
            yield


FP32 = Products()


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise :class:`ConfigError` for an unknown precision, and for one that ``device`` does not have."""
    if precision not in get_args(Precision):
        raise ConfigError(f"precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
    if precision == "tf32" and device.type != "cuda" and traits().is_here:
        raise ConfigError(f"contrast.precision tf32 needs a CUDA GPU, these rows are on {device.type}: use fp32")


def multiply(out: Tensor, a: Terms, b: Terms, *, add: bool) -> Tensor:
    """``out = a b`` or ``out += a b``, summed in the type of ``out``, the smallest products first.

    Of the products of terms those are left out that are as small as what the terms themselves leave out.
    """
    kept = max(len(a), len(b))
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < kept]
    for i, j in sorted(pairs, key=sum, reverse=True):
        _multiply(out, a[i], b[j], add=add)
        add = True
    return out


def transpose(terms: Terms) -> Terms:
    """Transpose each term of an operand."""
    return tuple(term.T for term in terms)


def _multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    # On a CPU bf16 products would be rounded to bf16; in fp32 they are exact.
    if not traits().is_gpu(a.device) or a.dtype == out.dtype:
        a, b = a.to(out.dtype), b.to(out.dtype)
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif add and traits().adds_products:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


@contextmanager
def _cuda_fp32_precision(kind: str) -> Iterator[None]:
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = kind
    try:
        yield
    finally:
        setting.fp32_precision = before


@dataclass(frozen=True)
class SoftmaxSums:
    r"""The running sums of an online softmax over keys, one row per anchor, updated in place.

    Attributes:
        normaliser: ``(N,)``, :math:`\sum_j e^{s_{ij} - r_i}`.
        weighted_keys: ``(N, d)``, :math:`\sum_j e^{s_{ij} - r_i} k_j`; ``None`` where no gradient is wanted.
        running_max: ``(N,)``, :math:`r_i`, the largest logit so far; ``None`` for :math:`r_i = 0`, which is right for
            logits of bounded size.
        squares: ``(N,)``, :math:`\sum_j e^{2 (s_{ij} - r_i)}`; ``None`` where no diagnostics are wanted.
        largest: ``(N,)``, the largest logit so far, for diagnostics of weighted keys, whose :math:`r_i` is that of the
            weighted terms; ``None`` where it is not wanted, or is the running maximum.
        count: ``(N,)``, the number of negatives so far, where only their logits tell; ``None`` where it is not wanted.
    """

    normaliser: Tensor
    weighted_keys: Tensor | None
    running_max: Tensor | None
    squares: Tensor | None = None
    largest: Tensor | None = None
    count: Tensor | None = None

    def __getitem__(self, rows: slice) -> SoftmaxSums:
        """The sums of some anchors; a view, so that adding to it adds to these."""
        weighted_keys = None if self.weighted_keys is None else self.weighted_keys[rows]
        return SoftmaxSums(
            self.normaliser[rows],
            weighted_keys,
            None if self.running_max is None else self.running_max[rows],
            None if self.squares is None else self.squares[rows],
            None if self.largest is None else self.largest[rows],
            None if self.count is None else self.count[rows],
        )

    def exponentials(self, logits: Tensor, mask: NegativeMask | None) -> Tensor:
        """Overwrite ``logits (N, c)`` with :math:`e^{s_{ij} - r_i}`, 0 for keys that are not negatives.

        A running maximum is raised to these logits first.
        """
        # Counted first: a mask by score needs the logits, which are overwritten below.
        if self.count is not None:
            self.count.add_(logits.shape[1] if mask is None else mask.factor(logits).sum(1))
        if self.running_max is None:  # logits of bounded size: no maximum, and masked keys are multiplied by 0
            factor = None if mask is None else mask.factor(logits)
            return logits.exp_() if factor is None else logits.exp_().mul_(factor)
        if mask is not None:
            logits.masked_fill_(mask.excluded(logits), -torch.inf)
        highest = logits.amax(1)
        if self.largest is not None:
            torch.maximum(self.largest, highest, out=self.largest)
        return logits.sub_(self.rescale(highest)[:, None]).exp_()

    def add(self, exponentials: Tensor) -> None:
        """Add the exponentials ``(N, c)`` of more keys to the sums of numbers; the kernel adds the weighted keys."""
        self.normaliser.add_(exponentials.sum(1))
        if self.squares is not None:
            self.squares.add_(exponentials.square().sum(1))

    def weigh(self, factor: Tensor) -> None:
        """Multiply what has been added so far by ``factor``, one for each anchor or for all of them."""
        self.normaliser.mul_(factor)
        if self.weighted_keys is not None:
            self.weighted_keys.mul_(factor if factor.ndim == 0 else factor[:, None])
        if self.squares is not None:
            self.squares.mul_(factor.square())

    def joined(self, sides: int) -> SoftmaxSums:
        """The sums of denominators that ``sides`` rows share, one after another; weighted keys stay those of a row.

        The sums of all rows are scaled to the largest maximum among those that share.
        """
        if sides == 1:
            return self
        running_max = None if self.running_max is None else self.running_max.unflatten(0, (-1, sides)).amax(1)
        if self.running_max is not None and running_max is not None:
            self.weigh(torch.exp(self.running_max - torch.stack([running_max] * sides, 1).flatten()))
        return SoftmaxSums(
            self.normaliser.unflatten(0, (-1, sides)).sum(1),
            self.weighted_keys,
            running_max,
            None if self.squares is None else self.squares.unflatten(0, (-1, sides)).sum(1),
            None if self.largest is None else self.largest.unflatten(0, (-1, sides)).amax(1),
        )

    def rescale(self, logits: Tensor) -> Tensor:
        """Raise the running maximum to ``logits (N,)`` where these are larger, scale the sums to it, and return it."""
        assert self.running_max is not None
        maximum = torch.maximum(self.running_max, logits)
        self.weigh(torch.exp(self.running_max - maximum))
        return self.running_max.copy_(maximum)


def probabilities(logits: Tensor, lse: Tensor, mask: NegativeMask | None) -> Tensor:
    r"""Overwrite ``logits (N, c)`` with :math:`e^{s_{ij} - \mathrm{lse}_i}`, 0 for keys that are not negatives.

    A negative's logit is never above ``lse (N,)``, but that of another key, which is not in it, may be.
    """
    factor = None if mask is None else mask.factor(logits)
    # Clamped: the exponential of a masked key could be infinite, and infinity times 0 is NaN.
    below = logits.sub_(lse[:, None])
    return below.exp_() if factor is None else below.clamp_max_(0.0).exp_().mul_(factor)


@runtime_checkable
class Kernel(Protocol):
    """The interface of a kernel."""

    def accumulate(
        self, sums: SoftmaxSums, q: Tensor, keys: Tensor, mask: NegativeMask | None, products: Products
    ) -> None:
        """Add the keys ``(c, d)`` to the sums of the anchors ``q (N, d)``."""

    def key_gradient(
        self, q: Tensor, keys: Tensor, lse: Tensor, mask: NegativeMask | None, products: Products
    ) -> Tensor:
        r"""The ``(c, d)`` rows :math:`\sum_i e^{s_{ij} - \mathrm{lse}_i} q_i` over the anchors that see key ``j``."""


# Anchors by keys of the largest block. Wider blocks make better matrix products, up to what these sizes give; on a CPU
# the logits (4 MB in fp32) should stay in cache between the two products, on a GPU a block must fill the device.
_LARGEST_BLOCK = {"cpu": (1024, 1024), "cuda": (4096, 8192)}


def _blocks(q: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut anchors x keys into blocks, with the loop over keys outermost.

    However small the problem, a block has at most ``4 d`` anchors and an eighth of the keys: half the size of the keys.
    """
    largest = _LARGEST_BLOCK["cuda" if traits().is_gpu(q.device) else "cpu"]
    rows = max(1, min(len(q), largest[0], 4 * q.shape[1]))
    columns = max(1, min(largest[1], math.ceil(len(keys) / 8)))
    for k in blocks(len(keys), columns):
        for a in blocks(len(q), rows):
            yield a, k


def _logits(workspace: Tensor, q: Terms, keys: Terms) -> Tensor:
    block = workspace[: len(q[0]) * len(keys[0])].view(-1, len(keys[0]))
    return multiply(block, q, transpose(keys), add=False)


def _workspace(q: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = next(_blocks(q, keys), (slice(0, 0), slice(0, 0)))  # the first block is the largest
    return q.new_empty(rows.stop * columns.stop, dtype=dtype)


def _split_blocks(
    q: Tensor, keys: Tensor, products: Products, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, Terms, Terms]]:
    """Yield the blocks with the operands of each. Anchors are split once, and keys once per columns of blocks."""
    q_terms = products.split(q, dtype)
    k_terms: Terms = ()
    split_columns = None
    for rows, columns in _blocks(q, keys):
        if columns != split_columns:
            k_terms, split_columns = products.split(keys[columns], dtype), columns
        yield rows, columns, tuple(term[rows] for term in q_terms), k_terms


class Chunked:
    """The kernel in plain torch, block by block: two matrix products a block and no tensor but of a block's size.

    A block of logits is exponentiated in place and multiplied with the same keys while both are in cache, so that the
    forward pass already holds the gradient: 4 N c d floating-point operations, where recomputing designs need 6.
    Logits and sums are fp32 (fp64 for fp64 rows), in whatever precision the operands are multiplied.
    """

    def accumulate(
        self, sums: SoftmaxSums, q: Tensor, keys: Tensor, mask: NegativeMask | None, products: Products = FP32
    ) -> None:
        """Implement :meth:`Kernel.accumulate`."""
        dtype = sums.normaliser.dtype
        workspace = _workspace(q, keys, dtype)
        for rows, columns, anchors, k in _split_blocks(q, keys, products, dtype):
            block = sums[rows]  # a view: what is added to it is added to the sums
            weights = block.exponentials(_logits(workspace, anchors, k), mask and mask.block(rows, columns))
            block.add(weights)
            if block.weighted_keys is not None:
                multiply(block.weighted_keys, products.split(weights, dtype), k, add=True)

    def key_gradient(
        self, q: Tensor, keys: Tensor, lse: Tensor, mask: NegativeMask | None, products: Products = FP32
    ) -> Tensor:
        """Implement :meth:`Kernel.key_gradient`."""
        out = keys.new_zeros(keys.shape, dtype=lse.dtype)
        workspace = _workspace(q, keys, lse.dtype)
        for rows, columns, anchors, k in _split_blocks(q, keys, products, lse.dtype):
            weights = probabilities(_logits(workspace, anchors, k), lse[rows], mask and mask.block(rows, columns))
            multiply(out[columns], transpose(products.split(weights, lse.dtype)), anchors, add=True)
        return out


def _product(a: Terms, b: Terms, dtype: torch.dtype) -> Tensor:
    return multiply(a[0].new_empty(len(a[0]), b[0].shape[1], dtype=dtype), a, b, add=False)


class Dense:
    """The kernel in its plainest form, all logits in one matrix, to compare ``chunked`` with. It needs N x c memory."""

    def accumulate(
        self, sums: SoftmaxSums, q: Tensor, keys: Tensor, mask: NegativeMask | None, products: Products = FP32
    ) -> None:
        """Implement :meth:`Kernel.accumulate`."""
        if not len(q) or not len(keys):
            return
        dtype = sums.normaliser.dtype
        k = products.split(keys, dtype)
        weights = sums.exponentials(_product(products.split(q, dtype), transpose(k), dtype), mask)
        sums.add(weights)
        if sums.weighted_keys is not None:
            sums.weighted_keys.add_(_product(products.split(weights, dtype), k, dtype))

    def key_gradient(
        self, q: Tensor, keys: Tensor, lse: Tensor, mask: NegativeMask | None, products: Products = FP32
    ) -> Tensor:
        """Implement :meth:`Kernel.key_gradient`."""
        anchors = products.split(q, lse.dtype)
        logits = _product(anchors, transpose(products.split(keys, lse.dtype)), lse.dtype)
        weights = products.split(probabilities(logits, lse, mask), lse.dtype)
        return _product(transpose(weights), anchors, lse.dtype)


_PLAIN: dict[str, Kernel] = {"chunked": Chunked(), "dense": Dense()}


@dataclass(frozen=True)
class CompilableKernel:
    """The kernel ``name``, as operators where a compiler traces it.

    A traced loop over blocks is one graph for each number of rows, and a workspace that is written in place is none.
    """

    name: str

    def accumulate(
        self, sums: SoftmaxSums, q: Tensor, keys: Tensor, mask: NegativeMask | None, products: Products = FP32
    ) -> None:
        """Implement :meth:`Kernel.accumulate`."""
        if not torch.compiler.is_compiling():
            with products.applied_on(q.device):
                _PLAIN[self.name].accumulate(sums, q, keys, mask, products)
            return
        _accumulate(
            sums.normaliser, sums.weighted_keys, sums.running_max, sums.squares, sums.largest, sums.count, q, keys,
            *_parts(mask), self.name, products.precision,
        )  # fmt: skip

    def key_gradient(
        self, q: Tensor, keys: Tensor, lse: Tensor, mask: NegativeMask | None, products: Products = FP32
    ) -> Tensor:
        """Implement :meth:`Kernel.key_gradient`."""
        if not torch.compiler.is_compiling():
            with products.applied_on(q.device):
                return _PLAIN[self.name].key_gradient(q, keys, lse, mask, products)
        gradient: Tensor = _key_gradient(q, keys, lse, *_parts(mask), self.name, products.precision)
        return gradient


_MASK_SCHEMA = (
    "Tensor? ids_a, Tensor? ids_k, Tensor? owners_a, Tensor? owners_k, bool owned, Tensor? limits, Tensor[] known, "
    "int[] texts"
)
_MaskParts = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, bool, Tensor | None, list[Tensor], list[int]
]


def _parts(mask: NegativeMask | None) -> _MaskParts:
    """A mask as arguments of an operator, which takes tensors and numbers alone."""
    mask = mask or NegativeMask()
    ids = (None, None) if mask.ids is None else (mask.ids.anchors, mask.ids.keys)
    owners = (None, None) if mask.owners is None else (mask.owners.anchors, mask.owners.keys)
    known = [tensor for each in mask.known for tensor in (each.anchors, each.keys, each.pairs)]
    return *ids, *owners, mask.owned, mask.limits, known, [each.texts for each in mask.known]


def _mask(parts: _MaskParts) -> NegativeMask | None:
    ids_a, ids_k, owners_a, owners_k, owned, limits, tensors, texts = parts
    known = [KnownPairs(*each) for each in zip(tensors[::3], tensors[1::3], tensors[2::3], texts, strict=True)]
    ids = None if ids_a is None or ids_k is None else InstanceIds(ids_a, ids_k)
    owners = None if owners_a is None or owners_k is None else InstanceIds(owners_a, owners_k)
    is_empty = ids is None and owners is None and limits is None and not known
    return None if is_empty else NegativeMask(ids, known, owners, owned, limits)


@torch.library.custom_op(
    "capt::accumulate",
    mutates_args=("normaliser", "weighted_keys", "running_max", "squares", "largest", "count"),
    # Written out, for torch infers no schema from `*others`; (a!) marks a tensor that is written in place.
    schema="(Tensor(a!) normaliser, Tensor(b!)? weighted_keys, Tensor(c!)? running_max, Tensor(d!)? squares, "
    f"Tensor(e!)? largest, Tensor(f!)? count, Tensor q, Tensor keys, {_MASK_SCHEMA}, str impl, str precision) -> ()",
)
def _accumulate(
    normaliser: Tensor,
    weighted_keys: Tensor | None,
    running_max: Tensor | None,
    squares: Tensor | None,
    largest: Tensor | None,
    count: Tensor | None,
    q: Tensor,
    keys: Tensor,
    *others: Any,
) -> None:
    sums = SoftmaxSums(normaliser, weighted_keys, running_max, squares, largest, count)
    *mask, impl, precision = others
    KERNELS[impl].accumulate(sums, q, keys, _mask(tuple(mask)), _products(precision))


@torch.library.custom_op(
    "capt::key_gradient",
    mutates_args=(),
    schema=f"(Tensor q, Tensor keys, Tensor lse, {_MASK_SCHEMA}, str impl, str precision) -> Tensor",
)
def _key_gradient(q: Tensor, keys: Tensor, lse: Tensor, *others: Any) -> Tensor:
    *mask, impl, precision = others
    return KERNELS[impl].key_gradient(q, keys, lse, _mask(tuple(mask)), _products(precision))


# The other operator returns nothing, so that torch needs no rule for its shape.
@_key_gradient.register_fake
def _(q: Tensor, keys: Tensor, lse: Tensor, *others: object) -> Tensor:
    return lse.new_empty(keys.shape)


def _products(precision: str) -> Products:
    return Products(precision)  # type: ignore[arg-type]


KERNELS: dict[str, Kernel] = {name: CompilableKernel(name) for name in _PLAIN}

r"""The precisions in which a kernel can multiply two fp32 matrices, and the error of each.

With :math:`|\hat{ab} - ab| \le \delta\,|a|\,|b|` for the product of two numbers, before fp32 sums:

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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from pretrain.base.errors import ConfigError

Precision = Literal["fp32", "tf32", "bf16x6", "bf16x3", "bf16"]
Terms = tuple[Tensor, ...]
"""Matrices of one shape whose sum is an operand, the largest first."""

RELATIVE_ERROR: dict[Precision, float] = {
    "fp32": 0.0, "tf32": 2**-9, "bf16x6": 2**-21, "bf16x3": 2**-14, "bf16": 2**-7 + 2**-16,
}  # fmt: skip
"""The bound :math:`\\delta` of each precision."""

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
    if precision == "tf32" and device.type != "cuda":
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
    if a.is_cpu or a.dtype == out.dtype:  # on a CPU bf16 products would be rounded to bf16; in fp32 they are exact
        a, b = a.to(out.dtype), b.to(out.dtype)
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif add:
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

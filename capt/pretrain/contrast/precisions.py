r"""Rows of a text in several precisions, to train vectors that are to be quantized.

Of a pooled vector :math:`x`, not normalised, the precisions are

.. math::
    \text{float: } x, \qquad \text{int8: } \operatorname{round}(127 \tanh x), \qquad \text{binary: }
    \operatorname{sign} x \; (1 \text{ where } x > 0, \text{ else } -1),

each divided by its length. The forward pass sees what is rounded, and the gradient passes straight through: it is that
of :math:`127 \tanh x`, and of :math:`\tanh x`. A row has the precisions side by side, in blocks of equal width, and is
a unit row as a whole: so whatever moves rows (micro-batches, ranks, the queue) moves those of all precisions, and the
loss of each is computed of its block (`ContrastOptions.widths`), exactly as that of rows cut to some features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

VectorPrecision = Literal["float", "int8", "binary"]
VECTOR_PRECISIONS: tuple[VectorPrecision, ...] = get_args(VectorPrecision)


def precision_rows(pooled: Float[Tensor, "n d"], precisions: Sequence[VectorPrecision]) -> Float[Tensor, "n w"]:
    """Unit rows with a block of ``d`` columns for each precision, in float32 at least.

    Args:
        pooled: vectors as they are pooled: their lengths decide what int8 keeps of them.
        precisions: in the order of the blocks.
    """
    x = pooled.to(torch.promote_types(pooled.dtype, torch.float32))
    blocks = [normalize(_in_precision(x, each), dim=-1, eps=1e-12) for each in precisions]
    # As a whole, for a block of zeros (int8 of a vector near 0) has no length of its own.
    return normalize(torch.cat(blocks, dim=-1), dim=-1, eps=1e-12)


def _in_precision(x: Tensor, precision: VectorPrecision) -> Tensor:
    if precision == "float":
        return x
    if precision == "int8":
        soft = 127 * x.tanh()
        hard = soft.detach().round()
    else:
        soft = x.tanh()
        hard = torch.where(x.detach() > 0, 1.0, -1.0).to(x.dtype)
    # The value of `hard` and the gradient of `soft`.
    return hard + (soft - soft.detach())

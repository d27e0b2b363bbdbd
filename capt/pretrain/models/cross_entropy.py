"""Cross entropy over a vocabulary with the gradient taken in the forward pass, in one buffer of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from capt.pretrain.base.blocks import blocks
from capt.pretrain.base.traits import traits

UNUSED = -100
"""The label of a row that is not predicted, as ``ignore_index`` of ``F.cross_entropy``."""

_BLOCK_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}  # fp32 rows per block: what stays in a core's L2 cache; a GPU


def _lift(x: Tensor) -> float:
    """Factor of gradients that are taken in the forward pass, before the loss scale.

    softmax - onehot is mostly far below fp16's smallest normal number; this power of two lifts it out.
    """
    return 4096.0 if x.dtype == torch.float16 else 1.0


class _MaskedCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of softmax(x w^T + bias), and the number of rows whose label is most probable."""

    # The logits are turned into softmax - onehot in place, block of rows by block of rows, so that the passes between
    # the three matrix products stay in the cache. 304 rows, 50,265 classes, h = 256, one thread: 250 ms in fp32 and
    # 89 ms in bf16 (F.linear + F.cross_entropy: 327 and 195 ms), and one logits-sized tensor instead of four.

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, classes: int, gradient: bool
    ) -> tuple[Tensor, Tensor]:
        lift = _lift(x)
        exact = torch.promote_types(x.dtype, torch.float32)
        bias_exact = bias.to(exact)
        if classes < len(bias):  # rows that only fill the products up have no probability
            bias_exact = torch.cat([bias_exact[:classes], bias_exact.new_full((len(bias) - classes,), -torch.inf)])
        logits = x @ weight.t()
        used = labels != UNUSED
        # Rows that are not predicted need a valid index; `used` takes them out of every sum.
        target = labels.clamp_min(0).unsqueeze(1)
        target_log_p = torch.empty_like(target, dtype=exact)
        correct = torch.empty_like(used)
        dbias = torch.zeros_like(bias_exact)
        block = max(1, _BLOCK_BYTES["cuda" if traits().is_gpu(x.device) else "cpu"] // (4 * max(1, weight.shape[0])))
        scratch = x.new_empty((min(block, len(x)), len(weight)), dtype=exact)
        for rows in blocks(len(x), block):
            part = torch.add(logits[rows], bias_exact, out=scratch[: rows.stop - rows.start])
            row_max, at_target = part.amax(1, keepdim=True), part.gather(1, target[rows])  # argmax is slow
            total = part.sub_(row_max).exp_().sum(1, keepdim=True)
            target_log_p[rows] = at_target - row_max - total.log()
            correct[rows] = (at_target == row_max).squeeze(1)
            if gradient:
                # In 16 bits the difference is taken in fp32, and rounded once on its way into the logits.
                p = torch.mul(part, 1 / total, out=logits[rows] if logits.dtype == exact else part)
                p.scatter_add_(1, target[rows], p.new_full((), -1.0).expand_as(target[rows]))
                dbias += used[rows].to(exact) @ p
                if p is part:
                    logits[rows] = p if lift == 1.0 else p.mul_(lift)
        if gradient:
            ctx.save_for_backward(x, weight, logits, used, dbias.to(bias.dtype))
            ctx.lift = lift
        correct &= used
        correct_count = correct.sum()
        ctx.mark_non_differentiable(correct_count)
        return -(target_log_p.squeeze(1) * used).sum(), correct_count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor, None, None, None]:
        x, weight, grad_logits, used, dbias = ctx.saved_tensors
        # Applied to the small factors of each product and never to the logits-sized one.
        row_factor = (used * (grads[0] / ctx.lift)).to(x.dtype).unsqueeze(1)
        dx = (grad_logits @ weight) * row_factor if ctx.needs_input_grad[0] else None
        dweight = grad_logits.t() @ (x * row_factor) if ctx.needs_input_grad[1] else None
        return dx, dweight, dbias * grads[0].to(dbias.dtype), None, None, None


def masked_cross_entropy(
    x: Float[Tensor, "r h"],
    weight: Float[Tensor, "V h"],
    bias: Float[Tensor, " V"],
    labels: Int[Tensor, " r"],
    classes: int | None = None,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""], Int[Tensor, ""]]:
    r"""Sum of :math:`-\log \mathrm{softmax}(x W^T + b)_{label}` over the rows whose label is not ``UNUSED``.

    Under autocast the matrix products run in its precision; logits are completed and normalised in fp32.

    Args:
        x: hidden states.
        weight: one row for each class.
        bias: one value for each class.
        labels: the class of each row, or ``UNUSED``.
        classes: how many of the V rows are classes, the first ones; the others are left out (None = all).

    Returns:
        The sum (fp32), the number of rows whose most probable class is the label, and the number of used rows.
    """
    if torch.is_autocast_enabled(x.device.type):
        low = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(low), weight.to(low)
    with torch.autocast(x.device.type, enabled=False):
        loss, correct = _MaskedCrossEntropy.apply(
            x, weight, bias, labels, len(weight) if classes is None else classes, torch.is_grad_enabled()
        )
    return loss, correct, (labels != UNUSED).sum()


# Losses whose logits do not fit into memory but for a block of rows: gradients are taken in the forward pass.


_LOGITS_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
_FEWEST_ROWS = 128
"""Rows of a block at least: each adds once to the gradient of the weight, which is as large as a block of logits."""


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, losses: Callable[..., tuple[Tensor, Tensor]], size: int, gradient: bool, x: Tensor, weight: Tensor,
        bias: Tensor, *of_rows: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        exact = torch.promote_types(x.dtype, torch.float32)
        lift = _lift(x)
        loss, correct = x.new_zeros((), dtype=exact), x.new_zeros((), dtype=torch.long)
        # The gradients of all blocks add up in fp32, whatever the precision of the weights.
        dx, sums = torch.empty_like(x), [torch.zeros_like(each, dtype=exact) for each in (weight, bias)]
        for rows in blocks(len(x), size):
            with torch.set_grad_enabled(gradient):
                inputs = [each.detach().requires_grad_(gradient) for each in (x[rows], weight, bias)]
                part, hits = losses(*inputs, *(each[rows] for each in of_rows))
                if gradient:
                    dx[rows], *of_weights = torch.autograd.grad(part, inputs, part.new_full((), lift))
                    for total, each in zip(sums, of_weights, strict=True):
                        total += each
            loss += part.detach()
            correct += hits
        if gradient:
            ctx.save_for_backward(dx, *(total.to(each.dtype) for total, each in zip(sums, (weight, bias), strict=True)))
            ctx.lift = lift
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        scaled = (each * (grads[0] / ctx.lift).to(each.dtype) for each in ctx.saved_tensors)
        of_rows = len(ctx.needs_input_grad) - 6
        return None, None, None, *scaled, *[None] * of_rows


def in_blocks(
    losses: Callable[..., tuple[Tensor, Tensor]],
    x: Float[Tensor, "r h"],
    weight: Float[Tensor, "V h"],
    bias: Float[Tensor, " V"],
    *of_rows: Tensor,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """The sum of ``losses(x, weight, bias, *of_rows)`` over blocks of rows, in the memory of one block's logits.

    Args:
        losses: of some rows: their sum, of which every row's part depends on that row alone, and a count.
        x: hidden states.
        weight: one row for each class.
        bias: one value for each class.
        of_rows: further tensors with one row for each row of ``x``.

    Returns:
        The sum, and the sum of the counts.
    """
    bytes_ = _LOGITS_BYTES["cuda" if traits().is_gpu(x.device) else "cpu"]
    size = max(_FEWEST_ROWS, bytes_ // (4 * max(1, weight.shape[0])))
    loss, correct = _InBlocks.apply(losses, size, torch.is_grad_enabled(), x, weight, bias, *of_rows)
    return loss, correct

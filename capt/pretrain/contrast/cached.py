r"""The gradient of a contrast over many micro-batches, in the memory of one.

GradCache (Gao et al. 2021, arXiv:2101.06983). A contrast :math:`L(v_1, \dots, v_A)` over the representations
:math:`v_a = f(x_a; \theta)` of ``A`` micro-batches is not a sum over micro-batches: each row is a negative of all
others. Its gradient is, by the chain rule,

.. math::
    \frac{\partial L}{\partial \theta} = \sum_a \Big(\frac{\partial v_a}{\partial \theta}\Big)^\top g_a,
    \qquad g_a = \frac{\partial L}{\partial v_a},

and :math:`g_a` needs no graph of :math:`f`. So every micro-batch is encoded twice: first all of them without a graph,
which gives :math:`L` and all :math:`g_a`; then one after the other with its graph, of which the gradient of
:math:`\langle v_a, g_a \rangle` (:math:`g_a` held fixed) is the term above. The second pass draws the random numbers of
the first, so that dropout is the same in both, and the result is that of one large batch to rounding.

Where memory is left, the first micro-batches keep the graph of the first pass, and are not encoded again: in units of
a forward pass a step costs 3 for each of them in place of 4, and with activation checkpointing, whose graphs are small,
4 in place of 5. The gradient is the same.

In a training loop of one's own::

    def contrast(s, s_hat):
        loss = capt_loss(s, s_hat, queue, temperature=0.05)
        queue.enqueue(s, s_hat)
        return loss

    loss = cached_backward(encode, micro_batches, contrast)  # in place of loss.backward()
    optimizer.step()
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.traits import traits

BatchT = TypeVar("BatchT")
Encode = Callable[[BatchT], Sequence[Tensor]]
"""The representations of a micro-batch: one tensor a view, rows first; the same number of views each time."""


class RepresentationCache:
    """Representations of micro-batches without their graphs, and the random numbers that each was drawn with."""

    def __init__(self) -> None:
        self._leaves: list[tuple[Tensor, ...]] = []
        self._random: dict[int, tuple[Tensor, Tensor | None]] = {}

    @torch.no_grad()
    def record(self, encode: Callable[[], Sequence[Tensor]]) -> None:
        """Encode the next micro-batch without a graph; its representations become leaves that collect gradients."""
        self._random[len(self._leaves)] = (torch.get_rng_state(), torch.cuda.get_rng_state() if _on_gpu() else None)
        self.keep(encode())

    def keep(self, views: Sequence[Tensor]) -> None:
        """Take the representations of the next micro-batch, whose graph the caller holds until `surrogate`."""
        self._leaves.append(tuple(view.detach().requires_grad_() for view in views))

    def views(self) -> tuple[Tensor, ...]:
        """Each view of all micro-batches, one after another: what the contrast is computed from."""
        return tuple(torch.cat(parts) for parts in zip(*self._leaves, strict=True))

    def rewind(self, number: int) -> None:
        """Draw from here on the random numbers that micro-batch ``number`` was recorded with."""
        cpu, gpu = self._random[number]
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)

    def surrogate(self, number: int, views: Sequence[Tensor]) -> Tensor:
        r""":math:`\sum \langle v_a, g_a \rangle` over the views of micro-batch ``number``, encoded with a graph.

        Its gradient is the micro-batch's part of that of the contrast; its value means nothing.
        """
        total = views[0].new_zeros(())
        for view, leaf in zip(views, self._leaves[number], strict=True):
            # No gradient: the loss does not depend on this view.
            if leaf.grad is not None:
                total = total + (view * leaf.grad).sum()
        return total


def cached_backward(
    encode: Encode[BatchT], micro_batches: Iterable[BatchT], contrast: Callable[..., Tensor], *, keep: int = 0
) -> Tensor:
    """Add the gradient of one contrast over all ``micro_batches`` to the parameters, in the memory of one of them.

    Args:
        encode: a micro-batch -> its representations, one tensor a view.
        micro_batches: what one optimizer step sees on this rank; of an iterator, such as ``zip(a, b)``, all are held.
        contrast: the views, each ``(n, d)`` over all micro-batches -> the loss. Called once, and may push the views
            into the queue after the loss. Under several ranks it is the sharded loss, and ``encode`` may be a module of
            DDP, called within ``no_sync`` but for the last micro-batch.
        keep: how many micro-batches, the first ones, keep their graph and are encoded once. DDP allows none.

    Returns:
        The loss, without a graph. Under several ranks it is this rank's part: their mean is the loss of all.

    Raises:
        ConfigError: there is no micro-batch.
    """
    micro_batches = list(micro_batches)  # they are gone through twice
    if not micro_batches:
        raise ConfigError("cached_backward needs one micro-batch or more")
    cache, kept = RepresentationCache(), [encode(batch) for batch in micro_batches[:keep]]
    for views in kept:
        cache.keep(views)
    # First pass: representations alone, each with the random numbers that it was drawn with.
    for batch in micro_batches[keep:]:
        cache.record(functools.partial(encode, batch))
    loss = contrast(*cache.views())
    loss.backward()  # ends at the leaves: the gradient of every representation
    # Second pass: each micro-batch with a graph, kept or made again, which is led on to the parameters.
    # Reversed, to be popped in order: each graph is freed after its backward pass.
    kept.reverse()
    for number, batch in enumerate(micro_batches):
        if kept:
            cache.surrogate(number, kept.pop()).backward()
        else:
            cache.rewind(number)
            cache.surrogate(number, encode(batch)).backward()
    return loss.detach()


def _on_gpu() -> bool:
    return traits().gpu_is_here() and torch.cuda.is_initialized()

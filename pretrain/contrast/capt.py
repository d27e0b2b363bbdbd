"""The CAPT loss (Eq. 2-4), on top of :func:`~pretrain.contrast.info_nce.info_nce`."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from pretrain.contrast.checks import InBatch, Reduction
from pretrain.contrast.info_nce import info_nce
from pretrain.contrast.kernels.products import Precision
from pretrain.contrast.queue import ShardedQueue
from pretrain.contrast.stats import ContrastStats
from pretrain.engine import distributed


def capt_loss(
    s: Float[Tensor, "n d"],
    s_hat: Float[Tensor, "n d"],
    queue: ShardedQueue | None = None,
    *,
    temperature: float | Float[Tensor, ""],
    queue_share: float | None = None,
    hardness: float = 0.0,
    group: distributed.Group = None,
    equal_rows: bool = False,
    in_batch: InBatch = "global",
    reduction: Reduction = "mean",
    grad_reduction: Reduction = "mean",
    ids: Int[Tensor, " n"] | None = None,
    impl: str = "chunked",
    precision: Precision = "fp32",
    stats: ContrastStats | None = None,
) -> Float[Tensor, ""]:
    r"""CAPT's loss between original sequences and their corruptions, exact over all ranks (Eq. 2-4).

    .. math::
        \mathcal{L}(x_i) = -\log \frac{e^{s_i \cdot \hat s_i / \tau}}{\sum_j e^{s_i \cdot \hat s_j / \tau} +
        \sum_{j \neq i} e^{s_i \cdot s_j / \tau} + \sum_{q \in \mathcal{Q}} e^{s_i \cdot q / \tau}}

    and :math:`\mathcal{L}(\hat x_i)` likewise with the views exchanged (section 2.2 adds the queue :math:`\mathcal{Q}`
    to Eq. 2 and 3). Both views are anchors, and both views of every other sample are negatives.

    Args:
        s: unit rows, the originals of this rank.
        s_hat: unit rows, their corruptions.
        queue: frozen negatives from earlier steps; push ``queue.enqueue(s, s_hat)`` after the loss.
        queue_share: how much the queue may weigh beside the live rows (None: every row counts once, as above); see
            :func:`~pretrain.contrast.info_nce.info_nce`.
        hardness: by how much near rows of the queue count more than far ones (0: every row counts once, as above); see
            :func:`~pretrain.contrast.info_nce.info_nce`.
        temperature: ``tau``, for instance of :func:`~pretrain.contrast.temperature.inverted_triangle` (Eq. 6).
        group: the ranks that train together.
        equal_rows: the caller knows that all ranks hold as many samples, so that they need not ask each other.
        in_batch: live negatives from all ranks, as if they were one large batch, from this rank, or none.
        reduction: ``mean`` is :math:`\frac1n \sum_i [\mathcal{L}(x_i) + \mathcal{L}(\hat x_i)]` over the samples of all
            ranks, the scale of a mean-token MLM loss; ``sum`` is Eq. 4 to the letter.
        grad_reduction: how the engine combines gradients; see :func:`~pretrain.contrast.info_nce.info_nce`.
        ids: instance of each sample, to take copies of the same text out of the negatives.
        impl: ``chunked`` or ``dense``.
        precision: of the matrix products; see :func:`~pretrain.contrast.info_nce.info_nce`.
        stats: filled with diagnostics.

    Raises:
        ConfigError: see :func:`~pretrain.contrast.info_nce.info_nce`.
    """
    loss = info_nce(
        s, s_hat, temperature=temperature, queue=queue, queue_share=queue_share, hardness=hardness, in_batch=in_batch,
        symmetric=True, within_view=True, ids=ids, group=group, equal_rows=equal_rows, reduction=reduction,
        grad_reduction=grad_reduction, impl=impl, precision=precision, stats=stats,
    )  # fmt: skip
    return loss if reduction == "sum" else 2 * loss  # two anchors per sample

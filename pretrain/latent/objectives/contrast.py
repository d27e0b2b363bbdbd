"""InfoNCE between the two views of a batch: L_CL of the paper."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from pretrain.base import distributed
from pretrain.contrast import ShardedQueue, info_nce
from pretrain.engine.autograd_collectives import sum_over_ranks
from pretrain.latent.config import ContrastSection
from pretrain.latent.data.sampled_batch import SampledBatch
from pretrain.latent.models.posterior import EncoderOutput


def contrast_loss(
    encoded: EncoderOutput, batch: SampledBatch, section: ContrastSection, queue: ShardedQueue | None
) -> Float[Tensor, ""]:
    """InfoNCE (Eq. 8 to 10, negated) with cosine similarity; the negatives are the rows of all ranks.

    ``contrast.over`` chooses z or h. As released, ``contrast.mean_pair`` adds the batch's mean z and mean z+ as one
    more pair (on rank 0), and ``contrast.prior_negatives`` adds draws of the prior as negatives. Afterwards the
    positives join the queue.
    """
    views = (encoded.z if section.over == "z" else encoded.h).unflatten(0, (2, -1))[:, : batch.valid_rows]
    if section.mean_pair:
        means = sum_over_ranks(views.sum(1)) / batch.total
        views = torch.cat([means[:, None][:, : int(distributed.rank() == 0)], views], dim=1)
    anchors, positives = F.normalize(views, dim=-1).unbind()
    loss: Tensor = info_nce(
        anchors,
        positives,
        temperature=section.temperature,
        queue=queue,
        negatives=None if batch.negatives is None else F.normalize(batch.negatives, dim=-1),
        ids=batch.ids,
        impl="chunked" if queue is not None else "dense",  # without a queue the logits are few: one pass over them all
    )
    if queue is not None:
        queue.enqueue(positives.detach(), ids=batch.ids)
    return loss

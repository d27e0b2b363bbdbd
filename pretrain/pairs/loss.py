"""The contrast of queries and documents as a term of training, with its queue of documents."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from capt.pretrain.contrast.info_nce import info_nce
from capt.pretrain.contrast.metrics import ContrastStats
from capt.pretrain.contrastive.term import ContrastTerm, options_of
from capt.pretrain.contrastive.views import Views


class PairTerm(ContrastTerm):
    """The loss of queries and documents of all ranks in the form that ``contrast.directions`` names.

    ``s`` are queries and ``s_hat`` their positives. The queue holds positives alone.
    """

    pushed = 1

    def loss(self, views: Views, *, step: int, stats: ContrastStats | None = None) -> Float[Tensor, ""]:
        """The loss of some pairs of every rank, without its weight; their documents then enter the queue."""
        section = self.section
        queue = self.queue if step >= section.queue_start else None
        masks = section.mask_duplicates
        options = replace(options_of(section), equal_rows=True)
        if views.own_alone:
            queue, options = (
                None,
                replace(options, directions="infonce", in_batch="none", hardness=0.0, queue_share=None),
            )

        def contrast(stats: ContrastStats | None = None) -> Tensor:
            return info_nce(
                views.s, views.s_hat, temperature=views.temperature, queue=queue, negatives=views.negatives,
                negative_ids=views.negative_ids if masks and views.negatives is not None else None,
                negative_owners=views.owners if views.negatives is not None else None,
                ids=views.ids if masks else None, stats=stats, options=options,
            )  # fmt: skip

        loss = contrast()
        if stats is not None:  # in a pass of its own, as in `ContrastTerm.loss`
            with torch.no_grad():
                contrast(stats)
        if section.momentum is None:
            self.push(views)
        return loss

    def push(self, views: Views) -> None:
        """Put the positives of some pairs into the queue, if there is one."""
        if self.queue is not None:
            self.queue.enqueue(views.s_hat.detach(), ids=views.ids if self.section.mask_duplicates else None)

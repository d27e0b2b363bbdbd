"""The losses of the pairs of a step as a term of training, with its queue of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from capt.pretrain.config.contrast import ContrastSection
from capt.pretrain.contrast.distillation import distillation_loss
from capt.pretrain.contrast.info_nce import info_nce
from capt.pretrain.contrast.metrics import ContrastStats
from capt.pretrain.contrast.options import ContrastOptions
from capt.pretrain.contrast.queue import ShardedQueue
from capt.pretrain.contrast.scored import cosent_loss, cosine_regression_loss
from capt.pretrain.contrast.similarity import Similarity, similarity_nce
from capt.pretrain.contrast.teacher import cosine_distance_loss, listwise_loss, squared_distance_loss
from capt.pretrain.contrastive.term import ContrastTerm, options_of
from capt.pretrain.contrastive.views import Views
from capt.pretrain.pairs.config import PairContrast
from capt.pretrain.pairs.distillation_config import PairDistillation
from capt.pretrain.pairs.losses import GROUP, NO_LOSS, find_loss
from capt.pretrain.pairs.views import PairViews, Part
from capt.pretrain.registry import load_entry


@dataclass(frozen=True)
class LossRows:
    """Input of a loss of pairs (`PairLoss.function`): the rows of one part of a step on this rank.

    Attributes:
        views: the vectors, and what is known of them.
        part: which rows they are.
        section: of the contrast.
        options: of the contrast; all ranks have equally many rows where ``equal_rows``.
        temperature: of the part; one for each row where sources of one contrast have their own.
        queue: documents of earlier steps; None: none, or they are not read yet.
        stats: filled with diagnostics by a loss that ``contrasts``.
        similarity: of the rows; None: they are unit vectors, compared by their product.
    """

    views: PairViews
    part: Part
    section: ContrastSection
    options: ContrastOptions
    temperature: float | Tensor
    queue: ShardedQueue | None = None
    stats: ContrastStats | None = None
    similarity: Similarity | None = None


def contrast(rows: LossRows) -> Float[Tensor, ""]:
    """InfoNCE of queries and documents in the form that ``contrast.directions`` names."""
    views, queue, options = rows.views, rows.queue, rows.options
    masks = rows.section.mask_duplicates
    known = views.known if masks else None
    if rows.part.own_alone:
        # The query sees its own negatives alone, so all that concerns other candidates is off.
        queue = None
        options = replace(options, directions="infonce", in_batch="none", hardness=0.0, queue_share=None)

    def computed(stats: ContrastStats | None = None) -> Tensor:
        given: dict[str, Any] = dict(
            temperature=rows.temperature, negatives=views.negatives,
            negative_ids=views.negative_ids if masks and views.negatives is not None else None,
            negative_owners=views.owners if views.negatives is not None else None,
            ids=views.ids if masks else None, query_ids=views.query_ids if known is not None else None,
            known=known, stats=stats, options=options,
        )  # fmt: skip
        if rows.similarity is not None:
            return similarity_nce(views.s, views.s_hat, rows.similarity, **given)
        return info_nce(views.s, views.s_hat, queue=queue, **given)

    loss = computed()
    if rows.stats is not None:  # in a pass of its own, as in `ContrastTerm.loss`
        with torch.no_grad():
            computed(rows.stats)
    return loss


def cosent(rows: LossRows) -> Float[Tensor, ""]:
    """CoSENT of scored pairs (`cosent_loss`)."""
    views = rows.views
    assert views.scores is not None
    return cosent_loss(views.s, views.s_hat, views.scores, temperature=rows.temperature, options=rows.options)


def cosine(rows: LossRows) -> Float[Tensor, ""]:
    """Regression of the cosine on the score (`cosine_regression_loss`)."""
    views = rows.views
    assert views.scores is not None
    return cosine_regression_loss(views.s, views.s_hat, views.scores, options=rows.options)


def none(rows: LossRows) -> Float[Tensor, ""]:
    """No loss: what a teacher's vectors train needs none beside theirs."""
    return rows.views.s.new_zeros(())


class PairTerm(ContrastTerm):
    r"""The losses of queries and documents of all ranks, each over its part of the rows of the step.

    With :math:`n_p` of the :math:`N` rows of the step in part :math:`p`, the loss is :math:`\sum_p \frac{n_p}{N} L_p`:
    each of them a row of `capt.pretrain.pairs.losses`. The divergence from a teacher's scores is added with its weight,
    as a mean over the rows that have such scores, times their share; the losses of a teacher's vectors are means over
    all texts of the step. The queue holds positives of the contrast alone.
    """

    queued_views = 1

    def __init__(
        self,
        section: PairContrast,
        width: int,
        batch: int,
        distillation: PairDistillation | None = None,
        similarity: Similarity | None = None,
    ) -> None:
        super().__init__(section, width, batch)
        self._similarity = similarity
        self._distillation = distillation or PairDistillation()
        self._found: dict[str, list[Tensor]] = {}

    def loss(
        self, views: Views, *, step: int, batch: int | None = None, stats: ContrastStats | None = None
    ) -> Float[Tensor, ""]:
        """The loss of some pairs of every rank, without its weight; their documents then enter the queue."""
        assert isinstance(views, PairViews)
        total = views.s.new_zeros(())
        found: dict[str, list[tuple[float, Tensor]]] = {}
        queue = self.queue if step >= self.section.queue_start else None
        for part in views.parts:
            alone = len(views.parts) == 1
            some = views if alone else views.of(part)
            # The sources of a part fall unevenly on the ranks; the rows of a whole step do not.
            options = replace(options_of(self.section), equal_rows=alone)
            row = find_loss(part.loss)
            temperature = part.temperature or views.temperature
            # Sources of one contrast may have temperatures of their own; any other part is of one source.
            if row.contrasts and part.temperature is None and some.temperatures is not None:
                temperature = some.temperatures
            if part.loss != NO_LOSS:
                rows = LossRows(
                    some, part, self.section, options, temperature, queue,
                    stats if row.contrasts else None, self._similarity,
                )  # fmt: skip
                loss = load_entry(row.function, GROUP, f"data.loss {part.loss}", "MODULE:FUNCTION")(rows)
                found.setdefault(row.metric, []).append((part.share, loss.detach()))
                total = total + part.share * loss
            if self._distillation.weight and part.taught:
                taught = self._distilled(some, part, options, temperature)
                found.setdefault("loss/distillation", []).append((part.taught, taught.detach()))
                total = total + self._distillation.weight * part.taught * taught
        if views.teacher_vectors is not None:
            for name, weight, loss in self._vector_losses(views):
                found[f"loss/teacher_{name}"] = [(1.0, loss.detach())]
                total = total + weight * loss
        for name, values in found.items():
            # A step may have several parts of one loss; the report is their mean over rows.
            mean = sum(share * value for share, value in values) / sum(share for share, _ in values)
            self._found.setdefault(name, []).append(torch.as_tensor(mean))
        if self.section.momentum is None:
            self.push(views)
        return total

    def _distilled(self, views: PairViews, part: Part, options: ContrastOptions, temperature: float | Tensor) -> Tensor:
        assert views.teacher is not None
        # Some rows of the part have no teacher: these are left out, and ranks no longer have equally many.
        if part.taught < part.share:
            rows = views.teacher.isfinite().nonzero()[:, 0]
            views, options = views.chosen(rows), replace(options, equal_rows=False)
            temperature = temperature[rows] if isinstance(temperature, Tensor) and temperature.ndim else temperature
        assert views.negatives is not None
        assert views.owners is not None
        assert views.teacher is not None
        assert views.negative_teacher is not None
        return distillation_loss(
            views.s, views.s_hat, views.negatives, negative_owners=views.owners,
            positive_scores=views.teacher, negative_scores=views.negative_teacher,
            temperature=temperature, teacher_temperature=self._distillation.temperature, options=options,
        )  # fmt: skip

    def _vector_losses(self, views: PairViews) -> Iterator[tuple[str, float, Tensor]]:
        """Each loss of the teacher's vectors, with its name and weight; ranks may have different numbers of texts."""
        section, options, teacher = self._distillation, options_of(self.section), views.teacher_vectors
        assert teacher is not None
        if section.cosine:
            assert views.taught is not None
            yield "cosine", section.cosine, cosine_distance_loss(views.taught, teacher, options=options)
        if section.mse:
            assert views.taught is not None
            yield "mse", section.mse, squared_distance_loss(views.taught, teacher, options=options)
        if section.listwise:
            assert views.texts is not None
            temperature = section.listwise_temperature
            yield (
                "listwise",
                section.listwise,
                listwise_loss(views.texts, teacher, temperature=temperature, options=options),
            )

    def take_losses(self) -> dict[str, Tensor]:
        """Each loss of the step, in the mean over its rows; then forget them."""
        found, self._found = self._found, {}
        return {name: torch.stack(values).mean() for name, values in found.items()}

    def push(self, views: Views) -> None:
        """Put the positives of the contrast's pairs into the queue, if there is one."""
        if self.queue is None:
            return
        assert isinstance(views, PairViews)
        only = views.only
        contrasted = [number for part in views.parts if find_loss(part.loss).contrasts for number in part.sources]
        if len(views.parts) > 1:
            assert views.sources is not None
            only = torch.isin(views.sources, views.sources.new_tensor(contrasted)).nonzero()[:, 0]
        elif not contrasted:
            return
        ids = views.ids if self.section.mask_duplicates else None
        self.queue.enqueue(views.s_hat.detach(), ids=ids, only=only)

"""Refusals of pairs that a job cannot train on, before the first step."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError, DataError, counted
from capt.pretrain.pairs.config import PairJob
from capt.pretrain.pairs.known import left_out
from capt.pretrain.pairs.representations import check_loss
from capt.pretrain.pairs.sources import SourceRows
from capt.pretrain.pairs.store import RowsRecord

logger = logging.getLogger(__name__)

_MOST_COMPARED = 1 << 20
"""Rows of all sources up to which it is counted before the first step what is left out: a second."""

_MUCH = 0.1
"""Share of the documents of a step from which on it is a warning that they are left out."""


def check_source_rows(job: PairJob, pairs: SourceRows, record: RowsRecord) -> None:
    """Refuse a source that the losses of the job cannot train on; warn of negatives that it does not use."""
    source, section = pairs.source, job.model
    check_loss(section.representation, pairs.loss_name)
    if record.unused and distributed.rank() == 0:
        logger.warning(
            "source %s: %s of the rows are not used; data.negatives is 0, and says how many a query takes a step",
            source.name, counted(record.unused, "hard negative"),
        )  # fmt: skip
    # Before the first step: a row over the budget may come after hours.
    most = pairs.most_tokens
    if (budget := job.batch.micro_tokens) is not None and most > budget:
        raise DataError(
            f"source {source.name}: a row may have {most:,} tokens, and batch.micro_tokens is {budget:,}: set "
            f"batch.micro_tokens={most} or more, or allow shorter texts (data.sequence_length) or fewer negatives"
        )
    # Without dropout the two views of one text are the same vector, and teach nothing about it.
    whole = not pairs.view.corrupts and pairs.view.draw is None
    alike = whole and not (section.dropout or section.attention_dropout)
    if alike and pairs.loss.contrasts and pairs.scores is None and pairs.is_one_column:
        raise ConfigError(
            f"source {source.name}: every text is its own positive, and model.dropout is 0, so that both views are "
            "the same: set model.dropout above 0, or data.view=corrupted"
        )
    of_loss = "teacher" in pairs.loss.needs
    if record.unscored and (job.distillation.weight or of_loss):
        asks = f"the loss {pairs.loss_name}" if of_loss else "distillation.weight"
        remedy = "divide the source" if of_loss else "set distillation.weight=0, or divide the source"
        raise DataError(
            f"{record.unscored}: pos_scores or neg_scores are missing, which other rows of source {source.name} "
            f"have: {asks} needs both in every row of a source, or in none; {remedy}"
        )
    if of_loss and not pairs.has_teacher:
        raise DataError(
            f"source {source.name}: the loss {pairs.loss_name} needs a teacher's scores (pos_scores, neg_scores); "
            "capt mine --cross-encoder writes them"
        )
    if pairs.loss.contrasts and bool((pairs.documents.keys == pairs.documents.keys[0]).all()):
        raise DataError(f"source {source.name}: all documents are one text: there is nothing to tell apart")


def check_sizes(job: PairJob, sources: Sequence[SourceRows]) -> None:
    """Refuse a source that has fewer pairs than a step takes from it."""
    batch, mixed = job.batch.global_, job.data.batches == "mixed"
    total = sum(pairs.source.weight for pairs in sources)
    for pairs in sources:
        # A mixed step has of a source its share, to one sample.
        most = min(batch, math.ceil(batch * pairs.source.weight / total) + 1) if mixed else batch
        if len(pairs) < most:
            fewer = "lower its weight, or batch.global" if mixed else f"set batch.global to {len(pairs):,} or fewer"
            raise DataError(
                f"source {pairs.source.name}: {len(pairs):,} pairs do not fill {'its part of ' if mixed else ''}a "
                f"step, in which a pair comes once: {fewer}"
            )
    if job.distillation.weight and not any(pairs.has_teacher for pairs in sources):
        raise DataError(
            "distillation.weight: no source has a teacher's scores (pos_scores, neg_scores); capt mine "
            "--cross-encoder writes them, or set distillation.weight=0"
        )


def check_known_positives(job: PairJob, sources: Sequence[SourceRows]) -> None:
    """Refuse pairs of which no query has a negative; say how many documents are known positives of a query."""
    section = job.contrast
    # Documents of other sources may be negatives too, in a mixed step or by way of the queue.
    sees_others = len(sources) > 1 and (job.data.batches == "mixed" or section.queue > 0)
    for pairs in sources:
        if not pairs.loss.contrasts or not pairs.source.in_batch or not section.mask_duplicates:
            continue
        if sum(map(len, sources)) > _MOST_COMPARED:
            continue
        found = left_out(pairs.keys, [each.known for each in sources])
        if found.alone == len(pairs) and not sees_others and not pairs.source.negatives:
            raise DataError(
                f"source {pairs.source.name}: every document of its {len(pairs):,} pairs is a known positive of "
                "every query, so that no query has a negative and the loss is 0: give it pairs of different "
                "queries and documents, or hard negatives (data.negatives)"
            )
        if distributed.rank() == 0 and found.share:
            level = logging.WARNING if found.share >= _MUCH or found.alone else logging.INFO
            logger.log(level, "source %s: %s", pairs.source.name, found.text)


def require_hard_negatives(sources: Sequence[SourceRows], batch: str, *, queue: bool) -> None:
    """Refuse ``batch``, which is of one pair, without hard negatives where a loss compares pairs with each other."""
    remedy = "set batch.global to 2 or more with contrast.cached=auto and contrast.in_batch=global"
    for pairs in sources:
        if pairs.loss.contrasts and queue:
            continue  # its queries are compared with the queue
        if pairs.loss.compares and not pairs.source.negatives:
            raise ConfigError(
                f"source {pairs.source.name}: {batch} compares a query with no other pair and has no "
                f"negative, so that the loss is 0 and nothing is learned: {remedy}, data.negatives above 0, or "
                "contrast.queue"
            )
        without = int((np.diff(pairs.negatives.starts) == 0).sum())
        if pairs.loss.compares and without:
            raise ConfigError(
                f"source {pairs.source.name}: {batch} compares a query with no other pair, and "
                f"{counted(without, 'row')} of {len(pairs):,} have no hard negative, so that their loss is 0: "
                f"{remedy}, or contrast.queue, or leave them out"
            )

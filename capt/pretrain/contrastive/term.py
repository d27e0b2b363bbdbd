"""The CAPT loss as a term of a training task: its queue, temperature, diagnostics, and its state in checkpoints."""

from __future__ import annotations

import functools
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.contrast.info_nce import capt_loss
from capt.pretrain.contrast.metrics import ContrastStats, RowSample
from capt.pretrain.contrast.options import ContrastOptions
from capt.pretrain.contrast.queue import ShardedQueue
from capt.pretrain.contrast.temperature import Schedule, build_temperature
from capt.pretrain.contrastive.views import Views

if TYPE_CHECKING:
    from capt.pretrain.config.contrast import ContrastSection, TemperatureSection

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ContrastTerm:
    """The CAPT loss of a job whose ``contrast.weight`` is above 0, with the queue that it fills.

    Args:
        section: the job's ``contrast``.
        width: columns of the representations.
        batch: samples of an optimizer step over all ranks, the most that there are.
    """

    queued_views = 2
    """Rows of each sample that enter the queue: both views."""

    def __init__(self, section: ContrastSection, width: int, batch: int) -> None:
        self.section = section
        options_of(section).widths(width)  # refuses widths above that of the rows before the first step
        self._batch = batch
        self.queue: ShardedQueue | None = None
        if section.queue:
            dtype = _DTYPES[section.queue_dtype]
            self.queue = ShardedQueue(
                section.queue, width, dtype=dtype, device=distributed.device(), drift=section.drift
            )
            self.queue.warn_if_smaller_than(self.queued_views * batch)

    def loss(
        self, views: Views, *, step: int, batch: int | None = None, stats: ContrastStats | None = None
    ) -> Float[Tensor, ""]:
        """The loss of some samples of every rank (`capt_loss`, without its weight); both views then enter the queue.

        With ``contrast.momentum`` they do not: the rows of the averaged encoder do, at the end of the step (`push`).

        Args:
            views: of the samples; ``ids`` are not read where ``contrast.mask_duplicates`` is off. All ranks give
                the same number of samples where they share the batch evenly; ``only`` may choose different numbers.
            step: optimizer updates done; the queue counts from ``contrast.queue_start`` on.
            batch: samples of the step over all ranks, where they are not the most that there are.
            stats: filled with diagnostics.
        """
        section, only = self.section, views.only
        known = views.ids if section.mask_duplicates else None
        rows = slice(None) if only is None else only
        queue = self.queue if step >= section.queue_start else None
        # Where the batch is shared out evenly, ranks need not tell each other how many samples they have.
        equal = only is None and (batch or self._batch) % distributed.world_size() == 0
        options = replace(options_of(section), equal_rows=equal)
        contrast = functools.partial(
            capt_loss, views.s[rows], views.s_hat[rows], temperature=views.temperature,
            ids=None if known is None else known[rows], options=options,
        )  # fmt: skip
        if section.queue_weight is None or queue is None:  # one softmax over batch and queue, as in Eq. 4
            loss = contrast(queue)
        else:
            # Two softmaxes with weights of their own: one of the batch, one of the positive and the queue alone.
            loss = contrast() + section.queue_weight * contrast(queue, in_batch="none", queue_share=None)
        if stats is not None:  # in a pass of its own: sums with statistics follow the largest logit and round otherwise
            with torch.no_grad():
                contrast(queue, stats=stats)
        if section.momentum is None:
            self.push(views)
        return loss

    def push(self, views: Views) -> None:
        """Put both views of some samples into the queue, if there is one."""
        if self.queue is not None:
            ids = views.ids if self.section.mask_duplicates else None
            self.queue.enqueue(views.s.detach(), views.s_hat.detach(), ids=ids, only=views.only)

    def save(self, folder: Path) -> None:
        """Write this rank's rows of the queue into ``folder`` of a checkpoint."""
        if self.queue is not None:
            self.queue.save_shard(folder)

    def load(self, folder: Path) -> None:
        """Read back what all ranks have saved, at any number of ranks.

        Rows that follow the encoder in another way (``contrast.drift`` was changed) cannot be used: the queue begins
        empty.
        """
        if self.queue is None:
            return
        if (stored := self.queue.stored_drift(folder)) != self.queue.drift:
            if self.queue.rank == 0:
                log.warning(
                    "the queue begins empty: its rows in %s are of contrast.drift=%s, this job has %s",
                    folder, stored, self.queue.drift,
                )  # fmt: skip
            return
        self.queue.load_shards(folder)


class StepDiagnostics:
    """Diagnostics of the contrast in a step that is logged. All ranks make one in the same steps.

    Args:
        of_vectors: rows are unit vectors, whose spread is measured as well.
    """

    def __init__(self, *, of_vectors: bool = True) -> None:
        self.stats = ContrastStats()
        self._rows = RowSample() if of_vectors else None

    def update(self, views: Views) -> None:
        """Look at the rows of some samples of this rank."""
        if self._rows is not None:
            self._rows.update(views.s if views.only is None else views.s[views.only])

    def compute(self) -> dict[str, float]:
        """The metrics by name, equal on all ranks; empty where no rank has an anchor. Collective."""
        whole = self.stats.over_ranks()
        found = {} if self._rows is None else self._rows.compute()
        spread = {f"contrast/{name}": value for name, value in found.items()}
        if not whole.anchors:
            return {}
        return {
            "contrast/accuracy": whole.top1,
            "contrast/margin": whole.margin,
            "contrast/positive_probability": whole.positive_probability,
            "contrast/effective_negatives": whole.effective_negatives,
            **spread,
        }


def options_of(section: ContrastSection) -> ContrastOptions:
    """The options of the loss that a job sets: every key of ``contrast`` that has the name of one."""
    names = {field.name for field in fields(ContrastOptions)} & set(type(section).model_fields)
    return ContrastOptions(**{name: getattr(section, name) for name in names})


def build_schedule(section: TemperatureSection, max_steps: int) -> Schedule:
    """The temperature schedule that a job's ``contrast.temperature`` asks for, over ``max_steps`` updates.

    Raises:
        ConfigError: a temperature that is out of range.
    """
    parameters: dict[str, dict[str, float]] = {
        "inverted_triangle": {"total_steps": max_steps, "minimum": section.minimum},
        "constant": {"value": section.value},
        "linear": {"total_steps": max_steps, "start": section.start, "end": section.end},
        "learned": {"start": section.value},
    }
    return build_temperature(section.type, parameters[section.type])

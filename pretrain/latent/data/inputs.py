"""What a step feeds on: the batch once a view, with all that is drawn for it beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.engine import distributed
from pretrain.latent.config import LatentJob
from pretrain.latent.data.batches import Batch
from pretrain.latent.data.noise import StepNoise
from pretrain.latent.data.swap import swapped


class Inputs(NamedTuple):
    """View by view: ``V n`` rows, of which ``counted`` marks those that count, the first ``rows`` of each view.

    ``total`` rows of all ranks count. ``priors``: draws of the prior for each update of the critics. ``ids``: a number
    for each pair of the contrast, the same for equal sentences; ``negatives``: draws of the prior for the contrast.
    """

    read: Tensor
    written: Tensor
    counted: Tensor
    rows: int
    total: int
    eps: Tensor
    encoder_keep: Tensor | None
    decoder_keep: tuple[Tensor | None, Tensor | None]
    priors: Tensor | None
    ids: Tensor | None
    negatives: Tensor | None

    @property
    def share(self) -> float:
        """A factor of sums over this rank's rows: the engine averages over ranks, this makes a mean over the batch."""
        return distributed.world_size() / self.total


class Drawn(NamedTuple):
    """A batch with what has been drawn for it; ``noise`` is for SVI steps, which draw as they go."""

    batch: Batch
    inputs: Inputs
    noise: StepNoise


def drawn(job: LatentJob, batch: Batch, use: tuple[int | str, ...], device: torch.device) -> Drawn:
    """A batch with its draws on a device; ``use`` (the number of a step, say) tells them from those of other uses."""
    noise = StepNoise(job.run.seed, use, batch.rows, batch.total, device)
    batch = batch.to(device)
    return Drawn(batch, inputs_of(job, batch, noise), noise)


def drawn_ahead(
    job: LatentJob, batches: Iterable[Batch], step: int, device: torch.device, ahead: int
) -> Iterator[Drawn]:
    """The batches of all steps from ``step`` on with their draws, which are made for ``ahead`` steps at a time.

    A step of large matrices leaves nothing in the caches, and the first draws after it take six times as long as those
    that follow them.
    """
    steps = enumerate(batches, step)
    while some := list(islice(steps, ahead)):
        yield from [drawn(job, batch, ("step", number), device) for number, batch in some]


def inputs_of(job: LatentJob, batch: Batch, noise: StepNoise) -> Inputs:
    """Draw a step's noise and double the batch where there are two views."""
    views, model, contrast = job.objective.views, job.model, job.contrast
    length = batch.tokens.shape[1]
    written = batch.tokens.repeat(views, 1)
    read = written
    if job.objective.swap:
        swaps = noise.uniform(1, length) < job.objective.swap
        read = torch.cat([batch.tokens, swapped(batch.tokens, swaps)])
    width = {"gaussian": model.latent, "point": 1, "none": 1}.get(model.posterior, model.noise)
    eps = noise.normal(views, width)
    encoder_keep = noise.keep(model.encoder_dropout, views, length, model.embedding)
    decoder_keep = (
        noise.keep(model.dropout, views, length - 1, model.embedding),
        noise.keep(model.dropout, views, length - 1, model.hidden),
    )
    counted = (torch.arange(len(batch.tokens), device=written.device) < batch.counted).repeat(views)
    priors = noise.normal(job.critic.updates * views, model.latent) if job.has_critics else None
    ids = negatives = None
    if contrast.weight > 0 and contrast.mask_duplicates:
        ids = _identities(batch, contrast.mean_pair and distributed.rank() == 0)
    if contrast.weight > 0 and contrast.prior_negatives:
        number = contrast.prior_negatives * (batch.total + int(contrast.mean_pair))
        negatives = noise.shared(number, model.latent, distributed.rank(), distributed.world_size())
    return Inputs(
        read, written, counted, batch.counted, batch.total, eps, encoder_keep, decoder_keep, priors, ids, negatives
    )


def _identities(batch: Batch, mean_pair: bool) -> Tensor:
    """A number for each pair, the same for equal sentences (a linear hash modulo 2^64); the mean pair is -1."""
    tokens = batch.tokens[: batch.counted]
    ids = (tokens * _hash_factors(tokens.shape[1]).to(tokens.device)).sum(1)
    return torch.cat([ids.new_full((1,), -1), ids]) if mean_pair else ids


@cache
def _hash_factors(length: int) -> Tensor:
    return torch.randint(1 << 62, (length,), generator=torch.Generator().manual_seed(length))

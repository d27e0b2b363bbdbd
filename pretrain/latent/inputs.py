"""What a step feeds to encoder and decoder: the batch once a view, with all its noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.latent.batches import Batch
from pretrain.latent.config import LatentJob
from pretrain.latent.noise import StepNoise
from pretrain.latent.swap import swapped


@dataclass(frozen=True)
class Inputs:
    """What a step feeds to the modules, view by view: ``V n`` rows of which ``counted`` marks those that count."""

    read: Tensor
    written: Tensor
    counted: Tensor
    eps: Tensor
    encoder_keep: Tensor | None
    decoder_keep: tuple[Tensor | None, Tensor | None]


def inputs_of(job: LatentJob, batch: Batch, noise: StepNoise) -> Inputs:
    """Draw a step's noise and double the batch where there are two views."""
    views, model = job.objective.views, job.model
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
    return Inputs(read, written, counted, eps, encoder_keep, decoder_keep)

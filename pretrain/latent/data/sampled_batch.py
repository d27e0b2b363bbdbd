"""A training batch together with every random number that its step needs."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pretrain.base import distributed
from pretrain.latent.config import LatentJob
from pretrain.latent.data.batches import Batch
from pretrain.latent.data.noise import StepNoise
from pretrain.latent.data.swap import swapped


class SampledBatch(NamedTuple):
    """The rows of this rank, repeated once per view (V views of n rows, view after view), and their random numbers.

    Attributes:
        encoder_tokens: what the encoder reads; the second view may have swapped words.
        decoder_tokens: what the decoder predicts.
        views: V, 1 or 2.
        valid: False for a row that only fills up the rank's share and has no weight.
        valid_rows: number of valid rows in each view; they come first.
        total: number of valid rows in one view over all ranks.
        scored: number of predicted words in the whole batch, one view, ends of sentences included.
        eps: noise of the posterior.
        encoder_dropout: dropout factors on the encoder's word vectors.
        decoder_dropout: dropout factors on the decoder's word vectors and before its softmax.
        priors: draws of the prior for each update of the critics, ``(updates, V n, d)``.
        ids: one number per contrast pair, equal for equal sentences.
        negatives: draws of the prior that serve as negatives of the contrast.
        noise: the generator behind all of these, for a step that continues to draw (SaVAE).
    """

    encoder_tokens: Int[Tensor, "vn length"]
    decoder_tokens: Int[Tensor, "vn length"]
    views: int
    valid: Bool[Tensor, " vn"]
    valid_rows: int
    total: int
    scored: int
    eps: Float[Tensor, "vn e"]
    encoder_dropout: Tensor | None
    decoder_dropout: tuple[Tensor | None, Tensor | None]
    priors: Tensor | None
    ids: Tensor | None
    negatives: Tensor | None
    noise: StepNoise

    @property
    def loss_scale(self) -> float:
        """Turns a sum over this rank's rows into a mean over the batch, once the engine has averaged over the ranks."""
        return distributed.world_size() / self.total


def sample_batch(job: LatentJob, batch: Batch, noise: StepNoise) -> SampledBatch:
    """Repeat a batch once per view and draw its random numbers, in an order that must not change (it fixes them)."""
    views, model, contrast = job.objective.views, job.model, job.contrast
    length = batch.tokens.shape[1]
    decoder_tokens = batch.tokens.repeat(views, 1)
    encoder_tokens = decoder_tokens
    if job.objective.swap:
        swaps = noise.uniform(1, length) < job.objective.swap
        encoder_tokens = torch.cat([batch.tokens, swapped(batch.tokens, swaps)])
    width = {"gaussian": model.latent, "point": 1, "none": 1}.get(model.posterior, model.noise)
    eps = noise.normal(views, width)
    encoder_dropout = noise.dropout(model.encoder_dropout, views, length, model.embedding)
    decoder_dropout = (
        noise.dropout(model.dropout, views, length - 1, model.embedding),
        noise.dropout(model.dropout, views, length - 1, model.hidden),
    )
    valid = (torch.arange(len(batch.tokens), device=batch.tokens.device) < batch.valid_rows).repeat(views)
    priors = ids = negatives = None
    if job.has_critics:
        priors = noise.normal(job.critic.updates * views, model.latent).view(job.critic.updates, len(valid), -1)
    if contrast.weight > 0 and contrast.mask_duplicates:
        ids = _sentence_ids(batch, mean_pair=contrast.mean_pair and distributed.rank() == 0)
    if contrast.weight > 0 and contrast.prior_negatives:
        number = contrast.prior_negatives * (batch.total + int(contrast.mean_pair))
        negatives = noise.normal_shared(number, model.latent, distributed.rank(), distributed.world_size())
    return SampledBatch(
        encoder_tokens, decoder_tokens, views, valid, batch.valid_rows, batch.total, batch.scored, eps,
        encoder_dropout, decoder_dropout, priors, ids, negatives, noise,
    )  # fmt: skip


def _sentence_ids(batch: Batch, *, mean_pair: bool) -> Int[Tensor, " m"]:
    """A linear hash modulo 2^64 of each valid sentence, whatever ``<pad>`` (0) follows it; the pair of the batch's
    means, where it is here, has -1.
    """
    tokens = batch.tokens[: batch.valid_rows]
    ids = (tokens * _hash_factors(tokens.shape[1]).to(tokens.device)).sum(1)
    return torch.cat([ids.new_full((1,), -1), ids]) if mean_pair else ids


@cache
def _hash_factors(length: int) -> Int[Tensor, " length"]:
    """Random factors, of which a shorter sentence has the first ones."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(0)).integers(1 << 62, size=length))

"""LagVAE (He et al. 2019): before each step the encoder alone is trained until it has caught up with the decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pretrain.base import distributed
from pretrain.engine.engines.base import Engine
from pretrain.latent.config import LatentJob
from pretrain.latent.data.sampled_batch import SampledBatch
from pretrain.latent.models.gradients import frozen
from pretrain.latent.models.posterior import EncoderOutput

_CHECK_EVERY = 15


def train_encoder_aggressively(
    job: LatentJob, engines: Mapping[str, Engine], random_batch: Callable[[int], SampledBatch], beta: float
) -> int:
    """Update the encoder on random batches, at most ``objective.aggressive_updates`` times; returns how often.

    Every 15 updates the mean loss per word is compared with that of the 15 updates before; once it has risen, the
    encoder has caught up. ``random_batch(i)`` is the batch of the i-th update.
    """
    encoder, decoder = engines["encoder"], engines["decoder"].module
    previous_mean, losses, words = math.inf, 0.0, 0
    for number in range(1, job.objective.aggressive_updates + 1):
        batch = random_batch(number - 1)
        encoded: EncoderOutput = encoder(batch.encoder_tokens, batch.eps, batch.encoder_dropout)
        assert encoded.density is not None
        rec = frozen(decoder, encoded.z, batch.decoder_tokens, batch.valid, batch.decoder_dropout)
        loss = rec + beta * (encoded.density.kl() * batch.valid).sum()
        encoder.backward(loss * batch.loss_scale)
        encoder.step()
        losses += float(distributed.all_reduce_sum(loss))
        words += batch.scored * batch.views
        if number % _CHECK_EVERY == 0:
            mean = losses / words
            if mean > previous_mean:
                return number
            previous_mean, losses, words = mean, 0.0, 0
    return job.objective.aggressive_updates

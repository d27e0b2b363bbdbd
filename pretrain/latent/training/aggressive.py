"""LagVAE (He et al. 2019): before each step the encoder alone is trained until it has caught up with the decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pretrain.engine import distributed
from pretrain.engine.engines.base import Engine
from pretrain.latent.config import LatentJob
from pretrain.latent.data.inputs import Drawn
from pretrain.latent.models.critics import frozen
from pretrain.latent.models.posterior import Encoded

_CHECK_EVERY = 15


def catch_up(job: LatentJob, engines: Mapping[str, Engine], draw: Callable[[int], Drawn], beta: float) -> int:
    """Encoder updates on random batches, at most ``objective.aggressive_updates``; returns how many.

    Every 15 updates the mean loss a word is compared with that of the 15 before; once it has risen, it is enough.
    ``draw(i)`` is the i-th random batch with its draws.
    """
    encoder, decoder = engines["encoder"], engines["decoder"].module
    before, losses, words = math.inf, 0.0, 0
    for done in range(job.objective.aggressive_updates):
        batch, inputs, _ = draw(done)
        encoded: Encoded = encoder(inputs.read, inputs.eps, inputs.encoder_keep)
        assert encoded.density is not None
        rec = frozen(decoder, encoded.z, inputs.written, inputs.counted, inputs.decoder_keep)
        loss = rec + beta * (encoded.density.kl() * inputs.counted).sum()
        encoder.backward(loss * inputs.share)
        encoder.step()
        losses += float(distributed.all_reduce_sum(loss))
        words += batch.scored * job.objective.views
        if (done + 1) % _CHECK_EVERY == 0:
            now = losses / words
            if now > before:
                return done + 1
            before, losses, words = now, 0.0, 0
    return job.objective.aggressive_updates

"""Floating-point operations of a training step, for MFU. No torch here."""

from __future__ import annotations

from pretrain.models.config import RobertaConfig


def flops_per_token(config: RobertaConfig, sequence_length: int, masked_fraction: float, views: int) -> float:
    """Model FLOP (forward and backward) of a training step divided by its packed tokens, each counted once.

    Matrix products only, a multiply-add being 2, the backward pass twice the forward (Chowdhery et al. 2022,
    appendix B; recomputation is not counted). Counted is what the objective needs: of the last layer everything but
    keys and values only where its output is read, and the vocabulary only at masked positions.

    Args:
        config: the encoder.
        sequence_length: tokens a sequence.
        masked_fraction: masked positions / tokens, such as 0.15.
        views: 2 with contrast (original and corrupted), 1 for MLM alone.
    """
    h, length = config.hidden, sequence_length
    keys_values = 4 * h * h
    row = 4 * h * h + 4 * h * config.ffn + 4 * length * h  # query, output, feed-forward, scores and their average
    masked = masked_fraction * length
    read = views * length if config.pooling == "mean" and views == 2 else masked + (views if views == 2 else 0)
    tokens = views * length
    encoder = config.layers * tokens * keys_values + ((config.layers - 1) * tokens + read) * row
    heads = masked * (2 * h * h + 2 * h * config.classes)
    if views == 2:
        heads += views * 4 * h * config.ffn
    return 3.0 * (encoder + heads) / length

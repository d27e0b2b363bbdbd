"""Floating-point operations of a training step, for MFU. No torch here."""

from __future__ import annotations

from capt.pretrain.models.architecture import EncoderConfig


def flops_per_token(
    config: EncoderConfig, sequence_length: int, masked_fraction: float, views: int, seen: float | None = None
) -> float:
    """Model FLOP (forward and backward) of a training step divided by its packed tokens, each counted once.

    The encoder as in `EncoderConfig.flops`, the vocabulary only at masked positions; the backward pass costs twice the
    forward (Chowdhery et al. 2022, appendix B; recomputation is not counted).

    Args:
        config: the encoder.
        sequence_length: tokens a sequence.
        masked_fraction: masked positions / tokens, such as 0.15.
        views: 2 with contrast (original and corrupted), 1 for MLM alone.
        seen: tokens that a token attends to on average, where attention keeps within documents (None = all).
    """
    h, length = config.hidden, sequence_length
    masked = masked_fraction * length
    read = views * length if config.pooling == "mean" and views == 2 else masked + (views if views == 2 else 0)
    encoder = views * config.flops(float(length), read / views, seen)
    width = config.embedding_size
    heads = masked * (2 * h * width + 2 * width * config.classes)
    if views == 2:
        heads += views * 4 * h * config.ffn
    return 3.0 * (encoder + heads) / length

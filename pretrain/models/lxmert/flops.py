"""Floating-point operations of LXMERT, for MFU and for comparisons at equal compute. No torch here."""

from __future__ import annotations

from pretrain.models.lxmert.config import LxmertConfig


def encoder_flops(config: LxmertConfig, words: int | float, regions: int | float) -> float:
    """Forward FLOP of a pair of a sentence (``words`` tokens) and a picture (``regions`` regions) through the encoder.

    Matrix products only, a multiply-add being 2, as if the last layer were computed everywhere.
    """
    h = config.hidden

    def self_attention(length: int | float) -> int | float:
        return length * (8 * h * h + 4 * length * h)

    def layer(length: int | float) -> int | float:
        return self_attention(length) + length * 4 * h * config.ffn

    embedding = regions * 2 * (config.known("feature_size") + 4) * h
    cross = (words + regions) * 8 * h * h + 8 * words * regions * h
    return float(
        embedding
        + config.language_layers * layer(words)
        + config.vision_layers * layer(regions)
        + config.cross_layers * (cross + layer(words) + layer(regions))
    )


def step_flops(
    config: LxmertConfig, words: int | float, regions: int | float, masked: int | float, contrast: bool
) -> float:
    """Model FLOP (forward and backward) of one pair in a pretraining step.

    The heads run on the corrupted view alone, the vocabulary only at masked words; the backward pass costs twice the
    forward pass (Chowdhery et al. 2022, appendix B; recomputation is not counted).

    Args:
        config: the model.
        words: tokens of the sentence.
        regions: regions of the picture.
        masked: masked words.
        contrast: whether the original view is encoded as well and both views are aggregated.
    """
    h, views = config.hidden, 2 if contrast else 1
    classes = config.known("object_classes") + config.known("attribute_classes") + config.known("feature_size")
    heads = masked * (2 * h * h + 2 * h * config.known("vocab_size")) + regions * (2 * h * h + 2 * h * classes)
    heads += 2 * h * h + 4 * h
    if answers := config.known("answers"):
        heads += 4 * h * h + 4 * h * answers
    if contrast:
        heads += views * 4 * h * config.ffn
    return 3.0 * (views * encoder_flops(config, words, regions) + heads)

"""The warning that representations collapse into one point, in the same words for every task."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_COLLAPSED = -0.1
"""Uniformity above this: nearly all representations in one point (0 is one point, about -4 an even spread)."""


def warn_of_collapse(uniformity: float) -> None:
    """Warn where ``uniformity`` (:func:`pretrain.contrast.metrics.uniformity`) is that of nearly one point."""
    if uniformity > _COLLAPSED:
        logger.warning(
            "uniformity is %.3f: the representations are collapsing into one point; contrast.drift=mean, a lower "
            "optimizer.lr or a smaller contrast.queue helps",
            uniformity,
        )

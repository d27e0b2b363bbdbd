"""CAPT's contrastive loss against a queue sharded over all ranks, exact in value and gradient.

Read ``capt`` (Eq. 2-4), then ``info_nce`` (the general form), ``sharded`` (the computation), ``cached`` (one contrast
over many micro-batches), and ``reference`` (the oracle). The mathematics and its proofs are in ``docs/contrast.md``.
"""

from __future__ import annotations

from pretrain.contrast.cached import cached_backward
from pretrain.contrast.capt import capt_loss
from pretrain.contrast.info_nce import info_nce
from pretrain.contrast.queue import ShardedQueue
from pretrain.contrast.stats import ContrastStats
from pretrain.contrast.temperature import build_temperature, inverted_triangle

__all__ = [
    "ContrastStats",
    "ShardedQueue",
    "build_temperature",
    "cached_backward",
    "capt_loss",
    "info_nce",
    "inverted_triangle",
]

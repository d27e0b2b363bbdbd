"""CAPT's contrastive loss against a queue sharded over all ranks, exact in value and gradient.

Read ``info_nce`` (the CAPT loss of Eq. 2-4 and its general form), ``forms`` (who is an anchor, and what it sees),
``sharded`` (the computation), and ``cached`` (one contrast over many micro-batches). The mathematics and its proofs are
in ``docs/contrast.md``.
"""

from __future__ import annotations

from capt.pretrain.contrast.cached import cached_backward
from capt.pretrain.contrast.distillation import distillation_loss
from capt.pretrain.contrast.info_nce import CaptLoss, capt_loss, info_nce
from capt.pretrain.contrast.metrics import ContrastStats
from capt.pretrain.contrast.options import ContrastOptions
from capt.pretrain.contrast.queue import ShardedQueue
from capt.pretrain.contrast.scored import cosent_loss, cosine_regression_loss
from capt.pretrain.contrast.teacher import cosine_distance_loss, listwise_loss, squared_distance_loss
from capt.pretrain.contrast.temperature import build_temperature, inverted_triangle

__all__ = [
    "CaptLoss",
    "ContrastOptions",
    "ContrastStats",
    "ShardedQueue",
    "build_temperature",
    "cached_backward",
    "capt_loss",
    "cosent_loss",
    "cosine_distance_loss",
    "cosine_regression_loss",
    "distillation_loss",
    "info_nce",
    "inverted_triangle",
    "listwise_loss",
    "squared_distance_loss",
]

"""CAPT: distributed contrastive pretraining. The folders of the checkout are the subpackages of this one.

What is meant for programs of one's own is offered here, and loaded on first use, so that the command line starts
without torch: the contrast (``capt_loss``, ``info_nce``, ``ShardedQueue``, ...), and the commands as functions
(``load``, ``train``, ``evaluate``, ``mine``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capt.library import Model, Run, evaluate, load, mine, train
    from capt.pretrain.contrast import (
        CaptLoss,
        ContrastOptions,
        ContrastStats,
        ShardedQueue,
        build_temperature,
        cached_backward,
        capt_loss,
        distillation_loss,
        inverted_triangle,
    )
    from capt.pretrain.contrast.info_nce import info_nce
    from capt.pretrain.contrast.trainer import QueueCheckpoint

__all__ = [
    "CaptLoss",
    "ContrastOptions",
    "ContrastStats",
    "Model",
    "QueueCheckpoint",
    "Run",
    "ShardedQueue",
    "build_temperature",
    "cached_backward",
    "capt_loss",
    "distillation_loss",
    "evaluate",
    "info_nce",
    "inverted_triangle",
    "load",
    "mine",
    "train",
]

_ELSEWHERE = {
    **dict.fromkeys(("Model", "Run", "evaluate", "load", "mine", "train"), "capt.library"),
    "QueueCheckpoint": "capt.pretrain.contrast.trainer",
}
"""Modules of the names that are not of the contrast."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "capt.pretrain.contrast")), name)

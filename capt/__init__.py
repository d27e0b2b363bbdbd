"""CAPT: distributed contrastive pretraining. The folders of the checkout are the subpackages of this one.

The contrast is offered here: ``from capt import capt_loss, info_nce, ShardedQueue, cached_backward``. It is loaded on
first use, so that the command line starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capt.pretrain.contrast import (
        CaptLoss,
        ContrastOptions,
        ContrastStats,
        ShardedQueue,
        build_temperature,
        cached_backward,
        capt_loss,
        distillation_loss,
        info_nce,
        inverted_triangle,
    )

__all__ = [
    "CaptLoss",
    "ContrastOptions",
    "ContrastStats",
    "ShardedQueue",
    "build_temperature",
    "cached_backward",
    "capt_loss",
    "distillation_loss",
    "info_nce",
    "inverted_triangle",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import capt.pretrain.contrast as contrast

    return getattr(contrast, name)

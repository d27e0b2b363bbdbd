"""Which generated negatives are true neighbours of the centre: known pairs that are no negatives."""

from __future__ import annotations

from jaxtyping import Bool, Int64
from torch import Tensor


def is_neighbour(drawn: Int64[Tensor, "n m"], nearby: Int64[Tensor, "n w"]) -> Bool[Tensor, "n m"]:
    """Whether each word drawn for a centre is one of ``nearby``: the words in its window (-1 where there is none).

    The window is the whole one and not the one that the centre has drawn, so it holds all positives and some more.
    """
    found: Bool[Tensor, "n m"] = (drawn[:, :, None] == nearby[:, None, :]).any(-1)
    return found

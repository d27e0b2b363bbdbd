"""From hidden states at all positions to those that a head reads: chosen positions, or the mean over tokens."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor


def take_rows(x: Float[Tensor, "b L h"], rows: Int[Tensor, "b r"]) -> Float[Tensor, "b r h"]:
    """Row ``rows[i, j]`` of sequence ``i``."""
    return x.gather(1, rows.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def mean_over_tokens(hidden: Float[Tensor, "b L h"], tokens: Int[Tensor, "b L"], pad_id: int) -> Float[Tensor, "b h"]:
    """The mean hidden state of the tokens of each sequence that are not padding (zeros where all are padding)."""
    real = (tokens != pad_id).unsqueeze(-1)
    return (hidden * real).sum(1) / real.sum(1).clamp_min(1)

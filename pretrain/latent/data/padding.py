"""Where sentences end in a matrix of tokens whose shorter rows are filled up with ``<pad>``."""

from __future__ import annotations

from jaxtyping import Bool, Int
from torch import Tensor

from pretrain.latent.data.vocabulary import PAD


def ends_of(tokens: Int[Tensor, "n length"]) -> Int[Tensor, " n"]:
    """The position of ``</s>`` in each row: the last token that is no ``<pad>``."""
    return (tokens != PAD).sum(1) - 1


def predicted(tokens: Int[Tensor, "n length"]) -> Bool[Tensor, "n length_minus_1"]:
    """Which tokens after ``<s>`` are predicted: words and ``</s>``, but no ``<pad>``."""
    return tokens[:, 1:] != PAD

"""The protocol of text encoders: what a model for pretraining or fine-tuning may ask of the network below its heads."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float, Int
from torch import Tensor, nn


class Encoder(nn.Module, ABC):
    """A text encoder: token ids in, final hidden states out.

    Attributes:
        hidden_size: columns of the hidden states, ``h``.
        vocab_size: the number of ids that the encoder embeds.
        max_positions: the longest sequence in tokens, special tokens included.
        pad_id: the id of the padding token.
        reads_types: whether token types (0 for the first text of a pair, 1 for the second) change the output.
    """

    hidden_size: int
    vocab_size: int
    max_positions: int
    pad_id: int
    reads_types: bool = False

    @abstractmethod
    def forward(
        self,
        tokens: Int[Tensor, "b L"],
        types: Int[Tensor, "b L"] | None = None,
        *,
        padded: bool = False,
        documents: Int[Tensor, "b L"] | None = None,
        runs: int | None = None,
        rows: Int[Tensor, "b r"] | None = None,
    ) -> Float[Tensor, "b _ h"]:
        """Final hidden states at all positions, or at ``rows`` only.

        Args:
            tokens: ids, padded on the right.
            types: token types; an encoder without ``reads_types`` ignores them.
            padded: whether any token is padding. The caller knows it on the host; asking the tensor would make a GPU
                wait, and without padding the attention needs no mask.
            documents: document number of each token; tokens attend to their own document only (None = to all).
            runs: the number of runs of equal numbers in ``documents``, padding numbered apart, where the caller knows
                it on the host: a GPU then needs no mask.
            rows: positions whose output is read (None = all), so that the encoder may leave out the others.

        Raises:
            DataError: the sequence is longer than ``max_positions``.
            ConfigError: the encoder cannot keep attention inside documents.
        """

    @property
    @abstractmethod
    def word_embedding(self) -> nn.Embedding:
        """The table of token embeddings, whose weight a language-model head may share."""

    @abstractmethod
    def flops(self, length: float, read: float | None = None) -> float:
        """Forward FLOP of a sequence of ``length`` tokens whose output is read at ``read`` of them (None = all).

        A multiply-add counts as 2.
        """

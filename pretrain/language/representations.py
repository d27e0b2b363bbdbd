"""Vectors that an encoder gives for whole sequences, one by each of several poolers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pretrain.base.distributed import device
from pretrain.language.batches import LanguageBatch
from pretrain.language.restore import Restored
from pretrain.models.heads import MLMOutput
from pretrain.models.pooling import mean_over_tokens, take_rows

POOLERS = {
    "cls": "final hidden state of <s>, head not used",
    "mean": "mean final hidden state of all tokens but padding, head not used",
    "head": "aggregation head, unit rows",
}


class Representations:
    """The representations of a model in evaluation mode by ``poolers`` (keys of ``POOLERS``), in fp32.

    ``head`` needs a model with an aggregation head; it reads what it read in training (``model.pooling``).
    """

    def __init__(self, restored: Restored, poolers: Sequence[str]) -> None:
        self.model = restored.model.to(device()).eval()
        self.tokenizer = restored.tokenizer
        self.poolers = tuple(poolers)

    @torch.no_grad()
    def encode_views(self, batch: LanguageBatch) -> tuple[dict[str, tuple[Tensor, Tensor]], MLMOutput]:
        """The (n, h) rows of the originals and of the corrupted for each pooler, and the MLM sums of the corrupted."""
        batch = batch.to(device())
        n = len(batch.tokens)
        views = torch.cat([batch.tokens, batch.corrupted])
        documents = None if batch.documents is None else batch.documents.repeat(2, 1)
        hidden = self.model.encoder(views, padded=batch.padded, documents=documents)
        pairs = {name: (rows[:n], rows[n:]) for name, rows in self._pool(hidden, views).items()}
        return pairs, self.model.mlm(take_rows(hidden[n:], batch.positions), batch.labels)

    @torch.no_grad()
    def encode_texts(self, texts: Sequence[str]) -> Float[np.ndarray, "n w"]:
        """Vectors of ``<s> text </s>``, cut to the position table: h columns for each pooler, side by side."""
        special = self.tokenizer.special
        room = self.model.encoder.max_positions - 2
        ids = [
            [special.bos, *encoded[:room].tolist(), special.eos] for encoded in self.tokenizer.encode_batch(list(texts))
        ]
        longest = max(map(len, ids))
        tokens = torch.tensor([row + [special.pad] * (longest - len(row)) for row in ids], device=device())
        hidden = self.model.encoder(tokens, padded=any(len(row) < longest for row in ids))
        return torch.cat(list(self._pool(hidden, tokens).values()), dim=1).cpu().numpy()

    def _pool(self, hidden: Float[Tensor, "n L h"], tokens: Int[Tensor, "n L"]) -> dict[str, Tensor]:
        hidden = hidden.float()
        pools = {"cls": hidden[:, 0], "mean": mean_over_tokens(hidden, tokens, self.model.encoder.pad_id)}
        if self.model.aggregation is not None:
            pools["head"] = self.model.aggregation(pools[self.model.config.pooling])
        return {name: pools[name] for name in self.poolers}

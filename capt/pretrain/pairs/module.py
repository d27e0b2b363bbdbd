"""The module that the engine wraps: an encoder, the rows that it makes of texts, and the temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast.precisions import precision_rows
from capt.pretrain.contrast.temperature import Schedule
from capt.pretrain.contrastive.term import build_schedule
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.heads import MLMHead, MLMOutput, mean_over_tokens
from capt.pretrain.models.lora import add_lora
from capt.pretrain.pairs.config import PairJob, Pooling
from capt.pretrain.pairs.texts import MaskedTexts, PaddedTexts


class PairOutput(NamedTuple):
    """The rows of each list of texts, the temperature of this step, and sums over masked tokens, if asked for.

    ``taught`` are the vectors that a teacher's are compared with: in its space, and as long as they come.
    """

    rows: list[Float[Tensor, "_ d"]]
    temperature: float | Tensor
    masked: MLMOutput | None = None
    taught: list[Float[Tensor, "_ e"]] | None = None


class PooledEncoder(nn.Module):
    """An encoder, and one vector of each text: the mean over its tokens, or the state of the first or last one."""

    def __init__(self, encoder: Encoder, pooling: Pooling) -> None:
        super().__init__()
        self.model, self.pooling = encoder, pooling

    def forward(self, tokens: Int[Tensor, "n L"], padded: bool) -> Float[Tensor, "n h"]:
        """The pooled hidden states; ``padded`` says whether any token is padding."""
        if self.pooling == "mean":
            hidden = self.model(tokens, padded=padded)
            return mean_over_tokens(hidden, tokens, self.model.pad_id) if padded else hidden.mean(1)
        if self.pooling == "cls":
            # Only one state of a text is read, and the last layer may leave out the others.
            rows = torch.zeros_like(tokens[:, :1])
        else:
            # Padding is on the right: the last token is where the real ones end.
            rows = (tokens != self.model.pad_id).sum(1, keepdim=True) - 1
        return self.model(tokens, padded=padded, rows=rows)[:, 0]  # type: ignore[no-any-return]


class PairModule(nn.Module):
    """Encoder, pooling, projection and temperature schedule; queries and documents share all of them.

    With ``mlm.weight`` above 0 there is a language-model head that shares the encoder's token embeddings.

    A text becomes one unit vector. A subclass makes other rows of it (`capt.pretrain.pairs.representations`): it
    overrides `width_of` and `embed`, and finds the states of all tokens in ``self.encoder.model``.

    Raises:
        ConfigError: ``mlm.weight`` is above 0, and the token embeddings are narrower than the hidden states.
    """

    def __init__(self, job: PairJob, encoder: Encoder, pooling: Pooling) -> None:
        super().__init__()
        if job.model.lora is not None:
            add_lora(encoder, job.model.lora)
        self.encoder = PooledEncoder(encoder, pooling)
        columns = job.model.projection
        self.projection = None if columns is None else nn.Linear(encoder.hidden_size, columns)
        # Where the teacher's vectors have another width and the export keeps the student's.
        width = job.distillation.projected_width(self.width_of(job, encoder))
        self.to_teacher = None if width is None else nn.Linear(self.width_of(job, encoder), width)
        self._is_taught = job.distillation.vectors is not None
        self.mlm = None if job.mlm.weight == 0 else _mlm_head(encoder)
        self.temperature: Schedule = build_schedule(job.contrast.temperature, job.schedule.max_steps)
        self.width = self.width_of(job, encoder)
        self._precisions = job.contrast.precisions

    @classmethod
    def width_of(cls, job: PairJob, encoder: Encoder) -> int:
        """Return the numbers of a row, the same for all texts."""
        return job.model.projection or encoder.hidden_size

    def embed(self, texts: PaddedTexts) -> Float[Tensor, "n d"]:
        """Unit rows, normalised in fp32 as bf16 cannot tell similar directions apart."""
        return _unit(self._pooled(texts))

    def _pooled(self, texts: PaddedTexts) -> Float[Tensor, "n d"]:
        rows: Tensor = self.encoder(texts.tokens, texts.padded)
        return rows if self.projection is None else self.projection(rows)

    def forward(
        self, texts: Sequence[PaddedTexts], *, step: int, masked: MaskedTexts | None = None, for_loss: bool = False
    ) -> PairOutput:
        """The rows of each list of texts, and after them the language model's sums over ``masked``.

        ``for_loss`` asks for the rows in every precision that is trained (`precision_rows`).
        """
        taught = None
        if self._is_taught:
            pooled = [self._pooled(each) for each in texts]
            rows = [_unit(each) for each in pooled]
            taught = [each if self.to_teacher is None else self.to_teacher(each) for each in pooled]
        elif for_loss and self._precisions:
            rows = [precision_rows(self._pooled(each), self._precisions) for each in texts]
        else:
            rows = [self.embed(each) for each in texts]
        sums = None
        if masked is not None:
            assert self.mlm is not None
            (tokens, padded), positions, labels = masked
            sums = self.mlm(self.encoder.model(tokens, padded=padded, rows=positions), labels)
        return PairOutput(rows, self.temperature(step), sums, taught)


def _unit(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    return F.normalize(rows.to(torch.promote_types(rows.dtype, torch.float32)), dim=-1, eps=1e-12)


_EPS = 1e-5
"""Epsilon of the head's LayerNorm, as in RoBERTa."""


def _mlm_head(encoder: Encoder) -> MLMHead:
    word, hidden_size = encoder.word_embedding, encoder.hidden_size
    if word.embedding_dim != hidden_size:
        raise ConfigError(
            f"mlm.weight: the encoder embeds tokens in {word.embedding_dim} dimensions and has hidden states of "
            f"{hidden_size}, so that no language-model head can share its embeddings; set mlm.weight=0"
        )
    head = MLMHead(word, encoder.vocab_size, _EPS)
    head.begin_near_identity()
    return head

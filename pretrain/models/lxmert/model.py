"""The model of vision-language pretraining: both views through one encoder, and the heads of LXMERT and CAPT."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pretrain.models.heads import AggregationHead, MLMHead, MLMOutput
from pretrain.models.layers import initialise_weights
from pretrain.models.lxmert.config import LxmertConfig
from pretrain.models.lxmert.encoder import LxmertEncoder
from pretrain.models.lxmert.heads import AnswerHead, Pooler, RegionHeads


class LxmertOutput(NamedTuple):
    """What the losses need. Logits have the precision of the forward pass; all but ``s`` are of the corrupted view.

    Attributes:
        s: unit rows of the originals in fp32, None without contrast.
        s_hat: unit rows of their corruptions.
        mlm: sums over the masked words.
        matching: logits of (does not match, matches).
        objects: logits of the classes of every region, None without such classes.
        attributes: as for objects.
        features: predicted features, of every region, or (m, f) of those that were asked for.
        answers: logits of the answers, None without an answer head.
    """

    s: Float[Tensor, "n d"] | None
    s_hat: Float[Tensor, "n d"] | None
    mlm: MLMOutput
    matching: Float[Tensor, "n 2"]
    objects: Float[Tensor, "n R objects"] | None
    attributes: Float[Tensor, "n R attributes"] | None
    features: Float[Tensor, "*regressed f"]
    answers: Float[Tensor, "n answers"] | None


class LxmertModel(nn.Module):
    """LXMERT with the heads of its pretraining, and CAPT's aggregation head.

    Both views go through the encoder in one forward pass, the originals first, so that every parameter is used once a
    backward pass. The last layer leaves out what no head reads.

    Args:
        config: sizes, with what the data decide filled in.
        contrast: with the aggregation head; without it the model is LXMERT.
    """

    def __init__(self, config: LxmertConfig, contrast: bool = True) -> None:
        super().__init__()
        self.config = config
        h, eps = config.hidden, config.layer_norm_eps
        self.encoder = LxmertEncoder(config)
        self.pooler = Pooler(h)
        self.mlm = MLMHead(self.encoder.word_embedding, config.known("vocab_size"), eps)
        self.matching = nn.Linear(h, 2)
        self.region_heads = RegionHeads(config)
        answers = config.known("answers")
        self.answer_head = AnswerHead(h, answers, eps=eps) if answers else None
        self.aggregation = AggregationHead(h, config.ffn) if contrast else None
        initialise_weights(self, config.initializer_range)

    def forward(
        self,
        tokens: Int[Tensor, "n L"],
        corrupted: Int[Tensor, "n L"],
        masked: Int[Tensor, " k"],
        labels: Int[Tensor, " k"],
        features: Float[Tensor, "n R f"],
        corrupted_features: Float[Tensor, "n R f"],
        boxes: Float[Tensor, "n R 4"],
        present: Bool[Tensor, "n R"] | None = None,
        regressed: Int[Tensor, " m"] | None = None,
        *,
        padded: bool = False,
        heads: bool = True,
    ) -> LxmertOutput:
        """Representations of both views (Eq. 1) and predictions from the corrupted one.

        Args:
            tokens: the original sentences, not read without contrast.
            corrupted: the sentences with words masked.
            masked: flat positions of the words to predict, token j of sentence i being i L + j.
            labels: their ids.
            features: of the original regions, not read without contrast.
            corrupted_features: the same with regions masked.
            boxes: of the regions, the same in both views.
            present: True where there is a region; None = everywhere.
            regressed: flat positions of the regions whose features are predicted; None = all of them.
            padded: whether any token of either view is padding.
            heads: False leaves out the predictions, which are then empty, and changes nothing else.
        """
        n, length = corrupted.shape
        if self.aggregation is not None:
            corrupted = torch.cat([tokens, corrupted])
            corrupted_features = torch.cat([features, corrupted_features])
            boxes = boxes.repeat(2, 1, 1)
            present = None if present is None else present.repeat(2, 1)
        first = torch.arange(len(corrupted), device=corrupted.device) * length
        read = torch.cat([first, masked + (len(corrupted) - n) * length])
        hidden = self.encoder(
            corrupted, corrupted_features, boxes, padded=padded, present=present, read=read, pictures=n
        )
        cls, words = hidden.words.split([len(first), len(masked)])
        s, s_hat, pooled = self._represent(cls, n)
        if not heads:
            nothing = pooled.new_zeros(0)
            return LxmertOutput(s, s_hat, MLMOutput(*pooled.new_zeros(3)), nothing, None, None, nothing, None)
        objects, attributes, regions = self.region_heads(hidden.regions, regressed)
        return LxmertOutput(
            s=s,
            s_hat=s_hat,
            mlm=self.mlm(words, labels),
            matching=self.matching(pooled),
            objects=objects,
            attributes=attributes,
            features=regions,
            answers=None if self.answer_head is None else self.answer_head(pooled),
        )

    def embed(
        self,
        tokens: Int[Tensor, "n L"],
        features: Float[Tensor, "n R f"],
        boxes: Float[Tensor, "n R 4"],
        present: Bool[Tensor, "n R"] | None = None,
        *,
        padded: bool,
    ) -> Float[Tensor, "n h"]:
        """Unit vectors s(x) of Eq. 1; without an aggregation head the normalised state that it would read."""
        cls = self.encoder.first(tokens, features, boxes, padded=padded, present=present)
        read = self.pooler(cls) if self.config.pooling == "pooled" else cls
        if self.aggregation is None:
            return F.normalize(read.float(), dim=-1, eps=1e-12)
        return self.aggregation(read)  # type: ignore[no-any-return]

    def _represent(self, cls: Tensor, n: int) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Unit rows of both views (None without contrast), and the pooled states of the corrupted one."""
        if self.aggregation is None:
            return None, None, self.pooler(cls)
        if self.config.pooling == "pooled":
            both = self.pooler(cls)
            s, s_hat = self.aggregation(both).split(n)
            return s, s_hat, both[n:]
        s, s_hat = self.aggregation(cls).split(n)
        return s, s_hat, self.pooler(cls[n:])

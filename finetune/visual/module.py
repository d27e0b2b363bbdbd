"""LXMERT under a head for one task: the pooled states of a sentence with each of its pictures, side by side."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pretrain.models.layers import initialise_weights
from pretrain.models.lxmert.config import LxmertConfig
from pretrain.models.lxmert.encoder import LxmertEncoder
from pretrain.models.lxmert.heads import AnswerHead, Pooler


class PictureClassifier(nn.Module):
    """Logits from the pooled states of ``p`` pairs of one sentence and a picture (Tan and Bansal 2019, section 4.2).

    With one picture it is the model of VQA and GQA, with two that of NLVR2. Parameters of the encoder and the pooler
    have the names that they have in `pretrain.models.lxmert.model.LxmertModel`.

    Args:
        config: the encoder.
        outputs: number of logits.
        pictures: how many a sentence is about.
    """

    def __init__(self, config: LxmertConfig, outputs: int, pictures: int) -> None:
        super().__init__()
        h = config.hidden
        self.encoder = LxmertEncoder(config)
        self.pooler = Pooler(h)
        self.answer_head = AnswerHead(h, outputs, inputs=pictures * h, eps=config.layer_norm_eps)
        initialise_weights(self, config.initializer_range)

    def forward(
        self,
        tokens: Int[Tensor, "n L"],
        features: Float[Tensor, "n p R f"],
        boxes: Float[Tensor, "n p R 4"],
        present: Bool[Tensor, "n p R"] | None,
        padded: bool,
    ) -> Float[Tensor, "n outputs"]:
        """Logits in fp32, also under autocast. Arguments are those of `finetune.visual.rows.PictureInputs`."""
        n, pictures = features.shape[:2]
        first = self.encoder.first(
            tokens.repeat_interleave(pictures, 0),  # the pairs of a sentence follow one another
            features.flatten(0, 1).to(_dtype(self)),
            boxes.flatten(0, 1),
            padded=padded,
            present=None if present is None else present.flatten(0, 1),
        )
        return self.answer_head(self.pooler(first).view(n, -1)).float()  # type: ignore[no-any-return]


def _dtype(module: nn.Module) -> torch.dtype:
    """The type of the weights: stores keep features in half precision."""
    return next(module.parameters()).dtype

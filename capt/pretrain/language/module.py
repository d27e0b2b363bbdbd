"""The module that the engine wraps: the CAPT model, the heads of a bottleneck, and the temperature."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn

from capt.pretrain.bottleneck.heads import Bottleneck, BottleneckOutput
from capt.pretrain.bottleneck.texts import Texts
from capt.pretrain.contrast.temperature import Schedule
from capt.pretrain.contrastive.term import build_schedule
from capt.pretrain.convert.reference import Pooling, embed
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.models.architecture import EncoderConfig
from capt.pretrain.models.capt import CaptModel, CaptOutput, Pairs


class LanguageOutput(NamedTuple):
    """The model's output and the temperature of this step; ``pooled`` is `CaptModel.pool_views`, if asked for.

    ``bottleneck`` has the sums of its heads, where the texts are given.
    """

    capt: CaptOutput
    temperature: float | Tensor
    pooled: dict[str, Pairs]
    bottleneck: BottleneckOutput | None = None


class LanguageModule(nn.Module):
    """CAPT model, the heads of a bottleneck if the job has one, and the temperature schedule.

    ``temperature(step)`` is a number, or a tensor with a gradient if learned.
    """

    def __init__(self, job: LanguageJob, config: EncoderConfig) -> None:
        super().__init__()
        self.capt = CaptModel(config, contrast=job.contrast.weight > 0)
        self.bottleneck: Bottleneck | None = None
        if job.bottleneck.on:  # drawn last: the encoder begins as without
            self.bottleneck = Bottleneck(job.bottleneck, config, self.capt.encoder.word_embedding)
        self.temperature: Schedule = build_schedule(job.contrast.temperature, job.schedule.max_steps)

    def forward(
        self,
        tokens: Int[Tensor, "n L"],
        corrupted: Int[Tensor, "n L"] | None = None,
        positions: Int[Tensor, "n m"] | None = None,
        labels: Int[Tensor, "n m"] | None = None,
        documents: Int[Tensor, "n L"] | None = None,
        *,
        padded: bool,
        runs: int | None = None,
        step: int,
        pool: bool = False,
        pooling: Pooling = "mean",
        texts: Texts | None = None,
        originals: Int[Tensor, "n L"] | None = None,
    ) -> LanguageOutput | Float[Tensor, "n h"]:
        """Both views through the model (see `CaptModel.forward`); with ``pool`` a second time, for validation.

        ``originals`` are the tokens that ``corrupted`` is made of, where these are not ``tokens``.

        Without ``corrupted`` the tokens alone: unit rows of whole texts, by ``pooling``.
        """
        if corrupted is None:
            return embed(self.capt, tokens, pooling)
        assert positions is not None
        out = self.capt(tokens, corrupted, positions, labels, documents, padded, runs, texts is not None)
        sums = None
        if self.bottleneck is not None and texts is not None and labels is not None:
            sums = self.bottleneck(out.hidden, tokens if originals is None else originals, texts, self.capt.mlm)
        return LanguageOutput(
            capt=out._replace(hidden=None),
            temperature=self.temperature(step),
            pooled=self.capt.pool_views(tokens, corrupted, documents, padded) if pool else {},
            bottleneck=sums,
        )

"""The module that the engine wraps: the CAPT model, and the temperature, which may be learned."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor, nn

from pretrain.contrast.temperature import Schedule
from pretrain.contrastive.term import build_schedule
from pretrain.language.config import LanguageJob
from pretrain.models.capt import CaptModel, CaptOutput, Pairs
from pretrain.models.config import RobertaConfig


class LanguageOutput(NamedTuple):
    """The model's output and the temperature of this step; ``pooled`` is `CaptModel.pool_views`, if asked for."""

    capt: CaptOutput
    temperature: float | Tensor
    pooled: dict[str, Pairs]


class LanguageModule(nn.Module):
    """CAPT model + temperature schedule: ``temperature(step)`` is a number, or a tensor with a gradient if learned."""

    def __init__(self, job: LanguageJob, config: RobertaConfig) -> None:
        super().__init__()
        self.capt = CaptModel(config, contrast=job.contrast.weight > 0)
        self.temperature: Schedule = build_schedule(job.contrast.temperature, job.schedule.max_steps)

    def forward(
        self,
        tokens: Int[Tensor, "n L"],
        corrupted: Int[Tensor, "n L"],
        positions: Int[Tensor, "n m"],
        labels: Int[Tensor, "n m"] | None,
        documents: Int[Tensor, "n L"] | None = None,
        *,
        padded: bool,
        runs: int | None = None,
        step: int,
        pool: bool = False,
    ) -> LanguageOutput:
        """Both views through the model (see `CaptModel.forward`); with ``pool`` a second time, for validation."""
        return LanguageOutput(
            capt=self.capt(tokens, corrupted, positions, labels, documents, padded, runs),
            temperature=self.temperature(step),
            pooled=self.capt.pool_views(tokens, corrupted, documents, padded) if pool else {},
        )

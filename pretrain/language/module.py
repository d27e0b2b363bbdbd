"""The module that the engine wraps: the CAPT model, the temperature (which may be learned), pooling for validation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from pretrain.contrast.temperature import Schedule, build_temperature
from pretrain.language.config import LanguageJob, TemperatureSection
from pretrain.models.capt import CaptModel
from pretrain.models.config import RobertaConfig


class LanguageOutput(NamedTuple):
    """What the task's losses and validation need; see :class:`pretrain.models.capt.CaptOutput`.

    ``pools`` (validation only): pooling -> (rows of the originals, rows of the corrupted), ``(n, h)`` each, not
    normalised.
    """

    s: Tensor | None
    s_hat: Tensor | None
    mlm_loss_sum: Tensor
    mlm_correct: Tensor
    mlm_count: Tensor
    temperature: float | Tensor
    pools: dict[str, tuple[Tensor, Tensor]]


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
        labels: Int[Tensor, "n m"],
        documents: Int[Tensor, "n L"] | None = None,
        *,
        padded: bool,
        runs: int | None = None,
        step: int,
        pools: bool = False,
    ) -> LanguageOutput:
        """Both views through the model; with ``pools`` also every position's output, pooled two ways."""
        out = self.capt(tokens, corrupted, positions, labels, documents, padded, runs)
        pooled = self._pool(tokens, corrupted, documents, padded) if pools else {}
        return LanguageOutput(
            s=out.s,
            s_hat=out.s_hat,
            mlm_loss_sum=out.mlm_loss_sum,
            mlm_correct=out.mlm_correct,
            mlm_count=out.mlm_count,
            temperature=self.temperature(step),
            pools=pooled,
        )

    def _pool(
        self, tokens: Tensor, corrupted: Tensor, documents: Tensor | None, padded: bool
    ) -> dict[str, tuple[Tensor, Tensor]]:
        views = torch.cat([tokens, corrupted])
        documents = None if documents is None else documents.repeat(2, 1)
        hidden = self.capt.encoder(views, padded=padded, documents=documents).float()
        real = (views != self.capt.config.pad_id).unsqueeze(-1)
        means = (hidden * real).sum(1) / real.sum(1)
        n = len(tokens)
        return {"cls": (hidden[:n, 0], hidden[n:, 0]), "mean": (means[:n], means[n:])}


def build_schedule(section: TemperatureSection, max_steps: int) -> Schedule:
    """The temperature schedule that a job asks for."""
    parameters: dict[str, dict[str, float]] = {
        "inverted_triangle": {"total_steps": max_steps, "minimum": section.minimum},
        "constant": {"value": section.value},
        "linear": {"total_steps": max_steps, "start": section.start, "end": section.end},
        "learned": {"start": section.value},
    }
    return build_temperature(section.type, parameters[section.type])

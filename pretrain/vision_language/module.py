"""The module that the engine wraps: LXMERT with its heads, and the temperature, which may be learned."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from pretrain.contrast.temperature import Schedule
from pretrain.contrastive.term import build_schedule
from pretrain.models.lxmert.config import LxmertConfig
from pretrain.models.lxmert.model import LxmertModel, LxmertOutput
from pretrain.vision_language.batch import PairBatch
from pretrain.vision_language.config import VisionLanguageJob


class VisionLanguageOutput(NamedTuple):
    """The model's output and the temperature of this step."""

    lxmert: LxmertOutput
    temperature: float | Tensor


class VisionLanguageModule(nn.Module):
    """LXMERT + temperature schedule: ``temperature(step)`` is a number, or a tensor with a gradient if learned."""

    def __init__(self, job: VisionLanguageJob, config: LxmertConfig) -> None:
        super().__init__()
        self.lxmert = LxmertModel(config, contrast=job.contrast.weight > 0)
        self.temperature: Schedule = build_schedule(job.contrast.temperature, job.schedule.max_steps)

    def forward(self, batch: PairBatch, *, step: int, heads: bool = True) -> VisionLanguageOutput:
        """Both views of ``batch`` through the model (see `LxmertModel.forward`)."""
        dtype = self.lxmert.matching.weight.dtype  # stores keep features in half precision
        output = self.lxmert(
            batch.tokens, batch.corrupted, batch.masked, batch.labels, batch.features.to(dtype),
            batch.corrupted_features().to(dtype), batch.boxes, batch.present if batch.missing else None,
            batch.masked_regions, padded=batch.padded, heads=heads,
        )  # fmt: skip
        return VisionLanguageOutput(output, self.temperature(step))

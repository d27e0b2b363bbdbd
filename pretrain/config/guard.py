"""The section ``guard``: what watches a job for faults that raise no error."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from pretrain.config.base import NonNegativeInt, Section


class GuardSection(Section):
    """What watches a job for faults that raise no error (page Reliability)."""

    checksum: NonNegativeInt = Field(
        100, description="steps between two comparisons of what all ranks must hold alike, before the update of a step "
        "and before each save; 0 = never"
    )  # fmt: skip
    spike: Literal["off", "warn", "skip", "rollback", "stop"] = Field(
        "warn", description="when the loss or the gradient norm jumps: say so; skip the update of that step; roll back "
        "to the newest checkpoint and leave out the samples from there to that step; or stop, saving nothing"
    )  # fmt: skip
    spike_threshold: PositiveFloat = Field(
        10.0, description="deviations above the median of the last 128 steps from which a value is a spike"
    )
    spikes: NonNegativeInt = Field(
        10, description="spikes of a run that are skipped, or gone back for; the next one ends the run"
    )

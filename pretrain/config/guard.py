"""The section ``guard``: what watches a job for faults that raise no error."""

from __future__ import annotations

from pydantic import Field

from pretrain.config.base import NonNegativeInt, Section


class GuardSection(Section):
    """What watches a job for faults that raise no error (page Reliability)."""

    checksum: NonNegativeInt = Field(
        100, description="steps between two comparisons of what all ranks must hold alike, in the next step that is "
        "logged, and before each save; 0 = never"
    )  # fmt: skip

"""The section of a job that says which processes assemble its batches. No torch."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from pretrain.config.base import NonNegativeInt, PositiveInt, Section


class LoaderSection(Section):
    """Background processes that assemble batches; their number never changes what is trained on."""

    workers: NonNegativeInt = Field(
        1, le=1024, description="background processes per rank; 0 = in the training process"
    )
    prefetch: PositiveInt = Field(4, le=65_536, description="batches that each worker makes in advance")
    timeout_minutes: PositiveFloat = Field(
        10.0, description="how long a step's data may take before the run ends with an error that says so"
    )

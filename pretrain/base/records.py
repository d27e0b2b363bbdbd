"""JSON files of a run and of a checkpoint as typed, bounded records: nothing behind the border sees a raw mapping."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pretrain.base.errors import ConfigError, UserError
from pretrain.base.files import first_fault

Count = Annotated[int, Field(ge=0, le=1 << 62)]
"""A number of steps, samples, bytes."""


class Record(BaseModel):
    """What a JSON file says. Types are strict; keys of a later release are passed over."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


_R = TypeVar("_R", bound=Record)


def parse(
    kind: type[_R], content: object, source: Path | str, hint: str = "", *, error: type[UserError] = ConfigError
) -> _R:
    """``content``, read from ``source``, as a record. Raises ``error``: one line with the first key that is wrong."""
    try:
        return kind.model_validate(content)
    except ValidationError as problem:
        fault = first_fault(problem, whole="").replace("Value error, ", "", 1)
        raise error(f"{source}: damaged: {fault}{hint}") from None

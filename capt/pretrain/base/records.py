"""JSON files of a run, a checkpoint or a data set as typed, bounded records.

Every JSON file that somebody else may have written is read here, so that no other code sees a raw mapping.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from capt.pretrain.base.errors import ConfigError, UserError
from capt.pretrain.base.files import printable, read_json

Count = Annotated[int, Field(ge=0, le=1 << 62)]
"""A number of steps, samples or bytes."""


class Record(BaseModel):
    """The content of a JSON object. Types are strict; unknown keys, which a later release may write, are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


_R = TypeVar("_R", bound=Record)


def read_record(kind: type[_R], path: Path, hint: str = "", *, error: type[UserError] = ConfigError) -> _R:
    """The JSON file ``path`` as a record.

    Raises:
        UserError: of the class ``error``: the file is not JSON, too large, not regular, or does not fit the record; the
            message ends with ``hint``. ``FileNotFoundError`` and other ``OSError`` pass.
    """
    return parse_record(kind, read_json(path, error=error), path, hint, error=error)


def parse_record(
    kind: type[_R], content: object, source: Path | str, hint: str = "", *, error: type[UserError] = ConfigError
) -> _R:
    """``content``, which was read from ``source``, as a record.

    Raises:
        UserError: of the class ``error``: one line that names the first key that is wrong and ends with ``hint``.
    """
    try:
        return kind.model_validate(content)
    except (ValidationError, RecursionError) as problem:
        raise error(f"{source}: damaged or of another version: {first_fault(problem)}{hint}") from None


def first_fault(problem: Exception) -> str:
    """The first thing that pydantic found wrong, in one printable line: the key, if any, and what is wrong with it."""
    if not isinstance(problem, ValidationError):
        return type(problem).__name__
    first = problem.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(ascii(part).strip("'")[:80] for part in first["loc"][:8])
    wrong = "Input should be an object" if first["type"] == "model_type" else first["msg"].removeprefix("Value error, ")
    return printable(f"{where + ': ' if where else ''}{wrong}", 600)

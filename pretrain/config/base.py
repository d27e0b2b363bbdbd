"""The base of every configuration section: frozen, no unknown keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """A part of a job's configuration. Unknown keys are errors; a loaded configuration never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


def refuse_urls(value: Any) -> Any:
    """What is read or written as a file is on a file system: ``s3://b/x`` would become the folder ``s3:``."""
    if isinstance(value, str | Path) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(value)):
        raise ValueError(
            f"{str(value)[:200]} is a URL; what is read lies on a file system (mount it), or on the hub (data.name)"
        )
    return value


LocalPath = Annotated[Path, BeforeValidator(refuse_urls)]
"""A path on this host's file systems."""

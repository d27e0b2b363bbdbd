"""The base of every configuration section: frozen, no unknown keys; and the types of its fields that need bounds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from capt.pretrain.base.sensitive import has_secret
from capt.pretrain.base.stores import check_url, is_url

NO_TEXT = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Line breaks, control characters and half characters: in a path or an argument they are a mistake, or an attack."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_SIZE = re.compile(r"([0-9.]{1,12}) ?([KMGTPkmgtp]?)B?")
_LONGEST_PATH, _LONGEST_NAME = 4096, 255
_LARGEST = 2**63 - 1


class Section(BaseModel):
    """A part of a job's configuration. Unknown keys are errors; a loaded configuration never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    removed: ClassVar[Mapping[str, Any]] = {}
    """Keys of earlier versions, each with the only value that it has now: runs of these versions name them."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_removed(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or cls.removed.keys().isdisjoint(values):
            return values
        for name, value in cls.removed.items():
            if values.get(name, value) != value:
                raise ValueError(
                    f"{name} is {value} in every job now, and here {values[name]!r}: leave the key out; a run that "
                    "began with another value is continued with the release that began it"
                )
        return {name: value for name, value in values.items() if name not in cls.removed}


def _checked(value: Any) -> Any:
    if not isinstance(value, str | Path):
        return value
    text = str(value)
    if not text:
        raise ValueError("is empty; name a path, or leave the key out")
    if NO_TEXT.search(text):
        raise ValueError("a path holds no line break, NUL or other control character")
    if "://" in text and has_secret(text):
        raise ValueError("holds a user, a password or a signature, which would be written into the run folder")
    if _URL.match(text):
        raise ValueError("is a URL; what is read is on a file system (mount it), or on the hub (data.name)")
    if len(os.fsencode(text)) > _LONGEST_PATH or any(len(os.fsencode(p)) > _LONGEST_NAME for p in text.split("/")):
        raise ValueError(f"a path has at most {_LONGEST_PATH} bytes, and a name in it {_LONGEST_NAME}")
    return value


def _path_or_url(value: Any) -> Any:
    """A path that is checked, or the text of an address in a store."""
    if isinstance(value, str) and is_url(value):
        if NO_TEXT.search(value):
            raise ValueError("an address holds no line break, NUL or other control character")
        return check_url(value)
    return _checked(value)


def _place(value: Any) -> Any:
    value = _path_or_url(value)
    return Path(value) if isinstance(value, str) and not is_url(value) else value


def _bytes(value: Any) -> Any:
    """A number of bytes, or a text such as ``200 GB``."""
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    return value if found is None else int(float(found[1]) * 1000 ** " KMGTP".index(found[2].upper() or " "))


def _of_64_bits(value: int) -> int:
    if value > _LARGEST:
        raise ValueError(f"a whole number is at most {_LARGEST}")
    return value


# A function and not Field(le=...), which would take the place of the lower bounds that fields set by le themselves.
PositiveInt = Annotated[int, Field(gt=0), AfterValidator(_of_64_bits)]
NonNegativeInt = Annotated[int, Field(ge=0), AfterValidator(_of_64_bits)]
PathField = Annotated[Path, BeforeValidator(_checked)]
"""A path on this host's file systems."""
PathText = Annotated[str, BeforeValidator(_checked)]
"""The same as text, for patterns and names that may be paths."""
StoreText = Annotated[str, BeforeValidator(_path_or_url)]
"""A pattern of paths, or of addresses in a store (`capt.pretrain.base.stores`)."""
StorePlace = Annotated[Path | str, BeforeValidator(_place)]
"""A path on this host's file systems, or as text the address of a folder in a store."""
Bytes = Annotated[int, BeforeValidator(_bytes), Field(gt=0), AfterValidator(_of_64_bits)]
"""A number of bytes: 1000, or "200 GB"."""

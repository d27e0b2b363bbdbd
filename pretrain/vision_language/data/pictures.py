"""How pictures are called in region stores, told from how data files call them."""

from __future__ import annotations

import re
from pathlib import Path

_SUBTYPE = re.compile(r"(?<![a-z0-9])(train2014|val2014|test2014|test2015|test-dev2015)(?![0-9])")
_ENDING = re.compile(r"\.(jpe?g|png|gif|bmp|webp)$", re.IGNORECASE)


def coco_subtype(*texts: str) -> str | None:
    """The set of pictures (``train2014``) that a file's ``data_subtype`` or name tells; None where none does.

    Only sets whose pictures are called after them: those of 2017 are called by their numbers.
    """
    for text in texts:
        if found := _SUBTYPE.search(text.lower()):
            return found[1].replace("test-dev", "test")
    return None


def coco_name(number: int | str, subtype: str | None) -> str:
    """``COCO_train2014_000000458752``; the number alone where the set is unknown; a text as it is."""
    if isinstance(number, str) or subtype is None:
        return str(number)
    return f"COCO_{subtype}_{number:012d}"


def file_stem(name: str) -> str:
    """The name of a picture's file without its folders and its ending."""
    return _ENDING.sub("", Path(name).name)

"""The two ways in which pictures of COCO are named: ``COCO_train2014_000000458752`` and ``458752``.

Data files of VQA v2 and COCO captions give numbers, feature files mostly give names. Visual Genome and GQA use numbers
too, and theirs are other pictures. So a name in one form represents the other form only in a store that has no picture
named in the form that was asked for.
"""

from __future__ import annotations

import re

SUBSETS = ("train2014", "val2014", "test2014", "test2015", "train2017", "val2017", "test2017")
_NAME = re.compile(r"COCO_[a-z0-9]{1,20}_([0-9]{12})")
_NUMBER = re.compile(r"[0-9]{1,12}")


def other_forms(name: str, *, numbers: bool, coco: bool) -> list[str]:
    """The names under which a store may hold the picture that data call ``name``, which itself it does not hold.

    Args:
        name: as the data give it.
        numbers: whether the store has pictures that are named by a number.
        coco: whether it has pictures that are named ``COCO_...``.
    """
    if match := _NAME.fullmatch(name):
        return [] if coco else [str(int(match[1])), match[1]]
    if not _NUMBER.fullmatch(name):
        return []
    number = int(name)
    padded = f"{number:012}"
    plain = [form for form in (str(number), padded) if form != name]  # of 2017, file names are padded numbers
    return plain if numbers else [f"COCO_{subset}_{padded}" for subset in SUBSETS]

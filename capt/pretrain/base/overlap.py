"""Overlap of validation and training data: the part of the one that is in the other as well."""

from __future__ import annotations

import hashlib
import logging
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from capt.pretrain.base.errors import counted

logger = logging.getLogger(__name__)


def folded_text(text: str) -> str:
    """The form of a text in which texts that differ in case or Unicode's form alone are equal."""
    return unicodedata.normalize("NFKC", text).casefold()


def same_text(text: str) -> str:
    """The form of a text in which texts that differ in case, spaces or Unicode's form alone are equal."""
    return " ".join(folded_text(text).split())


def text_hash(text: str | tuple[str, str]) -> bytes:
    """The first 16 bytes of the SHA-256 of a text, or of a pair of texts, by which what was computed of it is found."""
    if isinstance(text, tuple):  # with a length, so that no two pairs have the same characters in a row
        text = f"{len(text[0])}\n{''.join(text)}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]


class Shared(NamedTuple):
    """Number of the ``total`` things in validation that are in training as well (``shared``)."""

    shared: int
    total: int


def shared(train: Iterable[Hashable], validation: Iterable[Hashable]) -> Shared:
    """Count what is in both. Memory grows with ``validation`` alone."""
    wanted = Counter(iter(validation))  # of a mapping, its keys
    found = {each for each in train if each in wanted}
    return Shared(sum(wanted[each] for each in found), wanted.total())


def rows_as_bytes(values: np.ndarray, starts: np.ndarray) -> Iterator[bytes]:
    """Each row ``values[starts[i] : starts[i + 1]]`` as something to compare."""
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        yield values[begin:end].tobytes()


def report_overlap(
    counts: Mapping[str, Shared], *, train: str = "data.train", validation: str = "data.validation"
) -> None:
    """Say in one line how much is in both, with a warning where anything is.

    Args:
        counts: by what is counted, such as ``text``.
        train: what to call the training data.
        validation: what to call the validation data.
    """
    parts = " and ".join(f"{each.shared:,} of {counted(each.total, what)}" for what, each in counts.items())
    if any(each.shared for each in counts.values()):
        logger.warning(
            "%s overlaps %s: %s are in both, so it does not measure unseen data alone", validation, train, parts
        )
    else:
        logger.info("%s does not overlap %s: %s are in both", validation, train, parts)

"""Which setting of a study is the best, and which of its seeds represents it.

One rule for reports, for checkpoints that are kept, and for submissions. A setting is judged by the median over its
seeds, as in RoBERTa (Liu et al. 2019, 5.1): a single lucky seed must not choose it. A setting that lacks seeds comes
after every one that has more, for a median over survivors is no median. The trial that represents a setting is the one
whose score is its median.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key")


def ranked(scores: Mapping[Key, Sequence[float]], sign: int) -> list[Key]:
    """The settings that have a score, best first.

    Args:
        scores: of each setting those of the seeds that ran to their end.
        sign: 1 where higher is better, -1 where lower is.
    """
    found = {key: values for key, values in scores.items() if values}
    return sorted(found, key=lambda key: (-len(found[key]), -sign * statistics.median(found[key])))


def from_the_median(scores: Iterable[tuple[float, Key]], sign: int) -> list[Key]:
    """What belongs to some scores, the median first and then those beside it, by their ranks.

    Of an even number of scores the worse of the two in the middle is the first.

    Args:
        scores: scores, each with what it belongs to.
        sign: 1 where higher is better, -1 where lower is.
    """
    ordered = sorted(scores, key=lambda pair: sign * pair[0])
    middle = (len(ordered) - 1) // 2
    return [ordered[rank][1] for rank in sorted(range(len(ordered)), key=lambda rank: abs(rank - middle))]

"""The division of a step's samples into micro-batches: by the lengths of their texts, or within a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64


def by_length(
    samples: Int64[np.ndarray, " n"], lengths: Int64[np.ndarray, " step"], parts: int
) -> list[Int64[np.ndarray, " _"]]:
    """Divide ``samples`` into ``parts`` that hold texts of similar length and about the same number of tokens."""
    ordered = samples[np.argsort(-lengths[samples], kind="stable")]
    tokens = np.cumsum(lengths[ordered])
    # The sample at which a part reaches its share of the tokens is its last.
    cuts = np.searchsorted(tokens, tokens[-1] * np.arange(1, parts) / parts, side="left") + 1
    n, earlier = len(ordered), 0
    for number, cut in enumerate(cuts.tolist()):  # none is empty
        earlier = cuts[number] = min(max(cut, earlier + 1), n - (parts - 1 - number))
    return np.split(ordered, cuts)


def within_budget(
    samples: Int64[np.ndarray, " n"], shapes: Int64[np.ndarray, "step 3"], budget: int
) -> list[Int64[np.ndarray, " _"]]:
    """Divide ``samples``, in their order, into parts of at most ``budget`` tokens, or of one sample that has more.

    A part of ``n`` queries and ``m`` documents counts ``n`` times its longest query and ``m`` times its longest
    document; ``shapes`` are those of `Step`.
    """
    cuts, first, longest, widest, documents = [], 0, 0, 0, 0
    for place, (query, document, number) in enumerate(shapes[samples].tolist()):
        longest, widest, documents = max(longest, query), max(widest, document), documents + number
        # A first sample that is over the budget alone is a part of its own.
        if place > first and (place + 1 - first) * longest + documents * widest > budget:
            cuts.append(place)
            first, longest, widest, documents = place, query, document, number
    return np.split(samples, cuts)


def divided(parts: Sequence[Int64[np.ndarray, " _"]], count: int) -> list[Int64[np.ndarray, " _"]]:
    """Halve the part with most samples until there are ``count``, which the samples suffice for."""
    found = list(parts)
    while len(found) < count:
        most = max(range(len(found)), key=lambda number: len(found[number]))
        found[most : most + 1] = np.array_split(found[most], 2)
    return found

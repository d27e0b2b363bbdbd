"""Known positives: the documents that the rows of the sources give to a query, drawn in a step or not.

A document is left out of the negatives of a query where a row of any source gives it to that query, or is a copy of one
that a row gives to it: two texts of one key (`text_key`) are copies. It is a negative of every other query, whatever
documents the two queries share. The loss, the checks of files, mining and the figures of held-out pairs use this
definition.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from capt.pretrain.base.errors import counted
from capt.pretrain.base.overlap import same_text

Keys = Int64[np.ndarray, " _"]
Pairs = Int64[np.ndarray, "_ 2"]
"""Keys of a query and of a document, sorted, each pair once."""


def positives_by_query(rows: Iterable[tuple[str, Iterable[str]]]) -> dict[str, dict[str, str]]:
    """The known positives of each query of some rows of texts: what a query is compared by -> the same of a positive ->
    its text."""
    found: dict[str, dict[str, str]] = {}
    for query, positives in rows:
        found.setdefault(same_text(query), {}).update({same_text(text): text for text in positives})
    return found


def negative_fault(
    name: str, query: str, positives: Container[str]
) -> Literal["negative_is_positive", "negative_is_query"] | None:
    """Say why a document is no negative of a query: a copy of one of its positives, or of the query itself.

    All three are what texts are compared by (`same_text`).
    """
    return "negative_is_positive" if name in positives else "negative_is_query" if name == query else None


@dataclass(frozen=True)
class KnownPositives:
    """The keys of the documents of each query: those of ``queries[i]`` are ``documents[starts[i] : starts[i + 1]]``.

    ``queries`` are sorted and all different, and so are the documents of each.
    """

    queries: Keys
    starts: Keys
    documents: Keys

    @classmethod
    def of(cls, queries: Keys, documents: Keys) -> KnownPositives:
        """Index pairs, given by the keys of both sides in any order."""
        pairs = _distinct(queries, documents)
        names, first = np.unique(pairs[:, 0], return_index=True)
        return cls(names, np.append(first, len(pairs)).astype(np.int64), np.ascontiguousarray(pairs[:, 1]))

    def pairs(self, queries: Keys) -> Pairs:
        """The pairs of some different queries, sorted."""
        places = np.searchsorted(self.queries, queries)
        places = places[_at(self.queries, places) == queries]
        number = self.starts[places + 1] - self.starts[places]
        documents = self.documents[_spread(self.starts[places], number)]
        return np.stack([np.repeat(self.queries[places], number), documents], 1)


def _at(values: Keys, places: Keys) -> Keys:
    """The values at places that `searchsorted` gave; -1, which is no key, beyond the last one."""
    found: Keys = np.append(values, -1)[places]
    return found


def _spread(first: Keys, number: Keys) -> Keys:
    """The places of some stretches, one after another, each from ``first`` on and ``number`` long."""
    places: Keys = np.arange(number.sum()) + np.repeat(first - np.cumsum(number) + number, number)
    return places


def known_pairs(sources: Sequence[KnownPositives], queries: Keys, among: Keys | None = None) -> Pairs:
    """The pairs that any source knows of some queries; with ``among`` those of these documents alone."""
    asked = np.unique(queries)
    found = [source.pairs(asked) for source in sources]
    if among is not None:
        there = np.unique(among)
        found = [pairs[np.isin(pairs[:, 1], there)] for pairs in found]
    return found[0] if len(found) == 1 else _distinct(*np.concatenate([np.zeros((0, 2), np.int64), *found]).T)


def of_several_documents(pairs: Pairs) -> Pairs:
    """The pairs of queries of several documents: one document alone is what the ids of the pair say already."""
    _, place, number = np.unique(pairs[:, 0], return_inverse=True, return_counts=True)
    return pairs[number[place] > 1]


def _distinct(queries: Keys, documents: Keys) -> Pairs:
    order = np.lexsort((documents, queries))
    pairs = np.stack([queries[order], documents[order]], 1).astype(np.int64, copy=False)
    is_first = np.ones(len(pairs), dtype=bool)
    is_first[1:] = (pairs[1:] != pairs[:-1]).any(1)
    return pairs[is_first]


@dataclass(frozen=True)
class RowKeys:
    """The keys of some rows: that of each query, and of its positives ``values[starts[i] : starts[i + 1]]``."""

    queries: Keys
    values: Keys
    starts: Keys

    @property
    def known(self) -> KnownPositives:
        """The positives of each query."""
        return KnownPositives.of(np.repeat(self.queries, np.diff(self.starts)), self.values)


class LeftOut(NamedTuple):
    """The mean share of the other documents of a step that are known positives of a query, and so no negatives of it,
    and the number of rows whose query has no negative among the documents of all rows."""

    share: float
    alone: int

    @property
    def text(self) -> str:
        """Both in words."""
        alone = f"; {counted(self.alone, 'query')} have no negative at all" if self.alone else ""
        return (
            f"{self.share:.2%} of the other documents of a step are known positives of a query, and no negatives of it"
            f"{alone}"
        )


def left_out(rows: RowKeys, sources: Sequence[KnownPositives]) -> LeftOut:
    """Compute what is left out of steps of ``rows``, whatever their size: the mean over all draws of two rows."""
    n = len(rows.queries)
    if n < 2:
        return LeftOut(0.0, n)
    # How often each document is drawn, for a row draws one of its positives.
    documents, place = np.unique(rows.values, return_inverse=True)
    number = np.diff(rows.starts)
    drawn = np.bincount(place, 1 / np.repeat(number, number), minlength=len(documents))
    pairs = known_pairs(sources, rows.queries, documents)
    queries, of_pair = np.unique(pairs[:, 0], return_inverse=True)
    total = np.bincount(of_pair, drawn[np.searchsorted(documents, pairs[:, 1])], minlength=len(queries))
    others = total[np.searchsorted(queries, rows.queries)] - 1  # less the row's own
    return LeftOut(float(others.sum() / n / (n - 1)), int((others > n - 1 - 1e-6).sum()))


@dataclass(frozen=True)
class Compared:
    """The documents that the queries of a step are compared with.

    Attributes:
        whole: all micro-batches have one contrast, and not each its own.
        in_batch: documents of all ranks, of the query's rank, or none.
        own_hard: a query sees its own hard negatives, and not those of others.
        queue: documents of earlier steps too.
        masks: known positives are left out.
    """

    whole: bool = True
    in_batch: Literal["global", "local", "none"] = "global"
    own_hard: bool = False
    queue: bool = False
    masks: bool = True


class Candidates(NamedTuple):
    """The queries of the contrast in a step, over all ranks, and the documents that each is compared with.

    ``documents`` are those of other rows and hard negatives, each as often as a query sees it; ``left_out`` of them are
    known positives. ``alone`` queries have no other, and so no negative in the step; the queue is not counted.
    """

    queries: int = 0
    documents: int = 0
    left_out: int = 0
    alone: int = 0


def candidates(
    groups: Keys, queries: Keys, documents: Keys, hard: Keys, owners: Keys, is_own: Bool[np.ndarray, " _"],
    known: Pairs, *, masks: bool = True,
) -> Candidates:  # fmt: skip
    """Count what the queries of a step are compared with.

    Args:
        groups: the contrast that each pair is in; a pair is compared with those of its contrast alone.
        queries: key of the query of each pair.
        documents: key of the document of each pair.
        hard: key of each hard negative.
        owners: the pair that each is of.
        is_own: whether its pair alone sees it, and not the whole contrast.
        known: the pairs that are known of queries of several documents.
        masks: whether these are left out, and copies of the own document.
    """
    # What each contrast holds for all of its queries; the query's own document is not among its candidates.
    of_group = np.concatenate([groups, groups[owners[~is_own]]])
    number = np.bincount(of_group, minlength=int(groups.max(initial=-1)) + 1)[groups] - 1
    number += np.bincount(owners[is_own], minlength=len(groups))
    if not masks:
        return Candidates(len(groups), int(number.sum()), 0, int((number == 0).sum()))
    index = KnownPositives.of(*np.concatenate([known, np.stack([queries, documents], 1)]).T)
    # Texts by number, so that one number is a text in a contrast.
    parts = [documents, hard[~is_own], index.documents, hard[is_own]]
    names, places = np.unique(np.concatenate(parts), return_inverse=True)
    held, listed, own = np.split(places, np.cumsum([len(of_group), len(index.documents)]))
    codes, counts = np.unique(of_group * len(names) + held, return_counts=True)
    # A query's known documents are counted once for each contrast that it is in.
    query = np.searchsorted(index.queries, queries)
    asking, of_pair = np.unique(groups * len(index.queries) + query, return_inverse=True)
    group, asked = np.divmod(asking, max(1, len(index.queries)))
    size = np.diff(index.starts)[asked]
    wanted = np.repeat(group, size) * len(names) + listed[_spread(index.starts[asked], size)]
    place = np.searchsorted(codes, wanted)
    found = np.where(_at(codes, place) == wanted, np.append(counts, 0)[place], 0)
    left = np.bincount(np.repeat(np.arange(len(asking)), size), found, minlength=len(asking))[of_pair] - 1
    # Hard negatives that their pair alone sees are looked up one by one.
    pairs = np.repeat(np.arange(len(index.queries)), np.diff(index.starts)) * len(names) + listed
    is_known = np.isin(query[owners[is_own]] * len(names) + own, pairs)
    left += np.bincount(owners[is_own][is_known], minlength=len(groups))
    return Candidates(len(groups), int(number.sum()), int(left.sum()), int((number == left).sum()))

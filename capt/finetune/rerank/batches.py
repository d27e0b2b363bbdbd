"""The micro-batches of a step: queries dealt to ranks and divided by tokens, or pairs where a query is too large.

Every rank divides the step for all ranks, so that all agree on the number of forward passes without asking each other.
"""

from __future__ import annotations

import dataclasses
import heapq
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64

from capt.finetune.batches import LengthGroup, TextInputs
from capt.finetune.rerank.groups import CandidateList, Groups
from capt.pretrain.pairs.division import divided
from capt.pretrain.pairs.texts import groups_by_length

Places = Int64[np.ndarray, " _"]


@dataclass(frozen=True)
class RerankPart:
    """A micro-batch: pairs of the step.

    Attributes:
        inputs: their tokens.
        places: their places among the candidates of the step.
        groups: the same pairs in groups of similar length, while that saves padding.
        counts: False for a copy of another micro-batch, whose loss counts 0: other ranks have one more.
    """

    inputs: TextInputs
    places: Places
    groups: list[LengthGroup]
    counts: bool = True


@dataclass(frozen=True)
class RerankStep:
    """This rank's micro-batches of a step.

    Attributes:
        parts: the micro-batches; every rank has the same number.
        candidates: the candidates of the whole step, on all ranks.
        queries: their queries.
        order: with two passes the places of all pairs, rank by rank, each with the same number; -1 is a copy. None:
            each micro-batch has whole queries, and one pass suffices.
        tokens: tokens of the whole step, padding not counted.
    """

    parts: list[RerankPart]
    candidates: CandidateList
    queries: int
    order: Places | None
    tokens: int


def assemble(
    groups: Groups, candidates: CandidateList, queries: int, most: tuple[int, int], world: int, rank: int
) -> RerankStep:
    """Divide the candidates of a step of ``queries`` into micro-batches of at ``most`` (queries, tokens), padding
    counted.

    The candidates of a query stay together, unless those of one alone are more than that: then pairs are dealt
    to the ranks by their length, whatever their query, and the step takes two passes.
    """
    _, budget = most
    lengths = candidates.lengths
    starts = np.searchsorted(candidates.groups, np.arange(queries + 1))
    sizes, longest = np.diff(starts), np.maximum.reduceat(lengths, starts[:-1])
    order = None
    if (sizes * longest).max() > budget:
        of_ranks = _dealt(lengths, budget, world)
        # The last pairs of a step may be too few for all ranks.
        order = np.concatenate([np.where(counts, places, -1) for rank_ in of_ranks for places, counts in rank_])
        parts = [_part(groups, candidates, places) for places, _ in of_ranks[rank]]
    else:
        queries_of = _balanced(sizes * longest, world)
        divisions = [_whole(mine, sizes, longest, most) for mine in queries_of]
        count = max(map(len, divisions))
        mine = divided(divisions[rank], min(count, len(queries_of[rank])))
        places = [np.concatenate([np.arange(starts[q], starts[q + 1]) for q in each]) for each in mine]
        parts = [_part(groups, candidates, each) for each in places]
        fewest = min(parts, key=lambda part: len(part.places))
        parts += [dataclasses.replace(fewest, counts=False)] * (count - len(parts))
    return RerankStep(parts, candidates, queries, order, int(lengths.sum()))


def _part(groups: Groups, candidates: CandidateList, places: Places) -> RerankPart:
    pairs = candidates.take(places)
    by_length = []
    for rows in groups_by_length(torch.from_numpy(pairs.lengths)):
        lengths = pairs.lengths[rows.numpy()]
        by_length.append(LengthGroup(rows, int(lengths.max()), bool((lengths != lengths[0]).any())))
    return RerankPart(groups.inputs(pairs), places, by_length)


def _balanced(tokens: Places, world: int) -> list[Places]:
    """Deal queries to ranks, the largest first, each to the rank with fewest tokens; no rank is without one."""
    ranks: list[list[int]] = [[] for _ in range(world)]
    load = [(0, rank) for rank in range(world)]
    for query in np.argsort(-tokens, kind="stable").tolist():
        total, rank = heapq.heappop(load)
        ranks[rank].append(query)
        heapq.heappush(load, (total + int(tokens[query]), rank))
    return [np.array(each, dtype=np.int64) for each in ranks]


def _whole(queries: Places, sizes: Places, longest: Places, most: tuple[int, int]) -> list[Places]:
    """Divide queries into parts of at ``most`` (queries, tokens)."""
    queries = queries[np.argsort(-longest[queries], kind="stable")]
    cuts, first, pairs = [], 0, 0
    for place, query in enumerate(queries.tolist()):
        pairs += int(sizes[query])
        # The first query of a part is the one with the longest pair.
        over = pairs * int(longest[queries[first]]) > most[1]
        if place > first and (over or place - first == most[0]):
            cuts.append(place)
            first, pairs = place, int(sizes[query])
    return np.split(queries, cuts)


def _dealt(lengths: Places, budget: int, world: int) -> list[list[tuple[Places, np.ndarray]]]:
    """Deal pairs to ranks in micro-batches of at most ``budget`` tokens: their places, and which are no copies."""
    order = np.argsort(-lengths, kind="stable")
    ranks: list[list[tuple[Places, np.ndarray]]] = [[] for _ in range(world)]
    first = 0
    while first < len(order):
        rows = max(1, budget // int(lengths[order[first]]))
        block = order[first : first + rows * world]
        # Neighbours go to different ranks: what the ranks compute at the same time is of similar length.
        for rank in range(world):
            number = -(-len(block) // world)
            mine = block[rank::world]
            filled = np.concatenate([mine, np.full(number - len(mine), block[-1])])
            ranks[rank].append((filled, np.arange(number) < len(mine)))
        first += rows * world
    return ranks

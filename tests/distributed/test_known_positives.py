"""From rows of texts to the loss: queries and documents that come again, in several sources, are compared as sets say.

Loss and gradients equal a literal loop over terms in float64, on 1, 2 and 4 ranks that hold different numbers of rows,
over steps that fill the queue, in one contrast a step and in one for each micro-batch.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.pairs.batches import PairAssembler, PairBatch
from capt.pretrain.pairs.config import PairContrast
from capt.pretrain.pairs.known import Compared
from capt.pretrain.pairs.loss import PairTerm
from capt.pretrain.pairs.views import PairViews, parts_of
from tests.bipartite import Bipartite
from tests.support import run_ranks
from tests.unit.contrast.support import relative, unit

BATCH, STEPS, TAU, WIDTH = 16, 3, 0.2, 8
CASES: list[dict[str, Any]] = [
    {"directions": "infonce", "queue": 400},
    {"directions": "symmetric", "queue": 0},
    {"directions": "gte", "queue": 400},
    {"directions": "infonce", "queue": 400, "hard_negatives": "own", "parts": 2},
    {"directions": "infonce", "queue": 0, "in_batch": "local"},
    {"directions": "infonce", "queue": 400, "mask_duplicates": False},
]


def _data(seed: int) -> Bipartite:
    """Two sources that share a contrast, and one whose queries see their own negatives: rows fall unevenly on ranks."""
    return Bipartite.draw(random.Random(seed), (21, 18, 19), 14, alone=2)


def _assemblers(data: Bipartite, case: dict[str, Any], world: int) -> list[PairAssembler]:
    compared = Compared(
        whole="parts" not in case, in_batch=case.get("in_batch", "global"), queue=case["queue"] > 0,
        own_hard=case.get("hard_negatives") == "own", masks=case.get("mask_duplicates", True),
    )  # fmt: skip
    return [
        PairAssembler(
            data.sources, data.sampler(BATCH, mixed="parts" not in case), batch=BATCH, parts=case.get("parts", 1),
            world=world, rank=rank, seed=1, bucketing=False, compared=compared,
        )
        for rank in range(world)
    ]  # fmt: skip


def _table(data: Bipartite) -> tuple[dict[int, int], Tensor]:
    """A unit row for each text, by key."""
    keys = sorted({int(key) for rows in data.sources for key in (*rows.queries.keys, *rows.documents.keys)})
    return {key: place for place, key in enumerate(keys)}, unit(len(keys), WIDTH, seed=7)


def _views(data: Bipartite, batch: PairBatch, places: dict[int, int], table: Tensor) -> PairViews:
    def rows(keys: Tensor) -> Tensor:
        return table[[places[key] for key in keys.tolist()]]

    return PairViews(
        rows(batch.query_keys), rows(batch.keys), batch.keys, TAU, negatives=rows(batch.negative_keys),
        negative_ids=batch.negative_keys, owners=batch.owners, parts=parts_of(data.sources, batch.step_rows),
        sources=batch.sources, query_ids=batch.query_keys if len(batch.known) else None,
        known=batch.known if len(batch.known) else None,
    )  # fmt: skip


def _rank_trains(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rank, world, found = distributed.rank(), distributed.world_size(), []
    for number, case in enumerate(cases):
        data = _data(number)
        places, table = _table(data)
        table.requires_grad_()
        section = PairContrast(**{key: value for key, value in case.items() if key != "parts"})
        term = PairTerm(section, WIDTH, BATCH)
        if term.queue is not None:
            term.queue._dtype = torch.float64
        assembler, losses = _assemblers(data, case, world)[rank], []
        for step in range(STEPS):
            batches = assembler(BATCH * step)
            losses += [term.loss(_views(data, batch, places, table), step=step) / len(batches) for batch in batches]
        total = torch.stack(losses).sum()
        (gradient,) = torch.autograd.grad(total, table)
        found.append({"loss": total.item(), "gradient": gradient.numpy()})
    return found


class _Loop:
    """The loss of one step, a term at a time: who is compared with whom is asked of sets of pairs of texts."""

    def __init__(self, data: Bipartite, case: dict[str, Any], places: dict[int, int], table: Tensor) -> None:
        self.given, self.case, self.data = data.given if case.get("mask_duplicates", True) else set(), case, data
        self.places, self.table = places, table

    def exp(self, anchor: int, key: int, row: Tensor | None = None) -> Tensor:
        """A term."""
        return (self.table[self.places[anchor]] @ (self.table[self.places[key]] if row is None else row) / TAU).exp()

    def of(self, samples: list[dict[str, Any]], queue: list[tuple[int, Tensor]]) -> Tensor:
        """The mean over the parts of a contrast, by their numbers of rows."""
        total = self.table.new_zeros(())
        for i, one in enumerate(samples):
            q, d = one["query"], one["document"]
            others = [
                other for j, other in enumerate(samples)
                if i != j and one["in_batch"] and other["in_batch"]
                and (self.case.get("in_batch") != "local" or one["rank"] == other["rank"])
            ]  # fmt: skip
            positive = self.exp(q, d)
            hard = [*one["hard"]]
            if self.case.get("hard_negatives") != "own":
                hard += [key for other in others for key in other["hard"]]
            documents = [other["document"] for other in others]
            of_query = [self.exp(q, key) for key in (*documents, *hard) if (q, key) not in self.given]
            of_query += [self.exp(q, key, row) for key, row in queue if one["in_batch"] and (q, key) not in self.given]
            queries = [other["query"] for other in others if (other["query"], d) not in self.given]
            directions = self.case["directions"] if one["in_batch"] else "infonce"
            if directions == "infonce":
                total = total + _ratio(positive, of_query)
            elif directions == "symmetric":
                of_document = [self.exp(d, key) for key in queries]
                total = total + (_ratio(positive, of_query) + _ratio(positive, of_document)) / 2
            else:
                joint = [*of_query, *(self.exp(a, key) for key in queries for a in (q, d))]
                theirs = [key for other in others for key in other["hard"]]
                joint += [self.exp(d, key) for key in (*documents, *theirs) if (q, key) not in self.given]
                joint += [self.exp(d, key, row) for key, row in queue if (q, key) not in self.given]
                total = total - (positive / (2 * positive + torch.stack([*joint, 0 * positive]).sum())).log()
        return total / len(samples)


def _ratio(positive: Tensor, others: list[Tensor]) -> Tensor:
    return -(positive / torch.stack([positive, *others]).sum()).log()


def _samples(data: Bipartite, batch: PairBatch, rank: int) -> list[dict[str, Any]]:
    sides = zip(batch.query_keys.tolist(), batch.keys.tolist(), batch.sources.tolist(), strict=True)
    return [
        {
            "query": query, "document": document, "rank": rank, "in_batch": data.sources[source].source.in_batch,
            "hard": batch.negative_keys[batch.owners == i].tolist(),
        }
        for i, (query, document, source) in enumerate(sides)
    ]  # fmt: skip


def _expected(number: int, case: dict[str, Any], world: int) -> tuple[float, Tensor]:
    data = _data(number)
    places, table = _table(data)
    table.requires_grad_()
    loop, queue, total = _Loop(data, case, places, table), [], table.new_zeros(())
    assemblers, parts = _assemblers(data, case, world), case.get("parts", 1)
    for step in range(STEPS):
        of_ranks = [assembler(BATCH * step) for assembler in assemblers]
        for part in range(parts):
            samples = [
                sample for rank, batches in enumerate(of_ranks) for sample in _samples(data, batches[part], rank)
            ]
            total = total + loop.of(samples, queue) / parts
            if case["queue"]:
                queue += [(each["document"], table[places[each["document"]]].detach()) for each in samples]
    (gradient,) = torch.autograd.grad(total, table)
    return total.item(), gradient


@pytest.mark.parametrize("world", [1, 2, 4])
def test_loss_and_gradients_are_those_of_the_sets(world: int) -> None:
    ranks = run_ranks(_rank_trains, world, CASES)
    for number, case in enumerate(CASES):
        loss, gradient = _expected(number, case, world)
        assert math.isfinite(loss)
        mean = sum(each[number]["loss"] for each in ranks) / world
        assert mean == pytest.approx(loss, rel=1e-10), case
        ours = torch.stack([torch.from_numpy(each[number]["gradient"]) for each in ranks]).sum(0) / world
        assert relative(ours, gradient) < 1e-9, case

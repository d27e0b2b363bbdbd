"""A loss over pairs and hard negatives as a literal loop over terms, on one process in float64.

Every term of every denominator is visited by its name: whose key, which direction, why it counts. It is the
oracle of all forms, masks, weights and widths of ``info_nce`` and shares no code with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit.contrast.support import near, unit

N, K, QUEUED, WIDTH = 13, 11, 9, 8
COUNTS = {1: (13,), 2: (9, 4), 4: (5, 2, 6, 0)}
"""Pairs on each rank."""

SOFTMAXES: dict[Any, list[list[str]]] = {
    None: [["q-d"]],
    "infonce": [["q-d"]],
    "symmetric": [["q-d"], ["d-q"]],
    "gte": [["q-d", "q-q", "d-q", "d-d"]],
    "qwen3": [["q-d", "q-q", "d-d"]],
}


@dataclass
class Pairs:
    """The batch of all ranks: queries, documents, hard negatives and what is queued."""

    world: int = 1
    q: Tensor = field(default_factory=lambda: unit(N, WIDTH, seed=0))
    d: Tensor = field(default_factory=lambda: near(unit(N, WIDTH, seed=0), 0.35, seed=1))
    h: Tensor = field(default_factory=lambda: unit(K, WIDTH, seed=2))
    queue: Tensor = field(default_factory=lambda: unit(QUEUED, WIDTH, seed=3))
    owners: Tensor = field(default_factory=lambda: torch.tensor([0, 0, 1, 3, 4, -1, 6, 6, 6, 10, 12]))
    ids: Tensor = field(default_factory=lambda: torch.arange(N) // 2 + 100)
    hard_ids: Tensor = field(default_factory=lambda: torch.arange(K) % 7 + 100)
    queue_ids: Tensor = field(default_factory=lambda: torch.arange(QUEUED) % 5 + 100)
    query_ids: Tensor = field(default_factory=lambda: torch.tensor([0, 0, 1, 2, 3, 4, 5, 5, 5, 6, 7, 8, 8]) + 500)
    known: Tensor = field(
        default_factory=lambda: torch.tensor(
            [[500, 101], [500, 106], [501, 103], [503, 100], [503, 104], [503, 105], [505, 104], [505, 102], [508, 101],
             [508, 106], [999, 103], [502, 999]]
        )
    )  # fmt: skip
    """Pairs of texts that belong together beside those of one id; a query of several documents, and the reverse."""
    temperatures: Tensor = field(default_factory=lambda: torch.linspace(0.05, 0.4, N, dtype=torch.float64))
    """Divisor of each pair in a case ``by_row``."""

    @property
    def ranks(self) -> list[int]:
        """The rank of each pair; pairs lie on the ranks in their order."""
        return [rank for rank, count in enumerate(COUNTS[self.world]) for _ in range(count)]

    @property
    def hard_ranks(self) -> list[int]:
        """The rank of each hard negative: that of its owner; nobody's lie on the first."""
        return [self.ranks[owner] if owner >= 0 else 0 for owner in self.owners.tolist()]

    def solve(self, temperature: float, options: dict[str, Any]) -> dict[str, Any]:
        """The loss over all ranks, its gradients by ``q``, ``d``, ``h`` and the temperature, and the masked terms."""
        if "precisions" in options:
            return self._solve_precisions(temperature, options)
        rows = [each.clone().requires_grad_() for each in (self.q, self.d, self.h)]
        tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
        widths = options.get("matryoshka") or (WIDTH,)
        weights = options.get("matryoshka_weights") or (1.0,) * len(widths)
        loss, masked = torch.zeros((), dtype=torch.float64), 0
        for width, weight in zip(widths, weights, strict=True):
            cut = [each if width == WIDTH else F.normalize(each[:, :width], dim=1) for each in (*rows, self.queue)]
            terms = _Loop(self, *cut, tau, options)
            loss = loss + weight * terms.loss()
            masked += terms.masked
        q, d, h, by_tau = torch.autograd.grad(loss, (*rows, tau), materialize_grads=True)
        return {"loss": loss.item(), "q": q, "d": d, "h": h, "tau": by_tau.item(), "masked": masked}

    def _solve_precisions(self, temperature: float, options: dict[str, Any]) -> dict[str, Any]:
        """The sum over the precisions of the vectors `pooled` makes, whose gradients pass straight through tanh."""
        rest = {name: value for name, value in options.items() if not name.startswith("precision")}
        whole: dict[str, Any] = {}
        for name, weight in zip(options["precisions"], options["precision_weights"], strict=True):
            hard, slope = {}, {}
            for field_name in ("q", "d", "h", "queue"):
                x = pooled(getattr(self, field_name))
                rounded = torch.where(x > 0, 1.0, -1.0).double() if name == "binary" else (127 * x.tanh()).round()
                hard[field_name] = x if name == "float" else rounded
                slope[field_name] = {"float": 1, "int8": 127, "binary": 1}[name] * (
                    1 if name == "float" else 1 - x.tanh() ** 2
                )
            lengths = {key: each.norm(dim=1, keepdim=True) for key, each in hard.items()}
            units = {key: each / lengths[key] for key, each in hard.items()}
            found = replace(self, **units).solve(temperature, rest)
            for key in ("q", "d", "h"):
                # The gradient of x / |x|: what is across the direction, over the length.
                g = found[key]
                g = (g - (g * units[key]).sum(1, keepdim=True) * units[key]) / lengths[key]
                whole[key] = whole.get(key, 0) + weight * g * slope[key]
            for key in ("loss", "tau"):
                whole[key] = whole.get(key, 0) + weight * found[key]
            whole["masked"] = whole.get("masked", 0) + found["masked"]
        return whole


def pooled(rows: Tensor) -> Tensor:
    """Vectors of other lengths, of which int8 keeps different parts."""
    return rows * torch.linspace(0.4, 2.5, len(rows), dtype=rows.dtype)[:, None]


class _Loop:
    def __init__(
        self, batch: Pairs, q: Tensor, d: Tensor, h: Tensor, queue: Tensor, tau: Tensor, options: dict[str, Any]
    ) -> None:
        self.batch, self.options = batch, options
        self.taus = list(batch.temperatures) if options.get("by_row") else [tau] * N
        self.rows = {"q": q, "d": d, "h": h, "queue": queue}
        self.cosines = {a + b: self.rows[a] @ self.rows[b].T for a in "qd" for b in self.rows}
        self.numbers = {name: each.tolist() for name, each in self.cosines.items()}
        self.ids = {name: getattr(batch, name).tolist() for name in ("ids", "query_ids", "hard_ids", "queue_ids")}
        self.known = {tuple(pair) for pair in batch.known.tolist()}
        self.ranks, self.hard_ranks = batch.ranks, batch.hard_ranks
        self.in_batch = options.get("in_batch", "global")
        directions = options.get("directions")
        self.softmaxes = SOFTMAXES.get(directions) or [list(directions)]
        if self.in_batch == "none":
            self.softmaxes = [["q-d"]]
        self.own_only = options.get("hard_negatives", "own" if directions == "qwen3" else "all") == "own"
        self.margin = options.get("mask_margin", 0.1 if directions == "qwen3" else None)
        self.masked = 0

    def loss(self) -> Tensor:
        """The mean over all anchors, or their sum."""
        losses = [self._loss_of(i, directions) for directions in self.softmaxes for i in range(N)]
        return torch.stack(losses).sum() / (1 if self.options.get("reduction") == "sum" else len(losses))

    def _loss_of(self, i: int, directions: list[str]) -> Tensor:
        positive = self.cosines["qd"][i, i]
        limit, number = torch.inf, positive.item()
        if self.margin is not None:
            limit = number + self.margin
        if "mask_relative" in self.options:
            limit = number - abs(number) * self.options["mask_relative"]
        positives, negatives = 0, torch.zeros((), dtype=torch.float64)  # all over the term of the positive
        for direction in directions:
            positives += direction in ("q-d", "d-q")
            terms: dict[str, list[tuple[int, float]]] = {}
            for name, j, alpha in self._live_terms(i, direction):
                if self.numbers[name][i][j] > limit:
                    self.masked += 1
                else:
                    terms.setdefault(name, []).append((j, alpha))
            for name, counted in terms.items():
                places, alphas = zip(*counted, strict=True)
                cosines, by = self.cosines[name][i, list(places)], torch.tensor(alphas, dtype=torch.float64)
                negatives = negatives + ((cosines - positive) / self.taus[i] + by * cosines.detach()).exp().sum()
            if direction in ("q-d", "d-d") and self.options.get("queued"):
                negatives = negatives + self._queue_terms(i, direction, limit, positive)
        return torch.log1p(negatives + (positives - 1))

    def _live_terms(self, i: int, direction: str) -> Iterator[tuple[str, int, float]]:
        """Table and column of each cosine with anchor ``i``, and its hardness."""
        anchor, key = direction[0], direction[2]
        for j in range(N):
            if self.in_batch != "none" and j != i and self._sees(i, self.ranks[j]) and self._differ(i, "ids", j, key):
                yield anchor + key, j, self._alpha("hardness_in_batch", direction)
        if key == "q" or not self.options.get("hard", True):
            return
        for k, owner in enumerate(self.batch.owners.tolist()):
            if not self._differ(i, "hard_ids", k):
                continue
            if owner == i and direction == "q-d":
                yield "qh", k, self._alpha("hardness_own", direction)
            elif owner != i and not self.own_only and self._sees(i, self.hard_ranks[k]):
                yield anchor + "h", k, self._alpha("hardness_in_batch", direction)

    def _queue_terms(self, i: int, direction: str, limit: float, positive: Tensor) -> Tensor:
        name = direction[0] + "queue"
        numbers = self.numbers[name][i]
        counted = [k for k in range(QUEUED) if self._differ(i, "queue_ids", k) and numbers[k] <= limit]
        cosines = self.cosines[name][i, counted]
        emphasis = (self.options.get("hardness", 0.0) * cosines.detach()).exp()
        share = self.options.get("queue_share")
        weight = 1.0 if share is None else min(1.0, share * N / QUEUED)
        parts = emphasis / emphasis.sum() * ((cosines - positive) / self.taus[i]).exp()
        return weight * len(counted) * parts.sum()

    def _sees(self, i: int, rank: int) -> bool:
        return self.in_batch == "global" or (self.in_batch == "local" and self.ranks[i] == rank)

    def _differ(self, i: int, name: str, j: int, key: str = "d") -> bool:
        if not self.options.get("with_ids"):
            return True
        mine, other = self.ids["ids"][i], self.ids[name][j]
        queries = self.ids["query_ids"]
        pair = (queries[i], other) if key == "d" else (queries[j], mine)
        return mine != other and not (self.options["with_ids"] == "known" and pair in self.known)

    def _alpha(self, name: str, direction: str) -> float:
        return float(self.options.get(name, 0.0)) if direction == "q-d" else 0.0

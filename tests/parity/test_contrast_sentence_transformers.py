"""The losses of sentence-transformers and ours are the same over a run: forms, hardness, cache, widths.

In float64, where rounding does not grow over the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from capt.pretrain.contrast import cached_backward, info_nce

losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

STEPS, N, NEGATIVES, IN, OUT, TAU = 20, 10, 3, 7, 12, 0.1

FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"directions": "infonce"}),
    ({"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}, {"directions": "symmetric"}),
    (
        {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")},
        {"directions": "gte"},
    ),
    ({"directions": ("query_to_doc", "query_to_query")}, {"directions": ("q-d", "q-q")}),
    ({"directions": ("query_to_doc", "doc_to_query")}, {"directions": ("q-d", "d-q"), "partition": "joint"}),
    ({"directions": ("query_to_doc", "doc_to_doc")}, {"directions": ("d-d", "q-d")}),
    ({"hardness_mode": "in_batch_negatives", "hardness_strength": 9.0}, {"hardness_in_batch": 9.0}),
    ({"hardness_mode": "hard_negatives", "hardness_strength": 5.0}, {"hardness_own": 5.0}),
    (
        {"hardness_mode": "all_negatives", "hardness_strength": 5.0},
        {"hardness_in_batch": 5.0, "hardness_own": 5.0},
    ),
    (
        {
            "directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"),
            "hardness_mode": "in_batch_negatives",
            "hardness_strength": 9.0,
        },
        {"directions": "gte", "hardness_in_batch": 9.0},
    ),
]
"""Arguments there, and options here."""


class Encoder(nn.Sequential):
    """An encoder that both call: of columns of features there, of rows here."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(IN, 16), nn.Tanh(), nn.Linear(16, OUT))
        self.double()

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": super().forward(features["input_ids"])}

    def get_embedding_dimension(self) -> int:
        return OUT


def _columns(step: int) -> list[Tensor]:
    """Rows of a step: queries, documents near them, and hard negatives."""
    generator = torch.Generator().manual_seed(step)
    q = torch.randn(N, IN, generator=generator, dtype=torch.float64)
    others = [
        q + scale * torch.randn(N, IN, generator=generator, dtype=torch.float64) for scale in (0.5, *[1.0] * NEGATIVES)
    ]
    return [q, *others]


def _train(backward: Callable[[Encoder, int], Tensor]) -> list[float]:
    encoder = Encoder()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.2)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found.append(backward(encoder, step).item())
        optimizer.step()
    return found


def _theirs(make: Callable[[Encoder], Any]) -> list[float]:
    made: dict[int, Any] = {}

    def backward(encoder: Encoder, step: int) -> Tensor:
        loss_of = made.setdefault(id(encoder), make(encoder))
        loss = loss_of([{"input_ids": column} for column in _columns(step)], torch.zeros(N))
        loss.backward()
        return loss

    return _train(backward)


def _ours(micro: int, **options: Any) -> list[float]:
    def contrast(*columns: Tensor) -> Tensor:
        q, d, *hard = columns
        return info_nce(
            q,
            d,
            temperature=TAU,
            negatives=torch.cat(hard),
            negative_owners=torch.arange(N).repeat(NEGATIVES),
            **options,
        )

    def backward(encoder: Encoder, step: int) -> Tensor:
        def encode(rows: list[Tensor]) -> list[Tensor]:
            return [normalize(encoder({"input_ids": column})["sentence_embedding"], dim=1) for column in rows]

        parts = zip(*(column.split(micro) for column in _columns(step)), strict=True)
        return cached_backward(encode, [list(part) for part in parts], contrast)

    return _train(backward)


@pytest.mark.parametrize(("theirs", "ours"), FORMS, ids=[str(ours) for _, ours in FORMS])
def test_twenty_steps_of_the_ranking_loss(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    expected = _theirs(lambda encoder: losses.MultipleNegativesRankingLoss(encoder, scale=1 / TAU, **theirs))
    assert expected[0] - expected[-1] > 0.1
    assert _ours(N, **ours) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("number", [1, 3, 7])
def test_twenty_steps_of_the_cached_ranking_loss(number: int) -> None:
    theirs, ours = FORMS[number]
    expected = _theirs(
        lambda encoder: losses.CachedMultipleNegativesRankingLoss(encoder, scale=1 / TAU, mini_batch_size=4, **theirs)
    )
    assert _ours(3, **ours) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("number", [1, 3, 7])
@pytest.mark.parametrize("cached", [False, True])
def test_twenty_steps_of_the_matryoshka_loss(cached: bool, number: int) -> None:
    """Theirs shrinks the second pass of its cache; ours cuts the rows inside the one contrast."""
    (theirs, ours), dims, weights = FORMS[number], (OUT, 8, 3), (1.0, 0.5, 0.25)

    def make(encoder: Encoder) -> Any:
        if cached:
            inner = losses.CachedMultipleNegativesRankingLoss(encoder, scale=1 / TAU, mini_batch_size=4, **theirs)
        else:
            inner = losses.MultipleNegativesRankingLoss(encoder, scale=1 / TAU, **theirs)
        return losses.MatryoshkaLoss(encoder, inner, dims, weights)

    found = _ours(3 if cached else N, matryoshka=dims, matryoshka_weights=weights, **ours)
    assert found == pytest.approx(_theirs(make), abs=1e-8)

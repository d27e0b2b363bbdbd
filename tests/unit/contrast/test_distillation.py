"""KL from a teacher's scores: a literal loop over ragged candidates and ranks, and torch's own divergence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, normalize

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast import distillation_loss
from tests.support import run_ranks
from tests.unit.contrast.support import near, relative, unit

N, K, WIDTH, TAU, TEACHER = 7, 9, 10, 0.1, 2.0
OWNERS = torch.tensor([0, 0, 0, 1, 3, 3, 5, 6, 6])
CUT = {"matryoshka": (WIDTH, 4), "matryoshka_weights": (1.0, 0.5)}


def _rows() -> list[Tensor]:
    q = unit(N, WIDTH, seed=0)
    return [q, near(q, 0.4, seed=1), unit(K, WIDTH, seed=2)]


def _scores() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(size, generator=generator, dtype=torch.float64) for size in (N, K))  # type: ignore[return-value]


def _by_terms(rows: list[Tensor], widths: dict[int, float]) -> Tensor:
    """The mean over the queries, one candidate at a time."""
    positives, negatives = (scores.tolist() for scores in _scores())
    total = torch.zeros((), dtype=torch.float64)
    for width, weight in widths.items():
        q, d, h = (each if width == WIDTH else normalize(each[:, :width], dim=1) for each in rows)
        for i in range(N):
            own = [k for k in range(K) if OWNERS[k] == i]
            scores = [positives[i], *(negatives[k] for k in own)]
            cosines = [q[i] @ d[i], *(q[i] @ h[k] for k in own)]
            teacher = sum(math.exp(score / TEACHER) for score in scores)
            student = torch.stack([(cosine / TAU).exp() for cosine in cosines]).sum()
            for score, cosine in zip(scores, cosines, strict=True):
                p = math.exp(score / TEACHER) / teacher
                total = total + weight * p * (math.log(p) - ((cosine / TAU).exp() / student).log())
    return total / N


def _rank_solves(options: dict[str, Any]) -> tuple[float, list[Any]]:
    rank, world = distributed.rank(), distributed.world_size()
    first, last = {1: [(0, N)], 2: [(0, 5), (5, N)]}[world][rank]
    mine, hard = slice(first, last), (first <= OWNERS) & (last > OWNERS)
    q, d, h = _rows()
    rows = [each.clone().requires_grad_() for each in (q[mine], d[mine], h[hard])]
    positives, negatives = _scores()
    loss = distillation_loss(
        *rows, negative_owners=OWNERS[hard] - first, positive_scores=positives[mine],
        negative_scores=negatives[hard], temperature=TAU, teacher_temperature=TEACHER, **options,
    )  # fmt: skip
    loss.backward()
    return loss.item() / world, [each.grad.numpy() / world for each in rows if each.grad is not None]


@pytest.mark.parametrize("world", [1, 2])
def test_loss_and_gradients_are_the_literal_loop(world: int) -> None:
    for options, widths in (({}, {WIDTH: 1.0}), (CUT, {WIDTH: 1.0, 4: 0.5})):
        rows = [each.requires_grad_() for each in _rows()]
        expected = _by_terms(rows, widths)
        expected.backward()
        ranks = run_ranks(_rank_solves, world, options) if world > 1 else [_rank_solves(options)]
        assert sum(loss for loss, _ in ranks) == pytest.approx(expected.item(), rel=1e-12)
        for place, each in enumerate(rows):
            actual = torch.cat([torch.from_numpy(gradients[place]) for _, gradients in ranks])
            assert each.grad is not None
            assert relative(actual, each.grad) < 1e-11


def test_equal_numbers_of_candidates_are_torchs_divergence() -> None:
    q, d, h = _rows()
    h = h[:N]
    positives, negatives = _scores()
    scores = {"positive_scores": positives, "negative_scores": negatives[:N]}
    found = distillation_loss(q, d, h, negative_owners=torch.arange(N), temperature=TAU, **scores)
    student = torch.stack([(q * d).sum(1), (q * h).sum(1)], 1) / TAU
    teacher = torch.stack([positives, negatives[:N]], 1).softmax(1)
    assert found.item() == pytest.approx(
        kl_div(student.log_softmax(1), teacher, reduction="batchmean").item(), rel=1e-12
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"negative_owners": torch.full((K,), -1)}, "every candidate belongs to a query"),
        ({"negative_owners": torch.full((K,), N)}, "rows of the anchors, 0 to 6"),
        ({"positive_scores": torch.full((N,), math.nan)}, "a score of the teacher is not finite"),
        ({"teacher_temperature": 0.0}, "the temperature must be a positive number"),
    ],
)
def test_candidates_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    positives, negatives = _scores()
    arguments = {"negative_owners": OWNERS, "positive_scores": positives, "negative_scores": negatives, **changes}
    with pytest.raises(ConfigError, match=message):
        distillation_loss(*_rows(), temperature=TAU, **arguments)

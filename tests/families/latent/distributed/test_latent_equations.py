"""Terms of the encoder beside the reconstruction, against the equations as written, on one rank and on three."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.latent.batches import LatentBatch, StepNoise, sample_batch
from capt.pretrain.latent.objectives import LatentForward, objective_of
from capt.pretrain.latent.posterior import Critics, EncoderOutput
from tests.latent import small_job
from tests.support import run_ranks

N, D, K, BETA = 7, 4, 5, 0.7
REGULARIZERS = ("f", "g")
TERMS = ("mean", "mean_inside", "sum_inside")
CONTRASTS: tuple[tuple[str, ...], ...] = (
    (), ("contrast.over=h",), ("contrast.mean_pair=true",), ("contrast.prior_negatives=2",),
)  # fmt: skip
VIEWS = ("other_view", "own_view")
# Every form of the encoder's term, and every contrast with either view's negatives.
CASES = [(regularizer, term, (), "own_view") for regularizer, term in product(REGULARIZERS, TERMS)] + [
    ("f", "mean", *each) for each in product(CONTRASTS, VIEWS)
]


def _drawn() -> tuple[Tensor, Tensor, Critics]:
    torch.manual_seed(0)
    z, h = (torch.randn(2, N, width, dtype=torch.float64) for width in (D, K))
    return z, h, Critics(D, K, _job(CASES[0]).critic).double()


def _job(case: tuple[str, str, tuple[str, ...], str]) -> Any:
    regularizer, term, more, negatives = case
    return small_job(
        "clvae_paper", Path("unread"), Path("unread/run"), f"objective.regularizer={regularizer}",
        f"objective.critic_term={term}", f"contrast.negatives={negatives}", "contrast.weight=0.3",
        "contrast.temperature=0.2", *more, batch=N, micro=N,
    )  # fmt: skip


def _on_this_rank() -> list[tuple[float, np.ndarray, np.ndarray]]:
    """Each case's loss, and its gradient by this rank's z and h."""
    rank, world = distributed.rank(), distributed.world_size()
    share = -(-N // world)
    mine = torch.arange(N)[rank::world]
    rows = torch.cat([mine, mine.new_zeros(share - len(mine))])  # filled up to one number on every rank
    results = []
    for case in CASES:
        job = _job(case)
        z, h, critics = _drawn()
        batch = LatentBatch(torch.zeros(share, 3, dtype=torch.int64), rows, len(mine), N)
        noise = StepNoise(1, ("step", 0), rows, N, torch.device("cpu"))
        leaves = [each[:, rows].flatten(0, 1).requires_grad_() for each in (z, h)]
        encoded = EncoderOutput(leaves[0], leaves[1], None)
        sampled = sample_batch(job, batch, noise)
        rec = torch.zeros((), dtype=torch.float64)
        loss = objective_of(job)(LatentForward(job, sampled, encoded, rec, None, critics, BETA, None)).total()
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        by_z, by_h = (each.view(2, share, -1)[:, : len(mine)].numpy() for each in gradients)
        results.append((loss.item(), by_z, by_h))
    return results


def _literal(case: tuple[str, str, tuple[str, ...], str]) -> tuple[float, Tensor, Tensor]:
    """The equations sentence by sentence: Eq. 4, 7, 15, 16 and 19 for the critic, Eq. 8 to 10 for the contrast."""
    regularizer, term, more, negatives = case
    z, h, critics = _drawn()
    leaves = [z.requires_grad_(), h.requires_grad_()]
    assert critics.g is not None
    loss = torch.zeros((), dtype=torch.float64)
    for view in range(2):
        total = torch.zeros((), dtype=torch.float64)
        for i in range(N):
            of_f = torch.cat([z[view, i], h[view, i].detach()])
            total = total + (critics.f(of_f) if regularizer == "f" else critics.g(z[view, i]))[0]
        mean = total / N
        forms = {"mean": mean, "mean_inside": (1 + (-mean).exp()).log(), "sum_inside": (1 + (-total).exp()).log()}
        loss = loss + BETA * forms[term]

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        return a @ b / (a @ a).sqrt() / (b @ b).sqrt() / 0.2

    first, second = (list(view) for view in (h if "contrast.over=h" in more else z))
    if "contrast.mean_pair=true" in more:
        first, second = [sum(first) / N, *first], [sum(second) / N, *second]
    draws: list[Tensor] = []
    if "contrast.prior_negatives=2" in more:
        batch = LatentBatch(torch.zeros(N, 3, dtype=torch.int64), torch.arange(N), N, N)
        found = sample_batch(_job(case), batch, StepNoise(1, ("step", 0), batch.rows, N, torch.device("cpu"))).negatives
        assert found is not None
        draws = list(found.double())
    others = first if negatives == "own_view" else second
    for i, (anchor, positive) in enumerate(zip(first, second, strict=True)):
        denominator = similarity(anchor, positive).exp()
        for j, other in enumerate(others):
            if j != i:
                denominator = denominator + similarity(anchor, other).exp()
        for draw in draws:
            denominator = denominator + similarity(anchor, draw).exp()
        loss = loss - 0.3 / len(first) * (similarity(anchor, positive) - denominator.log())
    by_z, by_h = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return loss.item(), by_z, by_h


@pytest.mark.parametrize("world", [1, 3])
def test_the_encoders_terms_are_the_equations(world: int) -> None:
    ranks = run_ranks(_on_this_rank, world)
    for number, case in enumerate(CASES):
        wanted, *expected = _literal(case)
        found = [results[number] for results in ranks]
        assert math.fsum(loss for loss, *_ in found) / world == pytest.approx(wanted, rel=1e-6), case
        for part, gradient in enumerate(expected, 1):
            for rank, result in enumerate(found):  # the engine's average over the ranks divides by their number
                np.testing.assert_allclose(
                    result[part] / world, gradient[:, rank::world], rtol=1e-6, atol=1e-9, err_msg=str(case)
                )

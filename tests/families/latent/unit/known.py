"""A decoder whose likelihood is known by quadrature over a z of 1 or 2 dimensions."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from capt.pretrain.latent.batches import LatentBatch
from capt.pretrain.latent.evaluation.bounds import Mixture, importance_weighted_nll, prior, refitted_proposal
from capt.pretrain.latent.evaluation.model import log_likelihoods
from capt.pretrain.latent.models import LatentTextModel, build
from capt.pretrain.latent.posterior import Normal, standard_log_prob
from tests.latent import small_job

WORDS, N, LENGTH = 12, 5, 7


def seeded(seed: int = 0) -> torch.Generator:
    """A generator."""
    return torch.Generator().manual_seed(seed)


class KnownDecoder:
    """A decoder with random weights, sentences, log p(x) by quadrature, and an encoder's Gaussian that fits badly."""

    def __init__(self, latent: int, folder: Path) -> None:
        job = small_job("vae", folder, folder / "run", f"model.latent={latent}", f"model.noise={latent}")
        torch.manual_seed(3)
        modules = build(job, WORDS)
        with torch.no_grad():
            for weight in modules["decoder"].parameters():
                weight.uniform_(-1.0, 1.0)  # a decoder that listens to z
        self.model = LatentTextModel.of({name: module.eval() for name, module in modules.items()})
        tokens = torch.randint(4, WORDS, (N, LENGTH), generator=seeded(1))
        self.batch = LatentBatch(tokens, torch.arange(N), N, N)
        self.bad = Normal(torch.full((N, latent), 1.2), log_variance=torch.full((N, latent), -0.6))
        self.prior = prior(N, latent, torch.device("cpu"))
        self.log_p = self.quadrature(latent)

    def quadrature(self, latent: int) -> Tensor:
        r""":math:`\log \sum_g h^d\, p(x|z_g) N(z_g; 0, I)` on a grid of step h from -7 to 7, in float64."""
        axis = torch.linspace(-7, 7, 1401 if latent == 1 else 141, dtype=torch.float64)
        grid = torch.cartesian_prod(*[axis] * latent).view(-1, 1, latent)
        log_p = log_likelihoods(self.model.decoder, grid.float().expand(-1, N, -1), self.batch.tokens).double()
        return torch.logsumexp(log_p + standard_log_prob(grid), 0) + latent * math.log(float(axis[1] - axis[0]))

    def refitted(self, seed: int = 0, steps: int = 60) -> Normal:
        return refitted_proposal(self.model, self.batch, [self.bad], seeded(seed), steps=steps)

    def proposals(self) -> dict[str, Normal | Mixture]:
        return {"q": self.bad, "prior": self.prior, "mixture": Mixture([self.bad, self.prior]),
                "refitted": self.refitted()}  # fmt: skip

    def bound(self, proposal: Normal | Mixture, draws: int, seed: int = 0) -> Tensor:
        with torch.no_grad():
            z = proposal.sample(draws, seeded(seed))
            return -importance_weighted_nll(z, log_likelihoods(self.model.decoder, z, self.batch.tokens), proposal)

    def bounds(self, proposal: Normal | Mixture, draws: int, repetitions: int) -> Tensor:
        """:meth:`bound` of several seeds, a row each: the decoder sees the draws of all of them together."""
        with torch.no_grad():
            z = torch.stack([proposal.sample(draws, seeded(seed)) for seed in range(repetitions)])
            found = log_likelihoods(self.model.decoder, z.flatten(0, 1), self.batch.tokens).view(z.shape[:3])
            return torch.stack([-importance_weighted_nll(*own, proposal) for own in zip(z, found, strict=True)])

r"""The likelihood of a text with and without its unknown words.

Let U be the positions of a sentence whose word is unknown and K all others, ``</s>`` among them. The decoder gives

.. math::
    \log p(x|z) = \sum_t \log p(w_t | w_{<t}, z), \qquad \log p_K(x|z) = \sum_{t \in K} \log p(w_t | w_{<t}, z)

The known words are predicted by a model that is told for nothing where unknown words are: every position is read, also
as ``<unk>``, but only those of K are scored. With :math:`p_K(x) = \int p(z)\, p_K(x|z)\, dz` the perplexity of a known
word is, over all sentences,

.. math::
    \mathrm{PPL}_K = \exp \frac{-\sum_x \log p_K(x)}{\sum_x |K|}

``<unk>`` represents thousands of words and is far easier to predict than any of them, or, where training never met it,
far harder. A perplexity in which it counts as one word says little between texts whose share of it differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from pretrain.latent.data.batches import Batch
from pretrain.latent.evaluation.bounds import Proposal, importance_weighted_nll
from pretrain.latent.evaluation.model import passes
from pretrain.latent.models.build import TextModel
from pretrain.latent.models.text import TextDecoder


@dataclass(frozen=True)
class Likelihoods:
    """log p(x | z) and log p_K(x | z) of ``s`` draws of each of ``n`` sentences."""

    words: Float[Tensor, "s n"]
    known: Float[Tensor, "s n"]

    def first(self, draws: int) -> Likelihoods:
        """Likelihoods of the first ``draws`` draws."""
        return Likelihoods(self.words[:draws], self.known[:draws])


def likelihoods(
    decoder: TextDecoder, z: Float[Tensor, "s n d"], tokens: Int[Tensor, "n length"], unknown: int
) -> Likelihoods:
    """Compute both likelihoods of each draw, many sentences and draws in one pass of the decoder.

    Args:
        decoder: the decoder.
        z: the draws.
        tokens: the sentences.
        unknown: the number of the unknown word.
    """
    words, known = [], []
    for part, own in passes(z, tokens):
        scores = decoder.token_log_likelihoods(part, own)
        words.append(scores.sum(0))
        known.append((scores * (own[:, 1:] != unknown).t()).sum(0))
    return Likelihoods(torch.cat(words).view(z.shape[:2]), torch.cat(known).view(z.shape[:2]))


@torch.no_grad()
def weighted_nlls(
    model: TextModel, batch: Batch, proposal: Proposal, draws: int, generator: torch.Generator, unknown: int
) -> tuple[Float64[Tensor, " n"], Float64[Tensor, " n"]]:
    r"""Estimate :math:`-\log p(x)` and :math:`-\log p_K(x)` of each sentence by importance weighting.

    The draws are the same for both, and both are, on average, not below the truth
    (:func:`~pretrain.latent.evaluation.bounds.importance_weighted_nll`). The arguments are those of
    :func:`~pretrain.latent.evaluation.importance.log_likelihood_bound` and of :func:`likelihoods`.
    """
    z = proposal.sample(draws, generator)
    found = likelihoods(model.decoder, z, batch.tokens, unknown)
    return importance_weighted_nll(z, found.words, proposal), importance_weighted_nll(z, found.known, proposal)

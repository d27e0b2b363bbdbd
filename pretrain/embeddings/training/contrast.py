r"""The discriminator's loss for any sampler, weights and objective, as a function of its scores.

The negatives of a centre :math:`x_i` with :math:`c_i` neighbours are the ``shared`` noise words of its block and
``samples`` words from the generator, with weights that make them :math:`\lambda K` and :math:`(1 - \lambda) K` for each
pair: an average of the mixture of section 2.2 in place of draws from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pretrain.embeddings.config import EmbeddingJob
from pretrain.embeddings.objectives.classification import classification_loss, nce_logits
from pretrain.embeddings.objectives.margin import augmented, margin_loss
from pretrain.embeddings.objectives.weights import self_adversarial_weights
from pretrain.embeddings.sampler.reward import rewards_of


@dataclass(frozen=True)
class Scores:
    """Something about every pair of a band: scores, weights or log-densities.

    ``noise`` and ``generated`` are side by side in ``negative``, in this order.
    """

    positive: Float[Tensor, "b c w"]
    negative: Float[Tensor, "b c k"]


def noise_share(job: EmbeddingJob) -> float:
    """Lambda: the part of the negatives that comes from the noise."""
    return {"noise": 1.0, "generator": 0.0, "mixture": job.negatives.mixture}[job.negatives.sampler]


def reweighted(job: EmbeddingJob, scores: Scores, weights: Scores) -> Scores:
    """The weights with which pairs enter the loss: of self-adversarial negatives those of the scores, else the same."""
    if job.negatives.weights != "self_adversarial":
        return weights
    negative = self_adversarial_weights(scores.negative.detach(), job.negatives.alpha, weights.negative)
    return Scores(weights.positive, negative)


def discriminator_loss(
    job: EmbeddingJob, scores: Scores, weights: Scores, log_density: Scores | None
) -> Float[Tensor, ""]:
    """The sum over this rank's pairs, in nats (for the margin objective in units of the score).

    Args:
        job: which objective.
        scores: the discriminator's, with a graph.
        weights: 1 or 0 of positives; of negatives how much each counts (`reweighted`).
        log_density: log of the density that negatives are drawn from, for ``nce``.
    """
    if job.objective.type == "margin":
        return _margin(job, scores, weights.positive, weights.negative)
    logits = _logits(job, scores, log_density)
    return classification_loss(logits.positive, logits.negative, weights.positive, weights.negative)


def curvatures(
    x: Float[Tensor, "b c d"], y: Float[Tensor, "b k d"], drawn: Float[Tensor, "b c m d"] | None, weights: Scores
) -> tuple[Float[Tensor, "b c"], Float[Tensor, "b k"], Float[Tensor, "b c m"] | None]:
    r"""Upper bounds of the curvature of a loss of log-sigmoids along each row, without graph.

    :math:`h_i = \frac14 \sum_j w_{ij} |y_j|^2` over the pairs of row :math:`x_i`, and likewise along rows of columns.

    Args:
        x: rows of the centres.
        y: rows of the columns of each block.
        drawn: rows of each centre's own negatives, which are last in the weights.
        weights: those of the loss.
    """
    with torch.no_grad():
        together = torch.cat([weights.positive, weights.negative], dim=2)
        shared, own = together[:, :, : y.shape[1]], together[:, :, y.shape[1] :]
        of_x, of_y = (rows.square().sum(-1) / 4 for rows in (x, y))
        along_y = (shared.mT @ of_x[..., None])[..., 0]
        along_x = (shared @ of_y[..., None])[..., 0]
        if drawn is None:
            return along_x, along_y, None
        return along_x + (own * drawn.square().sum(-1) / 4).sum(2), along_y, own * of_x[..., None]


def reward(
    job: EmbeddingJob, scores: Float[Tensor, "*shape"], log_density: Float[Tensor, "*shape"] | None
) -> Float[Tensor, "*shape"]:
    """The generator's reward for negatives with these scores, before it is normalised."""
    if job.objective.type == "margin":
        return rewards_of(augmented(scores, job.objective.margin), "identity")
    logits = scores if log_density is None else nce_logits(scores, log_density, job.negatives.number)
    return rewards_of(logits, "probability" if job.generator.reward == "d" else "softplus")


def _logits(job: EmbeddingJob, scores: Scores, log_density: Scores | None) -> Scores:
    if log_density is None:
        return scores
    number = job.negatives.number
    return Scores(
        nce_logits(scores.positive, log_density.positive, number),
        nce_logits(scores.negative, log_density.negative, number),
    )


def _margin(job: EmbeddingJob, scores: Scores, neighbour: Tensor, weights: Tensor) -> Float[Tensor, ""]:
    """Every pair against the negatives of its centre, whose weights are those of all pairs of the centre together."""
    block, centre, column = torch.nonzero(neighbour, as_tuple=True)
    pairs = neighbour.sum(2, keepdim=True).clamp_min(1.0)
    return margin_loss(
        scores.positive[block, centre, column],
        scores.negative[block, centre],
        job.objective.margin,
        (weights / pairs)[block, centre],
    )

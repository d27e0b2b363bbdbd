r"""The gradient of the generator's loss with respect to its scores, from the words that were drawn and no others.

The generator maximises :math:`J = \sum_x P(x) \sum_y G(y | x)\, r(x, y)`. With scores :math:`g` and
:math:`\nabla \log G(y | x) = \nabla g(x, y) - \mathbb{E}_{G}[\nabla g(x, \cdot)]`, REINFORCE (Williams 1992; Eq. 7 of
the paper) is a covariance,

.. math:: \nabla J = \mathrm{E}_x\, \mathrm{Cov}_{y \sim G(\cdot | x)}\big(r(x, y),\, \nabla g(x, y)\big),

and the covariance of the draws of one centre is an unbiased estimate of it. It moves the rows of the drawn words alone:
no gradient as large as the table, and no second product with it.
"""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor


def score_gradient(coefficients: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    r"""Gradient of :math:`-\sum_j c_j \log G(y_j | x)` with respect to the scores of the draws, ``m`` for each centre.

    :math:`\mathbb{E}_G[\nabla g]` is replaced, for each draw, by the mean over the *other* draws of its centre:
    :math:`\partial L / \partial g_j = -\frac{1}{m - 1}\big(m\,c_j - \sum_l c_l\big)`. It is unbiased where
    :math:`c_j` depends on draw j, on other centres and on numbers fixed in advance. It is computed from
    :math:`c_j - c_1`, so that equal coefficients give exactly 0 and no rounding, which Adam would scale up.

    Args:
        coefficients: :math:`c_j = w_j (r_j - b_j)`; 0 for draws that are masked.
    """
    m = coefficients.shape[1]
    assert m > 1, "the covariance needs two draws of each centre"
    differences = coefficients - coefficients[:, :1]
    return -(m * differences - differences.sum(1, keepdim=True)) / (m - 1)


def fixed_score_gradient(
    coefficients: Float[Tensor, "n k"], draws: int
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n draws"]]:
    r"""The same for words that were *not* drawn from the generator, with importance weights in :math:`c_j`.

    Args:
        coefficients: of the words from the fixed noise.
        draws: how many words were drawn from the generator for each centre; they represent its expectation.

    Returns:
        the gradients with respect to the scores of the noise words and of the generator's draws.
    """
    share = coefficients.sum(1, keepdim=True) / draws
    return -coefficients, share.expand(-1, draws)


def importance_weights(
    log_generator: Float[Tensor, "*shape"], log_noise: Float[Tensor, "*shape"], clip: float
) -> Float[Tensor, "*shape"]:
    r""":math:`\min(P_\theta(y | x) / P_{nce}(y), c)`: with it samples of the noise train the generator (end of Sec. 2).

    Unclipped the estimate is unbiased; the clip bounds its variance and biases it towards words that both propose.
    """
    return (log_generator - log_noise).detach().clamp_max(math.log(clip)).exp()


def entropy_rewards(
    log_generator: Float[Tensor, "n m"], entropy: Float[Tensor, " n"], weight: float, words: int
) -> Float[Tensor, "n m"]:
    r"""What is added to the advantages so that :math:`\beta \max(0, \log k - H(G(\cdot | x)))` is descended as well.

    As :math:`\nabla H = -\mathrm{Cov}_{y \sim G}(\log G(y | x), \nabla g(x, y))`, the entropy is a reward of
    :math:`-\log G - H`, in rows of less entropy than that of ``words`` equal words.

    Args:
        log_generator: :math:`\log G` of the draws.
        entropy: :math:`H` of each centre's row, in nats.
        weight: :math:`\beta`.
        words: :math:`k`.
    """
    active = weight * (entropy < math.log(words)).to(log_generator.dtype)
    return -active[:, None] * (log_generator + entropy[:, None]).detach()

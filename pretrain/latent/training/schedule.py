"""The weight of the regulariser over training."""

from __future__ import annotations

from pretrain.latent.config import ObjectiveSection


def beta_at(step: int, steps_per_epoch: int, section: ObjectiveSection) -> float:
    r"""The weight beta in update ``step`` (0-based).

    ``anneal``: :math:`\min(\beta_1, \beta_0 + t / (a n))` with ``a`` epochs of ``n`` steps; as released, beta goes from
    0.1 to 1 within 9 epochs of 10. ``cyclical`` (Fu et al. 2019): the same, where :math:`t` begins again in each cycle.
    """
    if section.beta == "constant":
        return section.beta_end
    if section.beta == "cyclical":
        step %= max(1, round(section.cycle_epochs * steps_per_epoch))
    return min(section.beta_end, section.beta_start + step / (section.anneal_epochs * steps_per_epoch))

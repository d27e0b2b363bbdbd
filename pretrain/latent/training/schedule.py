"""The weight of the regulariser over training."""

from __future__ import annotations

from pretrain.latent.config import ObjectiveSection


def beta(step: int, steps_an_epoch: int, section: ObjectiveSection) -> float:
    r"""Weight of update ``step`` (0-based).

    ``anneal``: :math:`\min(\beta_1, \beta_0 + t / (a n))` with ``a`` epochs of ``n`` steps, the released rule: from 0.1
    it reaches 1 after 9 epochs of 10. ``cyclical`` (Fu et al. 2019): the same with :math:`t` counted within a cycle.
    """
    if section.beta == "constant":
        return section.beta_end
    if section.beta == "cyclical":
        step %= max(1, round(section.cycle_epochs * steps_an_epoch))
    return min(section.beta_end, section.beta_start + step / (section.anneal_epochs * steps_an_epoch))

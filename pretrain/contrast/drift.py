r"""The correction of queued rows for the drift of the encoder since they were pushed.

While an encoder changes fast, all its representations move together, and a queued row shows where the encoder *was*.
To be unlike such rows it pays to move all anchors away from them at once, which ends with every representation in one
point. So the queue keeps what is left of a row without the statistics of its step :math:`t`, and the loss puts those of
the live rows in their place:

.. math::
    r = k - m_t, \quad \tilde k = \frac{r + m}{\lVert r + m \rVert} \qquad \text{(mean)} \qquad\qquad
    r = \frac{k - m_t}{s_t}, \quad \tilde k = \frac{r s + m}{\lVert r s + m \rVert} \qquad \text{(moments)}

with the mean :math:`m` and the standard deviation :math:`s` of each feature over the rows of all ranks. A shift of all
rows of a step by one vector leaves no trace, but for the norm. The statistics are baked in at the push, so nothing is
kept for each step, nothing has to be looked up, and a queue of residuals is sharded, saved and dealt out again like any
other. Cross-batch normalisation (Jing et al. 2023, arXiv:2303.17127) uses the statistics of the whole queue instead.

The live statistics are those of the step alone. A running average would be steadier, and is worse than no correction:
queued rows would follow a part of the motion, and the rest would still pay (docs/contrast.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pretrain.base.errors import ConfigError
from pretrain.engine import distributed

DRIFTS = ("none", "mean", "moments")

_LEAST_DEVIATION = 0.1
"""Of a feature, in units of the root mean square over the features: one that hardly varied in few rows would otherwise
be blown up without bound when its residual meets the live deviation."""


class Statistics(NamedTuple):
    """Of the rows of a step: mean, and standard deviation (None: rows are not scaled) of each feature, in float64."""

    mean: Float[Tensor, " d"]
    deviation: Float[Tensor, " d"] | None

    def residuals(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """What is left of rows without these statistics."""
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))  # a mean in bf16 would be off for all rows alike
        rest = rows - self.mean.to(rows.dtype)
        return rest if self.deviation is None else rest / self.deviation.to(rows.dtype)

    def corrected(self, residuals: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
        """Unit rows made of residuals; zeros for a residual that is NaN, of a row that was not finite."""
        rows = residuals.to(torch.promote_types(residuals.dtype, torch.float32), copy=True)
        if self.deviation is not None:
            rows *= self.deviation.to(rows.dtype)
        rows += self.mean.to(rows.dtype)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        rows /= norms.clamp_min(1e-12)  # in place: a shard may be large
        return rows.masked_fill_(norms.isnan(), 0.0)


def check_drift(drift: str) -> None:
    """Raise ``ConfigError`` for a correction of another name."""
    if drift not in DRIFTS:
        raise ConfigError(f"drift must be one of {', '.join(DRIFTS)}, got {drift!r}")


@torch.no_grad()
def statistics(views: Sequence[Float[Tensor, "n d"]], drift: str, group: distributed.Group) -> Statistics:
    """The statistics of the rows of ``views`` on all ranks, the same bits everywhere: an all-reduce of 2 d + 1 numbers.

    Rows with a value that is not finite do not count; of no row the mean is 0.
    """
    rows = torch.cat([view.detach().double() for view in views])
    known = rows.isfinite().all(1, keepdim=True)
    rows = rows.where(known, 0.0)
    sums = torch.cat([rows.sum(0), rows.square().sum(0), known.sum()[None].double()])
    sums = distributed.all_reduce_sum(sums, group)
    d, count = rows.shape[1], sums[-1].clamp_min(1)
    mean = sums[:d] / count
    if drift == "mean":
        return Statistics(mean, None)
    variance = (sums[d:-1] / count - mean.square()).clamp_min(0)
    usual = variance.mean().sqrt().clamp_min(1e-6)  # of rows that are all in one point
    return Statistics(mean, variance.sqrt().clamp_min(_LEAST_DEVIATION * usual))

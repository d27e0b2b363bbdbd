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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

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
        rest = rows - self.mean.to(rows.dtype)
        return rest if self.deviation is None else rest / self.deviation.to(rows.dtype)

    def corrected(self, residuals: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
        """Unit rows made of residuals; a residual of zeros, of a row that was not finite, stays zeros."""
        rest = residuals.to(torch.promote_types(residuals.dtype, torch.float32))
        moved = rest if self.deviation is None else rest * self.deviation.to(rest.dtype)
        rows = F.normalize(moved + self.mean.to(rest.dtype), dim=1)
        return rows.masked_fill_(~residuals.any(1, keepdim=True), 0.0)


class RunningStatistics:
    r"""The statistics of each step's rows over all ranks, or their running average.

    With ``average`` :math:`b > 0`, :math:`M_t = b M_{t-1} + (1 - b) m_t` of mean and variance, divided by :math:`1 -
    b^t` as Adam's averages are, stand in for those of one step, which few rows estimate badly. All ranks hold the same
    bits. Rows with a value that is not finite do not count; a step without any other leaves the average as it is.
    """

    def __init__(self, kind: str, average: float, dim: int, group: distributed.Group, device: torch.device) -> None:
        if kind not in DRIFTS[1:]:
            raise ConfigError(f"drift must be one of {', '.join(DRIFTS)}, got {kind!r}")
        if not 0 <= average < 1:
            raise ConfigError(f"drift_average must be 0 or more and less than 1, got {average}")
        self.kind, self.average, self.group = kind, average, group
        self.state = torch.zeros(2 * dim + 1, dtype=torch.float64, device=device)
        """Weighted sums of mean and variance, and their weight."""

    def look(self, views: Sequence[Tensor]) -> Statistics:
        """The statistics of the live rows ``views``; a collective, and nothing is remembered."""
        return self._statistics(self._next(views))

    def advance(self, views: Sequence[Tensor]) -> Statistics:
        """The same of rows that are pushed; the average goes on from here."""
        self.state = self._next(views)
        return self._statistics(self.state)

    @torch.no_grad()
    def _next(self, views: Sequence[Tensor]) -> Tensor:
        """The state after the rows: one all-reduce of ``2 d + 1`` numbers."""
        rows = torch.cat([view.detach().double() for view in views])
        rows = rows.where(rows.isfinite().all(1, keepdim=True), torch.nan)
        known = rows.isfinite().all(1).double()
        sums = torch.cat([rows.nansum(0), rows.square().nansum(0), known.sum()[None]])
        sums = distributed.all_reduce_sum(sums, self.group)
        d, count = rows.shape[1], sums[-1].clamp_min(1)
        mean = sums[:d] / count
        variance = (sums[d:-1] / count - mean.square()).clamp_min(0)
        seen = (sums[-1] > 0).double()  # a number on the device: the host need not wait
        step = torch.cat([mean, variance, seen[None]])
        decay = 1 - (1 - self.average) * seen
        return decay * self.state + (1 - decay) * step

    def _statistics(self, state: Tensor) -> Statistics:
        d = (len(state) - 1) // 2
        weight = state[-1].clamp_min(torch.finfo(state.dtype).tiny)  # before any row everything is 0
        mean, variance = state[:d] / weight, state[d:-1] / weight
        if self.kind == "mean":
            return Statistics(mean, None)
        usual = variance.mean().sqrt().clamp_min(1e-6)  # of rows that are all in one point
        return Statistics(mean, variance.sqrt().clamp_min(_LEAST_DEVIATION * usual))

r"""Whether a value lies far above the run's recent past.

Of the values :math:`x_1, \dots, x_n` of the last steps (at most 128) let :math:`m` be the median, :math:`q` the 95%
quantile, and :math:`r` the median of the newest eight. A new value is a *spike* above

.. math::
    \max(m, r) + k \max\big(1.4826 \operatorname{med}_i |x_i - m|, \ (q - m) / 1.645, \ f\big),

with the threshold :math:`k` of ``guard.spike_threshold``. Both estimates are the standard deviation of a normal
distribution; the second follows noise with a heavy upper tail, and neither follows a few spikes. :math:`r` lets a value
pass that has risen step by step. The floor :math:`f` is 1% of the median for the loss. Of the gradient norm logarithms
are compared, with a floor of 0.1, since its noise multiplies it. Imports no torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pretrain.engine.checkpoint.manifest import SPIKE_FIGURES, SpikeFigure, SpikeState

WINDOW = 128
"""Steps of the past that a value is compared with."""
ENOUGH = 32
"""With fewer steps of the past nothing is judged."""
_RECENT = 8
_FLOOR = {"loss": 0.01, "grad_norm": 0.1}


class Spike(NamedTuple):
    """A value above its limit, at a step counted from 1."""

    step: int
    name: SpikeFigure
    value: float
    limit: float
    median: float

    def __str__(self) -> str:
        what = self.name.replace("grad_norm", "gradient norm")
        return (
            f"{what} {self.value:.4g} at step {self.step} is a spike: its median was {self.median:.4g}, "
            f"and {self.limit:.4g} is the limit"
        )


class SpikeWatch:
    """Keeps the recent past of the loss and of the gradient norm, and judges each new value by it.

    Every finite value enters the past, spikes too: a few do not move medians, and a new level becomes the norm.
    """

    def __init__(self, threshold: float, state: SpikeState | None = None) -> None:
        state = state or SpikeState()
        self._threshold = threshold
        self._past = {name: deque(state.past.get(name, ()), maxlen=WINDOW) for name in SPIKE_FIGURES}
        self.count = state.count
        self.last = state.last
        self.skipped = state.skipped

    @property
    def state(self) -> SpikeState:
        """What is to be kept of it."""
        past = {name: list(past) for name, past in self._past.items()}
        return SpikeState(past=past, count=self.count, last=self.last, skipped=self.skipped)

    def forget(self) -> None:
        """Begin a new past: the loss is another one from here on."""
        for past in self._past.values():
            past.clear()

    def look(self, step: int, figures: Mapping[SpikeFigure, float]) -> Spike | None:
        """Judge the figures of a step, which then belong to the past. What is not finite is nothing that tells."""
        found = None
        for name in SPIKE_FIGURES:
            value = figures.get(name, math.nan)
            if name == "grad_norm":
                value = math.log(value) if value > 0 else math.nan
            if not math.isfinite(value):
                continue
            past = self._past[name]
            if len(past) >= ENOUGH:
                median, highest = limit(past, self._threshold, _FLOOR[name], relative=name == "loss")
                if value > highest and found is None:
                    natural = (value, highest, median)
                    found = Spike(step, name, *(natural if name == "loss" else map(_exp, natural)))
            past.append(value)
        if found is not None:
            self.count, self.last = self.count + 1, step
        return found


def limit(past: Sequence[float], threshold: float, floor: float, *, relative: bool) -> tuple[float, float]:
    """The median of ``past`` and the largest value that is no spike (see the module), with ``floor`` or so of it."""
    ordered = sorted(past)
    middle = _median(ordered)
    spread = 1.4826 * _median(sorted(abs(value - middle) for value in ordered))
    tail = (ordered[int(0.95 * (len(ordered) - 1))] - middle) / 1.645
    deviation = max(spread, tail, floor * abs(middle) if relative else floor)
    recent = _median(sorted(past[i] for i in range(len(past) - _RECENT, len(past))))
    return middle, max(middle, recent) + threshold * deviation


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))

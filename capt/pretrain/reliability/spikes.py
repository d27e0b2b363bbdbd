"""Response to a spike of the loss: a warning, no update, a way back to the newest checkpoint, or the end."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError, RunFailedError, quoted
from capt.pretrain.engine.checkpoint.layout import SPIKE_FIGURES, SpikeFigure, SpikeState
from capt.pretrain.engine.loop import NEVER, Callback, Run
from capt.pretrain.engine.task import ChangingLoss, ChunkedTask, RecordedTask
from capt.pretrain.reliability.ledger.files import Order
from capt.pretrain.reliability.rollbacks import FILE, Rollback, note_rollback, read_rollbacks, resume_after

# Whether a value is far above the run's recent past.
#
# Of the values :math:`x_1, \dots, x_n` of the last steps (at most 128) let :math:`m` be the median, :math:`q` the 95%
# quantile, and :math:`r` the median of the newest eight. A new value is a *spike* above
#
# .. math::
#     \max(m, r) + k \max\big(1.4826 \operatorname{med}_i |x_i - m|, \ (q - m) / 1.645, \ f\big),
#
# with the threshold :math:`k` of ``guard.spike_threshold``. Both estimates are the standard deviation of a normal
# distribution; the second follows noise with a heavy upper tail, and neither follows a few spikes. :math:`r` lets a
# value pass that has risen step by step. The floor :math:`f` is 1% of the median for the loss. Of the gradient norm
# logarithms are compared, with a floor of 0.1, since its noise multiplies it. Imports no torch.


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
        """State of the watch to save."""
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
    """The median of ``past`` and the largest value that is not a spike (see the module), with ``floor`` or so of it."""
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
    # Larger powers overflow.
    return math.exp(min(value, 700.0))


logger = logging.getLogger(__name__)


class SpikeError(RunFailedError):
    """A spike that the run is not to continue from."""


class RolledBackError(SpikeError):
    """A spike whose samples the next attempt leaves out."""

    passing = True


class Spikes(Callback):
    """Judges the loss and the gradient norm of each step by those before it (`capt.pretrain.reliability.spikes`).

    With ``skip`` this is asked by the engine before the update, so that the host waits for the loss in each step. The
    other remedies hear of a step when the ranks agree on it (`look`, called by `Agreement`): some steps late and
    without waiting, but before anything is saved.
    """

    def on_resume(self, run: Run, *, newest: bool) -> None:
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                run.left_out = resume_after(run.dir, run.progress.samples, newest=newest)
        run.left_out = distributed.broadcast_object(run.left_out)
        if run.left_out:
            begin, end = run.progress.samples, run.progress.samples + run.left_out
            run.progress.samples = end
            if distributed.rank() == 0:
                logger.warning("samples %d to %d are left out: the loss had a spike there (%s)", begin, end - 1, FILE)
        self._warn_of_epochs(run)

    def _warn_of_epochs(self, run: Run) -> None:
        """Say which sources of a mixture are read past their epochs, because samples are left out."""
        if not isinstance(run.task, RecordedTask) or distributed.rank() != 0:
            return
        before = run.job.batch_sizes.samples_before
        samples = run.progress.samples + before(run.job.schedule.max_steps) - before(run.progress.step)
        if past := Order(**asdict(run.task.sample_order())).past_epochs(samples):
            logger.warning(
                "data.mixture: with the samples that are left out this training needs %s, and no source has epochs "
                "left for that: %s will be read more often than epochs allows",
                f"{samples:,}",
                ", ".join(past),
            )

    def on_start(self, run: Run) -> None:
        guard = run.job.guard
        self._remedy = guard.spike
        self._run = run
        self._watch = SpikeWatch(guard.spike_threshold, run.spikes())
        if self._remedy == "off":
            return
        run.spikes = lambda: self._watch.state
        self._tell(run)
        many = isinstance(run.task, ChunkedTask)
        if self._remedy == "rollback" and (many or not isinstance(run.task, RecordedTask)):
            raise ConfigError(
                f"guard.spike: rollback leaves out samples, and those of {run.job.task.type} have no numbers; set "
                "guard.spike=stop, or warn"
            )
        if self._remedy == "skip":
            if many or len(run.engines) > 1:
                raise ConfigError(
                    f"guard.spike: skip leaves out the update of one module, and a {run.job.task.type} job has several "
                    "updates in a step; set guard.spike=stop, or warn"
                )
            for engine in run.engines.values():
                engine.guard(self._judge)

    def look(self, run: Run, step: int, figures: Mapping[str, float]) -> None:
        """Take notice of the loss and gradient norm of a step, the same on all ranks.

        Raises:
            SpikeError: of a spike, with ``stop``, or after ``guard.spikes`` of them. RolledBackError: with
            ``rollback``.
        """
        if self._remedy in ("off", "skip"):
            return
        spike = self._see(step, {name: figures[name] for name in SPIKE_FIGURES if name in figures})
        if spike is None:
            return
        if self._remedy == "warn":
            self._warn(spike, "guard.spike=skip or rollback would leave such a step out; what helps is a lower "
                       "optimizer.lr, optimizer.clip=1.0, or other data there")  # fmt: skip
            return
        # The state is not saved from here on: the run ends, or returns to a checkpoint.
        run.diverged = True
        if self._remedy == "rollback":
            self._roll_back(run, spike)
        raise SpikeError(
            f"{spike}; guard.spike=stop. capt resume {quoted(run.dir)} continues from the newest checkpoint"
        )

    def next_due(self, run: Run) -> int:
        return NEVER

    def _judge(self, loss: Tensor | None, norm: Tensor | None) -> bool:
        """Decide whether to leave out the update of the coming step. All ranks see the same numbers; collective."""
        if loss is None:
            raise ConfigError(
                f"guard.spike: skip needs the loss of a micro-batch, which a {self._run.job.task.type} job does not "
                "give to engine.step(loss); set guard.spike=warn"
            )
        device = distributed.device()
        both = torch.stack([each.detach().to(device, torch.float64) for each in (loss, norm) if each is not None])
        means = (distributed.all_reduce_sum(both) / distributed.world_size()).tolist()
        if not all(map(math.isfinite, means)):
            return False  # an overflow of fp16, which the scaler answers, or the end of the run
        run, step = self._run, self._run.progress.step + 1
        spike = self._see(step, dict(zip(SPIKE_FIGURES, means, strict=False)))
        if spike is None:
            return False
        if self._watch.skipped >= run.job.guard.spikes:  # not counted are those of which guard.spike=warn only told
            run.diverged = True
            raise SpikeError(_too_many(run, spike))
        self._watch.skipped += 1
        self._warn(spike, f"its update is left out ({self._watch.skipped} of {run.job.guard.spikes}, guard.spikes)")
        return True

    def _see(self, step: int, figures: Mapping[SpikeFigure, float]) -> Spike | None:
        task = self._run.task
        if isinstance(task, ChangingLoss) and task.loss_changes(step):
            self._watch.forget()
        spike = self._watch.look(step, figures)
        self._tell(self._run, step)
        return spike

    def _tell(self, run: Run, step: int | None = None) -> None:
        """Put a spike into the progress line for as long as it is in the past that the next steps are compared with."""
        last = self._watch.last
        recent = last is not None and (run.progress.step if step is None else step) - last < WINDOW
        run.remarks["spike"] = f"SPIKE at step {last} ({self._watch.count} so far)" if recent else ""

    def _warn(self, spike: Spike, remedy: str) -> None:
        if distributed.rank() == 0:
            logger.warning("%s; %s", spike, remedy)

    def _roll_back(self, run: Run, spike: Spike) -> None:
        before_step = run.job.batch_sizes.samples_before
        # A step is heard of late: the samples used since then are not left out.
        late = before_step(run.progress.step) - before_step(spike.step)
        before, limit = 0, run.job.guard.spikes
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                before = len(read_rollbacks(run.dir))
                if before < limit:
                    note_rollback(
                        run.dir, Rollback(step=spike.step, reason=str(spike), end=run.progress.samples - late)
                    )
        if distributed.broadcast_object(before) >= limit:
            raise SpikeError(_too_many(run, spike))
        raise RolledBackError(
            f"{spike}; guard.spike=rollback: capt resume {quoted(run.dir)} goes back to the newest checkpoint "
            "and leaves out the samples from there to this step"
        )


def _too_many(run: Run, spike: Spike) -> str:
    return (
        f"{spike}, the {run.job.guard.spikes + 1}th: more than guard.spikes={run.job.guard.spikes}. Continue from a "
        f"checkpoint with a lower optimizer.lr or optimizer.clip=1.0 (capt resume {quoted(run.dir)}), "
        "or raise guard.spikes"
    )

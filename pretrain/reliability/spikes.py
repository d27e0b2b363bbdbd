"""What is done about a spike of the loss: a warning, no update, a way back to the newest checkpoint, or the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pretrain.base import distributed
from pretrain.base.errors import ConfigError, RunFailedError, quoted
from pretrain.engine.checkpoint.manifest import SPIKE_FIGURES, SpikeFigure
from pretrain.engine.loop import NEVER, Callback, Run
from pretrain.engine.task import ChangingLoss, ChunkedTask, RecordedTask
from pretrain.reliability.rollbacks import FILE, Rollback, note_rollback, read_rollbacks, resume_behind
from pretrain.reliability.spike_watch import WINDOW, Spike, SpikeWatch

logger = logging.getLogger(__name__)


class SpikeError(RunFailedError):
    """A spike that the run is not to continue from."""


class RolledBackError(SpikeError):
    """A spike whose samples the next attempt leaves out."""

    passing = True


class Spikes(Callback):
    """Judges the loss and the gradient norm of each step by those before it (`pretrain.reliability.spike_watch`).

    With ``skip`` this is asked by the engine before the update, so that the host waits for the loss in each step. The
    other remedies hear of a step when the ranks agree on it (`look`, called by `Agreement`): some steps late and
    without waiting, but before anything is saved.
    """

    def on_resume(self, run: Run, *, newest: bool) -> None:
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                run.left_out = resume_behind(run.dir, run.progress.samples, newest=newest)
        run.left_out = distributed.broadcast_object(run.left_out)
        if run.left_out:
            begin, end = run.progress.samples, run.progress.samples + run.left_out
            run.progress.samples = end
            if distributed.rank() == 0:
                logger.warning("samples %d to %d are left out: the loss had a spike there (%s)", begin, end - 1, FILE)

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
        run.diverged = True
        if self._remedy == "rollback":
            self._roll_back(run, spike)
        raise SpikeError(
            f"{spike}; guard.spike=stop. capt resume {quoted(run.dir)} continues from the newest checkpoint"
        )

    def next_due(self, run: Run) -> int:
        return NEVER

    def _judge(self, loss: Tensor | None, norm: Tensor | None) -> bool:
        """Whether the update of the coming step is to be left out. All ranks see the same numbers; collective."""
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
        """What the progress line says, for as long as a spike is in the past that the next ones are compared with."""
        last = self._watch.last
        recent = last is not None and (run.progress.step if step is None else step) - last < WINDOW
        run.remarks["spike"] = f"SPIKE at step {last} ({self._watch.count} so far)" if recent else ""

    def _warn(self, spike: Spike, remedy: str) -> None:
        if distributed.rank() == 0:
            logger.warning("%s; %s", spike, remedy)

    def _roll_back(self, run: Run, spike: Spike) -> None:
        late = (run.progress.step - spike.step) * run.job.batch.global_
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

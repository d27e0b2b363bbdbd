"""All ranks end a run after the same step: for a signal, for ``schedule.stop_after``, or because it has diverged."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import RunFailedError
from capt.pretrain.engine.checkpoint.fragments import first_not_finite
from capt.pretrain.engine.interruption import SIGNALS, StopSignals, stop_signal_name
from capt.pretrain.engine.loop import NEVER, Callback, Run
from capt.pretrain.engine.task import Metric, StepMetrics, to_float

# What a rank must tell the others in every step, told without anybody waiting for it.


LAG = 2
"""Steps between a flag's post and its reading: as far as the host may run ahead of the device and of other ranks."""


@dataclass
class _Posted:
    step: int
    numbers: Tensor
    work: Any = None
    host: Tensor | None = None
    copied: torch.cuda.Event | None = None


class Flags:
    """Sums over the ranks of a few numbers a step, which every rank reads :data:`LAG` steps later.

    A row of numbers is reduced where it is, in the background, and copied to the host beside the work of the device;
    by the time it is read it has long been there. A rank alone on a CPU has nobody to wait for: ``lag`` is 0 there.
    """

    def __init__(self) -> None:
        self.device = distributed.device()
        self._side = torch.cuda.Stream() if self.device.type == "cuda" else None
        self._posted: deque[_Posted] = deque()
        self.lag = LAG if self._side is not None or distributed.world_size() > 1 else 0

    def post(self, step: int, numbers: Tensor) -> None:
        """Tell the others; ``numbers`` is float32 of one length on all ranks, on ``device``. A collective."""
        posted = _Posted(step, numbers)
        if distributed.world_size() > 1:
            posted.work = dist.all_reduce(numbers, async_op=True)
        if self._side is not None:
            # A stream of its own: the copy waits for the numbers, and the next step does not wait for the copy.
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                if posted.work is not None:
                    posted.work.wait()  # has this stream wait, not the host
                # Into memory that is not page-locked the copy would wait.
                posted.host = torch.empty_like(numbers, device="cpu", pin_memory=True)
                posted.host.copy_(numbers, non_blocking=True)
                posted.copied = torch.cuda.Event()
                posted.copied.record()
        self._posted.append(posted)

    def read(self, until: int) -> Iterator[tuple[int, list[float]]]:
        """Step and sums of each post of a step up to ``until``, once, the oldest first. Waits for the last of them.

        Every rank must read the same posts after the same step.
        """
        while self._posted and self._posted[0].step <= until:
            posted = self._posted.popleft()
            if posted.copied is not None:
                posted.copied.synchronize()
            elif posted.work is not None:
                posted.work.wait()
            host = posted.numbers if posted.host is None else posted.host
            yield posted.step, host.numpy().tolist()


_WATCHED = ("loss", "grad_norm")


class TrainingDivergedError(RunFailedError):
    """The loss, the gradient norm, or what an update has made is not finite."""

    def __init__(self, text: str, step: int = NEVER) -> None:
        super().__init__(text)
        self.step = step
        """The first step whose figures, or whose update, are known not to be finite."""


_REMEDY = (
    "resume from the last checkpoint with a lower optimizer.lr, a longer schedule.warmup_steps or optimizer.clip=1.0"
)


class Agreement(Callback):
    """A signal on any rank stops every rank after the same step; the Checkpointer then saves and the job exits 75.
    A loss or a gradient norm that is not a number on any rank raises :class:`TrainingDivergedError` on all of them.

    Ranks hear of either some steps late (:mod:`capt.pretrain.engine.callbacks.agreement`), except in the last steps
    and wherever ``run.settle()`` is called, as before each save, which also looks at the weights and at the
    optimizer's state: one that has diverged is never written. ``stop_after`` counts
    only for a run that begins before that step. An fp16 overflow, which the loss scaler answers by skipping the update,
    is no divergence.

    ``heard`` is told, on all ranks alike, of every step and its loss and gradient norm, averaged over the ranks; not of
    steps whose update was left out. It may end the run.
    """

    def __init__(self, heard: Callable[[Run, int, Mapping[str, float]], None] = lambda *_: None) -> None:
        self._heard = heard
        self._signals = StopSignals()
        self._watched: dict[int, dict[str, Metric]] = {}

    def on_start(self, run: Run) -> None:
        self._flags = Flags()
        self._signals.install()
        stop = run.job.schedule.stop_after
        self._stop_after = stop if stop is not None and stop > run.progress.step else None
        self._looked = run.progress.step
        self._found_sound = -1
        run.before_save.append(lambda: self._settle(run))

    def after_step(self, run: Run, report: StepMetrics) -> None:
        step, lag = run.progress.step, self._flags.lag
        engines = run.engines.values()
        skipped = any(engine.update_was_skipped() or engine.update_was_vetoed() for engine in engines)
        watched = {} if skipped else {name: report[name] for name in _WATCHED if name in report}
        if lag:
            self._watched[step] = watched
            self._flags.post(step, self._row(run, watched))
            near_the_end = step + lag >= run.job.schedule.max_steps  # then there is no later step to stop at
            chunk_is_long = step - self._looked >= lag  # to look late would save nothing
            self._read(run, step if near_the_end or chunk_is_long else step - lag)
        else:  # alone, on a CPU: the numbers are at hand, and this is ten times as fast
            figures = {name: to_float(figure) for name, figure in watched.items()}
            bad = not all(map(math.isfinite, figures.values()))
            self._act(run, step, self._signals.received, bad, run.writing(), watched)
            self._heard(run, step, figures)
        self._looked = step
        if not run.stopping and not run.finished and self._stop_after is not None and step >= self._stop_after:
            run.stopping = f"schedule.stop_after={self._stop_after} reached"

    def next_due(self, run: Run) -> int:
        return NEVER if self._stop_after is None else max(self._stop_after, run.progress.step + 1)

    def _row(self, run: Run, watched: dict[str, Metric]) -> Tensor:
        """Return the signal that came, whether a save runs, whether each watched figure is bad, and the figures.

        No figure is looked at.
        """
        first, bad = len(SIGNALS), len(SIGNALS) + 1
        row = torch.zeros(bad + 2 * len(_WATCHED), device=self._flags.device)
        if self._signals.received:
            row[SIGNALS.index(signal.Signals(self._signals.received))].fill_(1.0)
        if run.writing():
            row[first].fill_(1.0)
        for i, name in enumerate(_WATCHED, bad):
            figure = watched.get(name, 0.0)
            # A figure on the device is compared and copied there: the host does not wait for it.
            if isinstance(figure, Tensor) and figure.device == row.device:
                row[i].copy_(figure.detach().isfinite().logical_not())
                row[i + len(_WATCHED)].copy_(figure.detach())
            elif math.isfinite(value := to_float(figure)):
                row[i + len(_WATCHED)].fill_(value)
            else:
                row[i].fill_(1.0)
        return row

    def _read(self, run: Run, until: int) -> None:
        ranks = distributed.world_size()
        for step, row in self._flags.read(until):
            signals, (writing, *rest) = row[: len(SIGNALS)], row[len(SIGNALS) :]
            bad, sums = rest[: len(_WATCHED)], rest[len(_WATCHED) :]
            # Different ranks may have had different signals: all take the same one.
            received = max(
                (number for number, ranks_with in zip(SIGNALS, signals, strict=True) if ranks_with), default=0
            )
            watched = self._watched.pop(step)
            self._act(run, step, int(received), any(bad), bool(writing), watched)
            self._heard(
                run, step, {name: each / ranks for name, each in zip(_WATCHED, sums, strict=True) if name in watched}
            )

    def _settle(self, run: Run) -> None:
        """Read all flags, and look at the state: an update may make it no number, which the next loss would show."""
        step = run.progress.step
        self._read(run, step)
        # A step may be settled several times (validation, save, end), and its state looked at one time.
        if self._found_sound == step:
            return
        own = next((name for engine in run.engines.values() if (name := first_not_finite(engine))), None)
        found = distributed.gather_objects(own)
        for rank, each in enumerate(found):
            if each is None:
                continue
            run.diverged = True
            raise TrainingDivergedError(
                f"{each} is not finite on rank {rank} after the update of step {step}, which is not saved; {_REMEDY}",
                step,
            )
        self._found_sound = step

    def _act(
        self, run: Run, step: int, received: int, bad: bool, writing: bool, watched: dict[str, Metric]
    ) -> None:  # fmt: skip
        # Divergence comes before a signal, whose save would keep the state.
        if bad:
            run.diverged = True
            raise TrainingDivergedError(_what(watched, step), step)
        if not writing:
            run.all_wrote_at = step
        self._signals.received = self._signals.received or received  # one that came meanwhile is not lost
        if received and not run.finished:
            run.stopping = f"{stop_signal_name(received)} received"

    def on_end(self, run: Run) -> None:
        run.settle()

    def close(self, run: Run) -> None:
        self._signals.restore()


def _what(watched: dict[str, Metric], step: int) -> str:
    values = {name: to_float(figure) for name, figure in watched.items()}
    here = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    return f"{here[0] if here else 'loss or grad_norm is not finite on another rank'} at step {step}; {_REMEDY}"

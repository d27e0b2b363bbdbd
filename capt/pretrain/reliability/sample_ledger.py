"""Every rank records which samples each step really used, for ``capt ledger check``."""

from __future__ import annotations

import logging
from dataclasses import asdict

from capt.pretrain.base import distributed
from capt.pretrain.engine.loop import NEVER, Callback, Run
from capt.pretrain.engine.task import ChunkedTask, RecordedTask, StepMetrics
from capt.pretrain.reliability.ledger.files import (
    Header,
    LedgerWriter,
    Order,
    digest_contents,
    digest_ids,
    launch_folder,
    new_launch,
)

logger = logging.getLogger(__name__)


class SampleLedger(Callback):
    """Appends the digests of the rows of each step to this rank's file, once the step is done.

    A row is with the operating system before the next step, so that no killed process takes it along, and on disk
    before a checkpoint that contains the step is written. A full disk does not stop the training: the rows wait, and a
    checkpoint is lost (as it is on a full disk) rather than written without them.
    """

    def __init__(self) -> None:
        self._writer: LedgerWriter | None = None
        self._task: RecordedTask | None = None
        self._warned = False

    def on_ready(self, run: Run) -> None:
        task = run.task
        # A chunk of updates shows none of their batches.
        if not run.job.run.ledger or not isinstance(task, RecordedTask) or isinstance(task, ChunkedTask):
            return
        self._task = task
        # Rank 0 numbers the launch, and every rank writes a file of its own in its folder.
        number = 0
        with distributed.synchronize_errors():
            if distributed.rank() == 0:
                number = new_launch(run.dir)
        number = distributed.broadcast_object(number)
        header = Header(
            rank=distributed.rank(),
            world=distributed.world_size(),
            step=run.progress.step,
            samples=run.progress.samples,
            batch=run.job.batch.global_,
            ramp=run.job.batch_sizes.as_steps if run.job.batch.ramp else (),
            left_out=run.left_out,
            order=Order(**asdict(task.sample_order())),
            checkpoint=None if run.resumed_from is None else str(run.resumed_from),
        )
        with distributed.synchronize_errors():
            self._writer = LedgerWriter(launch_folder(run.dir, number), header)

        def make_durable() -> None:
            assert self._writer is not None
            with distributed.synchronize_errors():
                self._writer.sync()

        run.records.append(make_durable)

    def after_step(self, run: Run, report: StepMetrics) -> None:
        if self._writer is None or self._task is None:
            return
        parts = self._task.consumed(run.batch)
        # Digests add up over micro-batches as they do over ranks.
        rows = sum(len(part.ids) for part in parts)
        ids = sum(digest_ids(part.ids) for part in parts) % (1 << 64)
        contents = sum(digest_contents(*part) for part in parts) % (1 << 32)
        vetoed = any(engine.update_was_vetoed() for engine in run.engines.values())
        try:
            self._writer.append(run.progress.step, rows, ids, contents, learnt=not vetoed)
        except OSError as error:
            if not self._warned:
                logger.warning("%s; training continues, and what is not written waits", error)
            self._warned = True

    def next_due(self, run: Run) -> int:
        return NEVER

    def close(self, run: Run) -> None:
        if self._writer is not None:
            self._writer.close()

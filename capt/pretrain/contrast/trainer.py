"""The queue in the checkpoints of the trainers of transformers and sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from capt.pretrain.contrast.queue import ShardedQueue


class QueueCheckpoint(TrainerCallback):
    """Save the queue in every checkpoint of a trainer, and load it where training is resumed from one.

    A callback of ``transformers.Trainer`` and of ``SentenceTransformerTrainer``. Every rank writes its own shard into
    the folder ``queue`` of the checkpoint; the number of ranks may be another one at the resume.

    Args:
        queue: the queue of the loss.

    Raises:
        CheckpointError: at a resume, the checkpoint has no queue, or not all of it.
    """

    def __init__(self, queue: ShardedQueue) -> None:
        self.queue = queue

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the queue, on every rank."""
        self.queue.save_shard(_folder(args, state))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the queue of a run that is resumed."""
        if state.global_step:
            self.queue.load_shards(_folder(args, state))


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}", "queue")

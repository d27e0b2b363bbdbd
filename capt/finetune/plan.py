"""A job that fine-tunes on labelled texts, without them, for ``capt plan``: its encoder's sizes, and a batch."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from capt.finetune.batches import Batch, StepBatches, TextInputs, TextRows
from capt.finetune.config import AnyTextJob, TextJob
from capt.finetune.text_training import Classifier, TextFineTuning, TextObjective, classifier_on
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import Progress, StepMetrics
from capt.pretrain.language.plan import described_encoder, rehearsed_encoder
from capt.pretrain.plan.rehearsal import Rehearsal
from capt.tokenizer.encode import TextTokenizer


class RehearsedTask(TextFineTuning):
    """The task over no texts, on tensors without data."""

    def __init__(self, job: TextJob, hf_config: dict[str, Any]) -> None:
        self.job, self.status = job, ""
        self._hf_config = hf_config
        with torch.device("meta"):
            encoder = rehearsed_encoder(hf_config, job.model)
        self._backbone: Any = SimpleNamespace(encoder=encoder)
        self.job = job.with_encoder(hf_config, encoder.max_positions)
        self.length = self.job.longest(encoder.max_positions)
        self.train: Any = SimpleNamespace(lengths=np.full(1, self.length))
        self.objective = TextObjective(job.data.text_task)

    def read_rows(
        self, job: TextJob, tokenizer: TextTokenizer, length: int, types: bool
    ) -> tuple[TextRows, dict[str, TextRows]]:
        """Refuse: there are none."""
        raise NotImplementedError

    def build_model(self) -> Classifier:
        """Build an encoder of these sizes under its head."""
        return classifier_on(rehearsed_encoder(self._hf_config, self.job.model), self.job)

    def step(self, engines: Mapping[str, Engine], batch: Any, progress: Progress) -> StepMetrics:
        """Do a step of the micro-batches in ``batch``."""
        return super().step(engines, StepBatches(batch, self.tokens(batch, self.job.batch.global_)), progress)

    def tokens(self, batch: list[Batch[TextInputs]], rows: int) -> int:
        """Return the tokens of a step of ``rows`` over all ranks."""
        return rows * self.length


def rehearse(job: TextJob, world: int) -> Rehearsal:
    """Return the task, and a micro-batch of this rank in which every row is as long as it may be."""
    hf_config, assumed = described_encoder(job.model.init, job.data.sequence_length or 0)
    task = RehearsedTask(job, hf_config)
    n, outputs = job.micro_batch(world), job.data.text_task
    labels = torch.zeros(n, dtype=torch.float32 if outputs.kind == "regression" else torch.int64)
    if outputs.kind == "multi_label":
        labels = torch.zeros(n, len(outputs.names))
    tokens = torch.zeros(n, task.length, dtype=torch.int64)
    inputs = TextInputs(tokens, tokens if task._backbone.encoder.reads_types else None, False)
    lengths = f"every row of {task.length} tokens, the longest that the job allows (data.sequence_length)"
    return Rehearsal(task, Batch(inputs, labels), (*assumed, lengths), longest=True)


def in_steps(job: AnyTextJob, examples: int) -> AnyTextJob:
    """Return the job with the steps of a training set of this size (``data.max_train`` at most) in place of epochs."""
    job = job.with_steps(min(examples, job.data.max_train or examples))
    return job.model_copy(update={"schedule": job.schedule.model_copy(update={"epochs": None})})

"""A ``rerank`` job without its data, for ``capt plan``: its encoder's sizes, and a batch of its shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from capt.finetune.batches import TextInputs
from capt.finetune.plan import RehearsedTask, in_steps
from capt.finetune.rerank.batches import RerankPart, RerankStep
from capt.finetune.rerank.config import RerankJob
from capt.finetune.rerank.groups import CandidateList
from capt.finetune.rerank.objective import RerankObjective
from capt.finetune.rerank.task import RerankTraining
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import Progress, StepMetrics
from capt.pretrain.language.plan import described_encoder
from capt.pretrain.pairs.prepare import pairs_of
from capt.pretrain.plan.rehearsal import Rehearsal


class RehearsedReranker(RehearsedTask):
    """The task over no texts, on tensors without data."""

    def __init__(self, job: RerankJob, hf_config: dict[str, Any]) -> None:
        super().__init__(job, hf_config)
        self.objective = RerankObjective(job)
        self._pairs = job.data.positives + job.data.negatives
        self.train = SimpleNamespace(lengths=np.full(1, self._pairs * self.length), candidates=self._pairs)

    def step(self, engines: Mapping[str, Engine], batch: Any, progress: Progress) -> StepMetrics:
        """Do a step of the micro-batches in ``batch``, each of whole queries."""
        first: RerankPart = batch[0]
        queries, size = len(batch) * len(first.places) // self._pairs, len(first.places)
        parts = [replace(part, places=part.places + number * size) for number, part in enumerate(batch)]
        groups = np.repeat(np.arange(queries), self._pairs)
        positive = np.tile(np.arange(self._pairs) < self.job.data.positives, queries)  # type: ignore[attr-defined]
        scores = np.zeros(len(groups))
        candidates = CandidateList(groups, groups, groups, positive, scores, scores, np.full(len(groups), self.length))
        step = RerankStep(parts, candidates, queries, None, len(groups) * self.length)
        return RerankTraining.step(self, engines, step, progress)  # type: ignore[arg-type]

    _in_one_pass = RerankTraining._in_one_pass
    flops_per_step = RerankTraining.flops_per_step


def completed(job: RerankJob) -> RerankJob:
    """Return the job with its epochs as steps, where its data are on this host; else as it is."""
    if job.schedule.epochs is None or not all(Path(name).exists() for name in job.data.train):
        return job
    source = job.data.source("train", 8)
    return in_steps(job, len({pair.query for _, pair in pairs_of(source, source.paths())}))


def rehearse(job: RerankJob, world: int) -> Rehearsal:
    """Return the task, and a micro-batch of this rank in which every pair is as long as it may be."""
    hf_config, assumed = described_encoder(job.model.init, job.data.sequence_length or 0)
    task = RehearsedReranker(job, hf_config)
    pairs = job.data.positives + job.data.negatives
    n = job.micro_batch(world) * pairs
    tokens = torch.zeros(n, task.length, dtype=torch.int64)
    inputs = TextInputs(tokens, tokens if task._backbone.encoder.reads_types else None, False)
    lengths = f"{pairs} candidates of each query, every pair of {task.length} tokens, the longest that the job allows"
    if n * task.length > job.batch.micro_tokens:
        lengths += f", in one pass whatever batch.micro_tokens is ({job.batch.micro_tokens:,})"
    return Rehearsal(task, RerankPart(inputs, np.arange(n), []), (*assumed, lengths), longest=True)

"""The ``rerank`` task: a cross-encoder trained on the candidates of each query."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capt.finetune.evaluation import evaluate_sets
from capt.finetune.order import ExampleOrder
from capt.finetune.rerank.batches import RerankPart, RerankStep, assemble
from capt.finetune.rerank.config import RerankJob
from capt.finetune.rerank.data import read_splits
from capt.finetune.rerank.groups import CandidateRows, Groups
from capt.finetune.rerank.objective import RerankObjective
from capt.finetune.task import Identity
from capt.finetune.text_training import TextFineTuning
from capt.pretrain.base import distributed
from capt.pretrain.base.errors import quoted
from capt.pretrain.config.schema import Job
from capt.pretrain.contrast.cached import RepresentationCache
from capt.pretrain.engine import heartbeat
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import Progress, StepMetrics
from capt.pretrain.pairs.texts import encoded_by_length
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)


class RerankTraining(TextFineTuning):
    """The loss of each query's candidates, its mean over the queries of a step, and the order of held-out ones."""

    job: RerankJob
    train: Groups  # read by queries, whose candidates are drawn, and not by rows
    objective: RerankObjective

    def __init__(self, job: Job, run_dir: Path) -> None:
        assert isinstance(job, RerankJob)
        self._digest = ""
        super().__init__(job, run_dir, {}, validation_name="validation")
        if not self.validation and self.job.checkpoint.best is not None:
            if distributed.rank() == 0:
                logger.warning("no query is held out (data.validation_fraction), so no checkpoint is the best one")
            checkpoint = self.job.checkpoint.model_copy(update={"best": None})
            self.job = self.job.model_copy(update={"checkpoint": checkpoint})
        self._identity = {**self._identity, "rows": Identity(self._digest, "data.*")}

    def read_rows(  # type: ignore[override]
        self, job: RerankJob, tokenizer: TextTokenizer, length: int, types: bool
    ) -> tuple[Groups, dict[str, CandidateRows]]:
        """The queries that are trained on, and every candidate of the held-out ones."""
        splits = read_splits(job, tokenizer, length, types=types)
        self._digest = splits.digest
        return splits.train, {} if splits.validation is None else {"": splits.validation}

    def objective_of(self, job: Any) -> RerankObjective:
        """The loss and the figures of the job."""
        return RerankObjective(job)

    def build_batches(self, progress: Progress) -> Iterator[RerankStep]:  # type: ignore[override]
        """This rank's micro-batches of each coming step."""
        size, groups = self.job.batch.global_, self.train
        order = ExampleOrder(groups.lengths, size, self.job.run.seed, bucketing=self._bucketing, shuffle=self._shuffle)
        steps = self.job.schedule.max_steps - progress.step
        world, rank = distributed.world_size(), distributed.rank()
        most = self.job.micro_batch(world), self.job.batch.micro_tokens
        for start in range(progress.samples, progress.samples + steps * size, size):
            visits = np.arange(start, start + size, dtype=np.int64) // len(groups)
            candidates = groups.draw(order.rows(start), visits)
            yield assemble(groups, candidates, size, most, world, rank)

    def step(self, engines: Mapping[str, Engine], batch: RerankStep, progress: Progress) -> StepMetrics:  # type: ignore[override]
        """Do one optimizer step on the mean loss of its queries, of all ranks."""
        engine = engines["model"]
        engine.accumulate(len(batch.parts))  # the texts of a step decide their number
        total = self._in_one_pass(engine, batch) if batch.order is None else self._in_two_passes(engine, batch)
        progress.samples += batch.queries
        progress.tokens += batch.tokens
        return {"loss": total, "grad_norm": engine.gradient_norm()}

    def _in_one_pass(self, engine: Engine, batch: RerankStep) -> Tensor:
        total = torch.zeros((), device=engine.device)
        by_length = encoded_by_length(engine.device, self.job.engine.zero_stage)
        # The engine averages over ranks and micro-batches.
        scale = distributed.world_size() * len(batch.parts) / batch.queries
        for part in batch.parts:
            losses = self.objective.losses(
                _scores(engine, part, by_length=by_length), batch.candidates.take(part.places)
            )
            loss = losses.sum() * (scale if part.counts else 0.0)
            engine.backward(loss)
            engine.step(loss)
            total += loss.detach() / len(batch.parts)
        return total

    def _in_two_passes(self, engine: Engine, batch: RerankStep) -> Tensor:
        """Score every pair first, which gives the gradient of each score; then that of the parameters.

        The second pass draws the dropout of the first (`capt.pretrain.contrast.cached`).
        """
        assert batch.order is not None
        cache, by_length = RepresentationCache(), encoded_by_length(engine.device, self.job.engine.zero_stage)
        for part in batch.parts:
            cache.record(lambda part=part: (_scores(engine, part, by_length=by_length),))  # type: ignore[misc]
        (mine,) = cache.views()
        order = torch.from_numpy(batch.order).to(engine.device)
        is_copy = order < 0
        scores = mine.new_zeros(len(batch.candidates))
        scores[order[~is_copy]] = distributed.all_gather(mine).flatten()[~is_copy]
        scores.requires_grad_()
        loss = self.objective.losses(scores, batch.candidates).mean()
        loss.backward()
        assert scores.grad is not None
        # The engine averages over ranks and micro-batches; a copy counts nothing.
        here = order.view(distributed.world_size(), -1)[distributed.rank()]
        gradients = scores.grad[here.clamp(min=0)] * (here >= 0)
        gradients = gradients * (distributed.world_size() * len(batch.parts))
        for number, part in enumerate(batch.parts):
            cache.rewind(number)
            own, gradients = gradients[: len(part.places)], gradients[len(part.places) :]
            engine.backward((_scores(engine, part, by_length=by_length) * own).sum())
            engine.step(loss.detach())
        return loss.detach()

    def validate(self, engines: Mapping[str, Engine], progress: Progress) -> StepMetrics:
        """nDCG@10 and MRR@10 over every candidate of the held-out queries."""
        engine, length = engines["model"], self.job.data.sequence_length
        assert length is not None, "TextJob.with_encoder fills it in"
        size = max(1, self.job.batch.micro_tokens // length)
        return {**evaluate_sets(engine, self.validation, self.objective, size, engine.device)}

    def flops_per_step(self) -> float:
        """Forward and backward FLOP of a global batch of average length."""
        pairs = self.train.candidates
        length = float(self.train.lengths.mean()) / pairs
        return 3.0 * self.job.batch.global_ * pairs * self.flops_per_row(length)

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """Measure the reranker, and export it."""
        measure = f"capt evaluate {quoted(run_dir)} (nDCG@10 and MRR@10 of the held-out queries)"
        if not self.validation:
            measure = f"capt evaluate {quoted(run_dir)} --data FILE (nDCG@10 and MRR@10 of its queries)"
        return [
            measure,
            f"capt report {quoted(run_dir)} (its curves; several runs: their table)",
            f"capt convert {quoted(run_dir)} OUT --to hf (for CrossEncoder and transformers)",
        ]


def _scores(engine: Engine, part: RerankPart, *, by_length: bool) -> Tensor:
    """The scores of the pairs of a micro-batch; ``by_length``: rows of similar length are encoded together."""
    # A step of thousands of candidates is no hang: each pass is watched by itself.
    heartbeat.enter("step")
    inputs = part.inputs
    types = None if inputs.types is None else inputs.types.to(engine.device, non_blocking=True)
    groups = part.groups if by_length and inputs.padded else None
    output: Tensor = engine(inputs.tokens.to(engine.device, non_blocking=True), types, inputs.padded, groups)
    return output[:, 0]


TASK = RerankTraining

"""Validation during training: the same samples, corruptions and temperature at every step and for every run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.contrast.metrics import PairAccumulator
from capt.pretrain.contrastive.metrics import contrast_metrics
from capt.pretrain.contrastive.task import Assemble, HeldOut
from capt.pretrain.data.corruption import IGNORE
from capt.pretrain.data.sampler import validation_samples
from capt.pretrain.engine.task import StepMetrics
from capt.pretrain.vision_language.batches import VisionLanguageBatch
from capt.pretrain.vision_language.config import ACCURACIES, VisionLanguageJob
from capt.pretrain.vision_language.module import Counts, VisionLanguageOutput, divisors, loss_sums


@runtime_checkable
class Forward(Protocol):
    """The callable of validation: the engine around a `VisionLanguageModule`, or one that is not trained any more."""

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        ...

    def __call__(self, batch: VisionLanguageBatch, *, step: int) -> VisionLanguageOutput:
        """Compute what `VisionLanguageModule.forward` does."""
        ...


@torch.no_grad()
def validate(engine: Forward, parts: Sequence[HeldOut[VisionLanguageBatch]], job: VisionLanguageJob) -> StepMetrics:
    """Metrics over the held-out pairs of all ``parts`` together, equal on all ranks.

    Every loss and accuracy of an objective that has a weight, as in training but over these pairs alone, except those
    of which no pair has a label; of each source of a mixture too, as ``loss/mlm/NAME``. ``loss`` is their weighted sum,
    without the contrast. With it `contrast_metrics` of the aggregation head.
    """
    head, whole = PairAccumulator(), _Sums(engine.device)
    of_sources = {part.source: _Sums(engine.device) for part in parts if part.source}
    micro = job.micro_batch(distributed.world_size())
    batches = (
        (part.source, *batch) for part in parts for batch in validation_batches(part.assembler, part.samples, micro)
    )
    for source, batch, valid in batches:
        every = [whole, *([of_sources[source]] if source else [])]
        counts = torch.tensor(Counts.of(batch), dtype=torch.float64)
        for sums in every:
            sums.counts += counts
        # Sentences of another picture are no pair of it; the contrast is measured without them where it trains so.
        rows = batch.matched[:valid] == 1 if not job.contrast.mismatched else torch.ones(valid, dtype=torch.bool)
        rows = rows.nonzero().flatten().to(engine.device)
        batch = batch.to(engine.device)
        out = engine(batch, step=0).lxmert
        for name, (loss, correct) in loss_sums(out, batch, job.objectives).items():
            for sums in every:
                sums.add(f"loss/{name}", loss)
                if correct is not None:
                    sums.add(f"accuracy/{name}", correct)
        if out.s is not None and out.s_hat is not None:
            head.update(out.s[rows], out.s_hat[rows])
    report = _means(whole, job)
    for source, sums in of_sources.items():
        report |= {f"{name}/{source}": value for name, value in _means(sums, job).items() if name != "loss"}
    samples = sum(part.samples for part in parts)
    if job.contrast.weight > 0:
        report |= contrast_metrics(*head.gather(), job.validate_.temperature)
    return {**report, "validation_samples": samples}


def validation_batches(
    assembler: Assemble[VisionLanguageBatch], samples: int, micro: int
) -> Iterator[tuple[VisionLanguageBatch, int]]:
    """This rank's validation batches, each with the number of its rows that are valid."""
    for numbers, valid in validation_samples(samples, micro, distributed.world_size(), distributed.rank()):
        yield only_first(assembler(numbers), valid), valid


def only_first(batch: VisionLanguageBatch, valid: int) -> VisionLanguageBatch:
    """The batch with nothing to predict from row ``valid`` on."""
    rows, length = len(batch.tokens), batch.tokens.shape[1]
    if valid == rows:
        return batch
    regions = batch.masked_regions[batch.masked_regions < valid * batch.present.shape[1]]
    labels = batch.labels.masked_fill(batch.masked >= valid * length, IGNORE)
    matched = batch.matched.clone()
    matched[valid:] = IGNORE
    answers = None if batch.answers is None else torch.where(matched == IGNORE, IGNORE, batch.answers)
    return replace(batch, labels=labels, matched=matched, answers=answers, masked_regions=regions)


def _means(of: _Sums, job: VisionLanguageJob) -> StepMetrics:
    sums, counts = of.totals(), of.total_counts()
    by = {
        name: float(value)
        for name, value in divisors(counts, job.objectives.region_rate, job.objectives.region_scope).items()
    }
    report: StepMetrics = {}
    total = 0.0
    for name, weight in job.objectives.weights().items():
        if not weight or math.isinf(by[name]):  # of no rows nothing is measured
            continue
        mean = sums[f"loss/{name}"] / by[name]
        total += weight * mean
        report[f"loss/{name}"] = mean
        if name in ACCURACIES:
            report[f"accuracy/{name}"] = sums[f"accuracy/{name}"] / by[name]
    return {"loss": total, **report}


class _Sums:
    """Sums by name over batches and ranks, in double precision on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self.counts = torch.zeros(5, dtype=torch.float64)
        """`Counts` of what was added."""

    def add(self, name: str, value: Tensor) -> None:
        """Add a scalar."""
        self._sums[name] = self._sums.get(name, torch.zeros((), dtype=torch.float64, device=self._device)) + value

    def total_counts(self) -> Tensor:
        """The counts over all ranks (collective)."""
        return distributed.all_reduce_sum(self.counts.to(self._device)).cpu()

    def totals(self) -> dict[str, float]:
        """The sums over all ranks (collective; all ranks have the same names)."""
        values = distributed.all_reduce_sum(torch.stack(list(self._sums.values())))
        return dict(zip(self._sums, values.tolist(), strict=True))

"""Validation during training: the same samples, corruptions and temperature at every step and for every run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from capt.pretrain.base import distributed
from capt.pretrain.contrast.metrics import MaskedTokenAccumulator, PairAccumulator
from capt.pretrain.contrastive.metrics import contrast_metrics, noise_metrics, token_metrics
from capt.pretrain.contrastive.task import HeldOut
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import StepMetrics
from capt.pretrain.language.batches import LanguageBatch, validation_batches
from capt.pretrain.language.config import LanguageJob


@torch.no_grad()
def validate(engine: Engine, parts: Sequence[HeldOut[LanguageBatch]], job: LanguageJob) -> StepMetrics:
    """Metrics over held-out windows of all ``parts`` together, equal on all ranks.

    They are :func:`token_metrics`, for each source of a mixture as well (``loss/mlm/NAME``); :func:`contrast_metrics`
    on the aggregation head, where it is trained; and :func:`noise_metrics` on the encoder's own outputs, ``cls`` and
    ``mean``, which compares an MLM-only encoder with a CAPT encoder, unless views are different spans. Metrics of a
    bottleneck are means over texts (``bow``) and over words (``decoder``).
    """
    head, pools = PairAccumulator(), {name: PairAccumulator() for name in job.noise_pools}
    masked, of_sources = MaskedTokenAccumulator(), {part.source: MaskedTokenAccumulator() for part in parts}
    predicted = {name: MaskedTokenAccumulator() for name in job.bottleneck.heads}
    world, rank = distributed.world_size(), distributed.rank()
    batches = (
        (part.source, *batch)
        for part in parts
        for batch in validation_batches(part.assembler, part.samples, job.micro_batch(world), world, rank)
    )
    # Masked tokens are counted for all sources together and for each; rows are compared over all of them.
    for source, batch, valid in batches:
        batch = batch.to(engine.device)
        output = engine(
            batch.tokens, batch.corrupted, batch.positions, batch.labels, batch.documents, padded=batch.padded, step=0,
            pool=True, texts=batch.texts, originals=batch.originals,
        )  # fmt: skip
        out, pooled = output.capt, output.pooled
        if output.bottleneck is not None and batch.sizes is not None:
            counts = {"bow": batch.sizes.texts, "decoder": batch.sizes.words}
            for name, _, total, correct in output.bottleneck.of(job.bottleneck):
                predicted[name].update(total, correct, total.new_tensor(counts[name]))
        # Rows that fill up a batch have nothing to predict; the vectors of such rows are cut off.
        for accumulator in (masked, of_sources[source]):
            accumulator.update(out.mlm_loss_sum, out.mlm_correct, out.mlm_count)
        for name, pool in pools.items():
            x, x_hat = pooled[name]
            pool.update(x[:valid], x_hat[:valid])
        if job.contrast.weight > 0:
            head.update(out.s[:valid], out.s_hat[:valid])
    samples = sum(part.samples for part in parts)
    report: StepMetrics = {"validation_samples": samples}
    if job.masks:
        report = {**token_metrics(*masked.totals()), **report}
    for source, accumulator in of_sources.items():
        if source and job.masks:
            report |= {f"{name}/{source}": value for name, value in token_metrics(*accumulator.totals()).items()}
    for name, accumulator in predicted.items():
        loss, correct, count = accumulator.totals()
        report |= {f"loss/{name}": loss / count, f"accuracy/{name}": correct / count}
    if job.contrast.weight > 0:
        report |= contrast_metrics(*head.gather(), job.validate_.temperature)
    for name, pairs in pools.items():
        report |= {f"noise/{name}/{key}": value for key, value in noise_metrics(*pairs.gather()).items()}
    return report

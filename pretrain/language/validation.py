"""Validation during training: the same samples, corruptions and temperature at every step and for every run."""

from __future__ import annotations

import torch

from capt.pretrain.base import distributed
from capt.pretrain.contrast.metrics import MaskedTokenAccumulator, PairAccumulator
from capt.pretrain.contrastive.metrics import contrast_metrics, noise_metrics, token_metrics
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import StepMetrics
from capt.pretrain.language.batches import Assembler, validation_batches
from capt.pretrain.language.config import LanguageJob


@torch.no_grad()
def validate(engine: Engine, assembler: Assembler, job: LanguageJob, windows: int) -> StepMetrics:
    """Metrics over ``validate.samples`` held-out windows (all of them where there are fewer), equal on all ranks.

    :func:`token_metrics`; :func:`contrast_metrics` on the aggregation head (only when it is trained);
    :func:`noise_metrics` on the encoder's own outputs, ``cls`` and ``mean``, which compares
    an MLM-only encoder with a CAPT encoder.
    """
    head, pools = PairAccumulator(), {"cls": PairAccumulator(), "mean": PairAccumulator()}
    masked = MaskedTokenAccumulator()
    samples = min(job.validate_.samples, windows)
    world, rank = distributed.world_size(), distributed.rank()
    for batch, valid in validation_batches(assembler, samples, job.micro_batch(world), world, rank):
        batch = batch.to(engine.device)
        out, _, pooled = engine(
            batch.tokens, batch.corrupted, batch.positions, batch.labels, batch.documents, padded=batch.padded, step=0,
            pool=True,
        )  # fmt: skip
        masked.update(out.mlm_loss_sum, out.mlm_correct, out.mlm_count)
        for name, (x, x_hat) in pooled.items():
            pools[name].update(x[:valid], x_hat[:valid])
        if job.contrast.weight > 0:
            head.update(out.s[:valid], out.s_hat[:valid])
    report: StepMetrics = {**token_metrics(*masked.totals()), "validation_samples": samples}
    if job.contrast.weight > 0:
        report |= contrast_metrics(*head.gather(), job.validate_.temperature)
    for name, pairs in pools.items():
        report |= {f"noise/{name}/{key}": value for key, value in noise_metrics(*pairs.gather()).items()}
    return report

"""Batches of the synthetic clusters (section 4.4 of the paper, and its released toy): one-hot vectors of K classes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pretrain.base.randomness import derive
from pretrain.latent.config import LatentJob
from pretrain.latent.data.batches import Batch


def cluster_batches(job: LatentJob, step: int, rank: int, world: int) -> Iterator[Batch]:
    """This rank's rows of the batch of each step from ``step`` on.

    A batch holds K classes drawn with replacement, each ``data.repeats`` times.
    """
    classes, repeats = job.data.clusters, job.data.repeats
    assert classes is not None
    total = classes * repeats
    rows = torch.arange(rank, total, world)
    while True:
        generator = torch.Generator().manual_seed(derive(job.run.seed, "clusters", step))
        tokens = torch.randint(0, classes, (classes, 1), generator=generator).expand(-1, repeats).reshape(-1, 1)
        yield Batch(tokens[rank::world], rows, len(rows), total)
        step += 1

"""The synthetic clusters: batches, modules, and numbers for how well codes separate."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from capt.pretrain.config.load import load_job
from capt.pretrain.engine.task import Progress
from capt.pretrain.latent.batches import SampledBatch, cluster_batches
from capt.pretrain.latent.config import LatentJob
from capt.pretrain.latent.evaluation.clusters import POINTS, cluster_metrics, purity, sample_codes, separation
from capt.pretrain.latent.models import ClusterDecoder, ClusterEncoder, build
from capt.pretrain.latent.task import LatentTask
from tests.latent import PTB


def _job(k: int = 4, *more: str) -> LatentJob:
    job = load_job(PTB.parent / f"clusters_k{k}.yaml", list(more))
    assert isinstance(job, LatentJob)
    return job


@pytest.mark.parametrize("world", [1, 2, 3])
def test_batches_are_k_classes_repeated_and_shared(world: int) -> None:
    job = _job()
    whole = next(cluster_batches(job, 7, 0, 1))
    assert whole.tokens.view(4, 64).unique(dim=1).shape == (4, 1)
    parts = [next(cluster_batches(job, 7, rank, world)) for rank in range(world)]
    for part in parts:
        assert torch.equal(part.tokens, whole.tokens[part.rows])
    assert sorted(row for part in parts for row in part.rows.tolist()) == list(range(256))
    stream = cluster_batches(job, 6, 0, 1)
    next(stream)
    assert torch.equal(next(stream).tokens, whole.tokens), "a batch belongs to its step"
    assert len({tuple(next(stream).tokens[::64, 0].tolist()) for _ in range(8)}) > 4


def test_random_numbers_belong_to_their_step(tmp_path: Path) -> None:
    task = LatentTask(_job(), tmp_path)

    def steps(first: int) -> list[SampledBatch]:
        return list(islice(task.build_batches(Progress(step=first)), 12 - first))

    whole = steps(0)
    for first in (0, 7):
        for ours, theirs in zip(steps(first), whole[first:], strict=True):
            for name in ("decoder_tokens", "eps", "priors", "ids"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert not torch.equal(whole[0].eps, whole[1].eps)


def test_sizes_of_the_toy() -> None:
    modules = build(_job(), 0)
    shapes = {name: [tuple(p.shape) for p in module.parameters() if p.ndim == 2] for name, module in modules.items()}
    assert shapes["encoder"] == [(64, 6), (64, 64), (64, 64), (2, 64)]
    assert shapes["decoder"] == [(64, 2), (64, 64), (64, 64), (4, 64)]
    assert shapes["critics"] == [(64, 6), (64, 64), (1, 64)]


def test_likelihood_is_the_binary_cross_entropy_summed_over_the_classes() -> None:
    torch.manual_seed(0)
    decoder = ClusterDecoder(4, _job().model)
    z, classes = torch.randn(5, 2), torch.tensor([[0], [3], [1], [1], [2]])
    p = decoder.layers(z).sigmoid()
    x = F.one_hot(classes[:, 0], 4)
    expected = (x * p.log() + (1 - x) * (1 - p).log()).sum(1)
    torch.testing.assert_close(decoder.log_likelihood(z, classes), expected, rtol=1e-4, atol=1e-5)
    valid = torch.tensor([True, False, True, True, False])
    torch.testing.assert_close(decoder(z, classes, valid), -expected[valid].sum(), rtol=1e-4, atol=1e-5)


def test_the_gaussian_variant_has_a_density() -> None:
    job = _job(4, "model.posterior=gaussian", "objective.regularizer=exact", "objective.views=1", "contrast.weight=0")
    modules = build(job, 0)
    assert set(modules) == {"encoder", "decoder"}
    encoded = modules["encoder"](torch.tensor([[0], [1]]), torch.zeros(2, 2))
    assert encoded.density is not None
    torch.testing.assert_close(encoded.z, encoded.density.mean)


def test_purity_counts_the_most_frequent_class() -> None:
    assert purity(np.array([0, 0, 0, 1, 1]), np.array([2, 2, 1, 0, 0])) == pytest.approx(0.8)


@pytest.mark.parametrize(("distance", "low", "high"), [(20.0, 0.999, 1.0), (0.0, 0.0, 0.5)])
def test_figures_tell_clusters_from_a_cloud(distance: float, low: float, high: float) -> None:
    generator = np.random.default_rng(0)
    classes = np.repeat(np.arange(4), 100)
    angle = 2 * np.pi * classes / 4
    z = distance * np.stack([np.cos(angle), np.sin(angle)], 1) + generator.normal(size=(400, 2))
    figures = separation(z, classes)
    assert low <= figures["purity"] <= high
    assert low <= figures["probe"] <= high
    assert (figures["silhouette"] > 0.8) == (distance > 0)


def test_classes_in_their_own_directions_are_pure_by_cosine_whatever_their_lengths() -> None:
    generator = np.random.default_rng(0)
    classes = np.repeat(np.arange(4), 200)
    angles = classes * np.pi / 2 + 0.1 * generator.normal(size=len(classes))
    z = generator.uniform(0.02, 4.0, size=(len(classes), 1)) * np.stack([np.cos(angles), np.sin(angles)], 1)
    figures = separation(z, classes)
    assert figures["purity_cosine"] == 1.0
    assert figures["purity"] < 0.98


def test_figures_of_a_model() -> None:
    job = _job()
    torch.manual_seed(0)
    modules = build(job, 0)
    encoder = modules["encoder"]
    assert isinstance(encoder, ClusterEncoder)
    z, classes = sample_codes(job, encoder, torch.device("cpu"))
    assert z.shape == (4 * POINTS, 2)
    assert classes[:, 0].bincount().tolist() == [POINTS] * 4
    figures = cluster_metrics(job, modules, torch.device("cpu"))
    assert set(figures) == {"loss", "accuracy", "purity", "purity_cosine", "silhouette", "probe"}
    assert figures == cluster_metrics(job, modules, torch.device("cpu"))

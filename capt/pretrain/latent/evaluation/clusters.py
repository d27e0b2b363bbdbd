"""Separation of the codes of the synthetic clusters, in numbers: the paper shows scatter plots only."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import silhouette_score
from torch import Tensor, nn

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import require_own_folder, write_bytes
from capt.pretrain.latent.batches import StepNoise
from capt.pretrain.latent.config import CODES, LatentJob
from capt.pretrain.latent.models import ClusterDecoder, ClusterEncoder

POINTS = 500
"""The draws of z for each class, as in the paper's plots."""


def purity(clusters: Int64[np.ndarray, " n"], classes: Int64[np.ndarray, " n"]) -> float:
    """Compute the share of the points whose class is the most frequent one of their cluster."""
    table = np.zeros((clusters.max() + 1, classes.max() + 1), dtype=np.int64)
    np.add.at(table, (clusters, classes), 1)
    return float(table.max(1).sum() / len(classes))


def separation(z: Float[np.ndarray, "n d"], classes: Int64[np.ndarray, " n"]) -> dict[str, float]:
    """Measure how well the classes separate.

    ``purity`` is that of k-means (K clusters, 10 starts), and ``purity_cosine`` the same on the directions of z alone,
    since InfoNCE compares codes by their cosine and leaves their lengths to the prior. ``silhouette`` is that of the
    true classes, and ``probe`` the accuracy of a linear classifier on one half of the codes, trained on the other.
    """
    k = int(classes.max()) + 1
    directions = z / np.linalg.norm(z, axis=1, keepdims=True).clip(1e-12)
    clusters, clusters_of_directions = (
        KMeans(k, n_init=10, random_state=0).fit_predict(points).astype(np.int64) for points in (z, directions)
    )
    probe = LogisticRegression(max_iter=1000).fit(z[::2], classes[::2])
    return {
        "purity": purity(clusters, classes),
        "purity_cosine": purity(clusters_of_directions, classes),
        "silhouette": float(silhouette_score(z, classes, sample_size=2000, random_state=0)),
        "probe": float(probe.score(z[1::2], classes[1::2])),
    }


@torch.no_grad()
def sample_codes(job: LatentJob, encoder: ClusterEncoder, device: torch.device) -> tuple[Float[Tensor, "n d"], Tensor]:
    """Draw :data:`POINTS` codes z for each class, with the same noise at every step.

    Returns:
        The codes, and their classes of shape ``(n, 1)``.
    """
    classes = torch.arange(encoder.classes, device=device).repeat_interleave(POINTS)[:, None]
    width = job.model.latent if job.model.posterior == "gaussian" else job.model.noise
    eps = StepNoise(0, ("codes",), None, len(classes), device).normal(1, width)
    return encoder(classes, eps).z, classes


@torch.no_grad()
def cluster_metrics(job: LatentJob, modules: Mapping[str, nn.Module], device: torch.device) -> dict[str, float]:
    """Measure the :func:`separation` of the codes, their reconstruction loss, and the decoder's ``accuracy``.

    The accuracy is the share of codes whose most probable class is the true one.
    """
    encoder, decoder = modules["encoder"], modules["decoder"]
    assert isinstance(encoder, ClusterEncoder)
    assert isinstance(decoder, ClusterDecoder)
    z, classes = sample_codes(job, encoder, device)
    decoded = decoder.layers(z).argmax(1)
    return {
        "loss": float(-decoder.log_likelihood(z, classes).mean()),
        "accuracy": float((decoded == classes[:, 0]).float().mean()),
        **separation(z.cpu().double().numpy(), classes[:, 0].cpu().numpy()),
    }


def save_codes(folder: Path, step: int, job: LatentJob, encoder: nn.Module, device: torch.device) -> None:
    """Write the codes after ``step`` steps into the run ``folder``."""
    assert isinstance(encoder, ClusterEncoder)
    z, _ = sample_codes(job, encoder, device)
    require_own_folder(folder / CODES, error=ConfigError)
    content = io.BytesIO()
    np.save(content, z.view(encoder.classes, POINTS, -1).float().cpu().numpy())
    write_bytes(folder / CODES / f"step-{step:08d}.npy", content.getvalue())

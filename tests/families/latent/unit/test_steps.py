"""A step's gradients against one plain backward pass through the whole loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from capt.pretrain.base import distributed
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.task import to_float
from capt.pretrain.latent.batches import LatentBatch, StepNoise, sample_batch, swapped
from capt.pretrain.latent.config import LatentJob
from capt.pretrain.latent.corpus import END, START
from capt.pretrain.latent.models import TextDecoder, build, optimizers
from capt.pretrain.latent.posterior import Normal
from capt.pretrain.latent.training import SVI_MOMENTUM, train_step
from tests.latent import small_job
from tests.support import run_ranks

WORDS, N, BETA = 19, 5, 0.7


def _tokens() -> Tensor:
    edge = torch.ones(N, 1, dtype=torch.int64)
    words = torch.randint(4, WORDS, (N, 4), generator=torch.Generator().manual_seed(2))
    words[3] = words[0]
    return torch.cat([START * edge, words, END * edge], dim=1)


def _reconstruction(decoder: TextDecoder, z: Tensor, tokens: Tensor, dropout: Any) -> Tensor:
    hidden = decoder._hidden(z, tokens[:, :-1], dropout)
    return F.cross_entropy(decoder.output(hidden).flatten(0, 1), tokens[:, 1:].t().flatten(), reduction="sum") / N


def _gradients(engine: Engine, found: dict[str, Any]) -> None:
    def keep(optimizer: Any, *_: Any) -> None:
        found.update({name: p.grad.clone().numpy() for name, p in engine.module.named_parameters()})

    engine.base_optimizer.register_step_pre_hook(keep)


def _both(preset: str, more: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Gradients of encoder and decoder by ``train_step``, and by autograd through the reference loss."""
    quiet_libraries(debug=False)
    distributed.initialize(1)
    job = small_job(preset, folder, folder / "run", "optimizer.clip=0", "critic.lr=1e-30", *more, batch=N, micro=N)
    torch.manual_seed(0)
    modules = build(job.model_copy(update={"model": job.model.model_copy(update={"init_range": 0.5})}), WORDS)
    engines = build_engines(modules, job, optimizers(job))
    ours: dict[str, dict[str, Any]] = {"encoder": {}, "decoder": {}}
    for name, found in ours.items():
        _gradients(engines[name], found)
    batch = LatentBatch(_tokens(), torch.arange(N), N, N)

    def noise() -> StepNoise:
        return StepNoise(1, ("step", 0), batch.rows, N, torch.device("cpu"))

    with torch.backends.mkldnn.flags(enabled=False):  # this LSTM can be differentiated twice
        loss = _sa_vae(job, modules, batch, noise()) if job.objective.svi_steps else _loss(job, modules, batch, noise())
        parameters = {(part, name): p for part in ours for name, p in modules[part].named_parameters()}
        theirs = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    report = train_step(job, engines, sample_batch(job, batch, noise()), BETA)
    pairs = {f"{part}.{name}": (ours[part][name], theirs[part, name].numpy()) for part, name in parameters}
    return {"pairs": pairs, "loss": to_float(report["loss"]), "reference": float(loss.detach())}


def _loss(job: LatentJob, modules: Any, batch: LatentBatch, noise: StepNoise) -> Tensor:
    sampled = sample_batch(job, batch, noise)
    z, h, density = modules["encoder"](sampled.encoder_tokens, sampled.eps, sampled.encoder_dropout)
    loss = _reconstruction(modules["decoder"], z, sampled.decoder_tokens, sampled.decoder_dropout)
    if job.has_critics:
        assert sampled.priors is not None
        values = modules["critics"](z, h.detach(), sampled.priors[-1])
        of_views = (values.f_q if job.objective.regularizer == "f" else values.g_q).view(-1, N)
        means = of_views.mean(1)
        loss = loss + BETA * (means if job.objective.critic_term == "mean" else (1 + (-means).exp()).log()).sum()
        if job.critic.squared_in_encoder:
            loss = loss + BETA * (values.g_q[:N] - values.g_q[N:]).square().sum()
    elif job.objective.regularizer == "exact":
        loss = loss + BETA * density.kl().sum() / N
    if job.contrast.weight:
        first, second = (z if job.contrast.over == "z" else h).chunk(2)
        if job.contrast.mean_pair:
            first = torch.cat([first.mean(0, keepdim=True), first])
            second = torch.cat([second.mean(0, keepdim=True), second])
        keys = second
        if job.contrast.prior_negatives:
            assert sampled.negatives is not None
            assert sampled.negatives.shape == (job.contrast.prior_negatives * (N + 1), z.shape[1])
            keys = torch.cat([second, sampled.negatives])
        logits = F.cosine_similarity(first[:, None], keys[None], dim=-1) / 0.05
        if job.contrast.negatives == "own_view":  # the positive stays on the diagonal
            own = F.cosine_similarity(first[:, None], first[None], dim=-1) / 0.05
            logits = torch.where(torch.eye(len(first), dtype=torch.bool), logits, own)
        if job.contrast.mask_duplicates:  # sentences 0 and 3 are equal; with the mean pair in front they are 1 and 4
            mean = int(job.contrast.mean_pair)
            logits[[mean, mean + 3], [mean + 3, mean]] = -torch.inf
        loss = loss + job.contrast.weight * F.cross_entropy(logits, torch.arange(len(first)))
    return loss


def _sa_vae(job: LatentJob, modules: Any, batch: LatentBatch, noise: StepNoise) -> Tensor:
    """The descent unrolled, and differentiated through; what flows back into a point of it is cut to ``svi_clip``."""
    sampled = sample_batch(job, batch, noise)
    density = modules["encoder"](sampled.encoder_tokens, sampled.eps, sampled.encoder_dropout).density
    at = torch.cat([density.mean, density.log_variance], 1)

    def nelbo(at: Tensor, eps: Tensor) -> Tensor:
        mean, log_variance = at.chunk(2, 1)
        z = mean + (0.5 * log_variance).exp() * eps
        kl = Normal(mean, log_variance=log_variance).kl().sum() / N
        return _reconstruction(modules["decoder"], z, sampled.decoder_tokens, sampled.decoder_dropout) + BETA * kl

    velocity = torch.zeros_like(at)
    section = job.objective
    for _ in range(section.svi_steps):
        (gradient,) = torch.autograd.grad(nelbo(at, noise.normal(1, at.shape[1] // 2)), at, create_graph=True)
        at.register_hook(lambda g: g * min(1.0, section.svi_clip / (float(g.norm()) + 1e-6)))
        halves = [half * min(1.0, section.svi_clip / (float(half.detach().norm()) + 1e-6))
                  for half in gradient.chunk(2, 1)]  # fmt: skip
        velocity = SVI_MOMENTUM * velocity - section.svi_lr * torch.cat(halves, 1)
        at = at + velocity
    return nelbo(at, sampled.eps)


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("vae", ()),
        ("ae", ()),
        ("vae", ("objective.views=2", "contrast.weight=0.5")),
        ("ivae", ()),
        ("ivae_mi", ()),
        ("clvae_mi", ("contrast.over=h",)),
        ("clvae_plus", ("objective.swap=0.4",)),
        ("clvae_plus_mi", ()),
        ("clvae_plus_mi_paper", ()),
        ("clvae_plus_mi", ("contrast.mask_duplicates=true",)),
        ("sa_vae", ("objective.svi_steps=3", "objective.svi_lr=0.3")),
        ("sa_vae", ("objective.svi_steps=2", "objective.svi_clip=0.1")),
    ],
)
def test_gradients_are_those_of_the_whole_loss(preset: str, more: tuple[str, ...], tmp_path: Path) -> None:
    (result,) = run_ranks(_both, 1, preset, more, tmp_path)
    assert result["loss"] == pytest.approx(result["reference"], rel=1e-5)
    loose = preset == "sa_vae"
    for name, (ours, theirs) in result["pairs"].items():
        scale = max(float(np.abs(theirs).max()), 1e-3)
        worst = float(np.abs(ours - theirs).max()) / scale
        assert worst < (2e-2 if loose else 1e-4), (name, worst)
    assert any(np.abs(theirs).max() > 1e-2 for _, theirs in result["pairs"].values())


def test_swapped_words_stay_within_the_sentence() -> None:
    tokens = _tokens()
    everywhere = swapped(tokens, torch.ones_like(tokens, dtype=torch.bool))
    assert everywhere.tolist() == tokens[:, [0, 2, 1, 4, 3, 5]].tolist()
    assert torch.equal(swapped(tokens, torch.zeros_like(tokens, dtype=torch.bool)), tokens)


def _in_bf16(folder: Path) -> list[float]:
    quiet_libraries(debug=False)
    distributed.initialize(1)
    losses = []
    for precision in ("fp32", "bf16"):
        job = small_job(
            "clvae_plus_mi", folder, folder / "run", f"engine.precision={precision}", "critic.lr=1e-30", batch=N,
            micro=N,
        )  # fmt: skip
        torch.manual_seed(0)
        engines = build_engines(build(job, WORDS), job, optimizers(job))
        batch = LatentBatch(_tokens(), torch.arange(N), N, N)
        noise = StepNoise(job.run.seed, ("step", 0), batch.rows, N, torch.device("cpu"))
        report = train_step(job, engines, sample_batch(job, batch, noise), BETA)
        encoded = engines["encoder"](batch.tokens, torch.zeros(N, 4), None)
        assert encoded.z.dtype == encoded.h.dtype == encoded.density.mean.dtype == torch.float32
        losses.append(to_float(report["loss"]))
    return losses


def test_bf16_is_near_and_keeps_z_in_fp32(tmp_path: Path) -> None:
    ((full, half),) = run_ranks(_in_bf16, 1, tmp_path)
    assert half != full
    assert half == pytest.approx(full, rel=0.02)

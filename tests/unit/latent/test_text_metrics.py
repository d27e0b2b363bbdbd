"""The figures of a set of sentences against a loop over sentences and draws."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.latent.config import LatentJob
from pretrain.latent.data.batches import Batch, Batches
from pretrain.latent.data.corpus import Sentences, build_vocabulary, load_sentences
from pretrain.latent.data.noise import StepNoise
from pretrain.latent.evaluation import model as evaluation_model
from pretrain.latent.evaluation.likelihood import LikelihoodBounds
from pretrain.latent.evaluation.text import DrawCounts, text_metrics
from pretrain.latent.models.build import TextModel, build
from pretrain.latent.models.normal import standard_log_prob
from tests.latent import small_job, write_text

S, K = 4, 6
CPU = torch.device("cpu")


def _setup(preset: str, folder: Path, *more: str) -> tuple[LatentJob, TextModel, Batches, Sentences]:
    job = small_job(preset, write_text(folder, 30), folder / "run", "model.init_range=0.6", *more, batch=5, micro=5)
    vocabulary = build_vocabulary(job.data)
    sentences = load_sentences(job.data, "test", vocabulary)
    assert sentences is not None
    torch.manual_seed(0)
    modules = build(job, len(vocabulary))
    for part in modules.values():
        part.eval()
    return job, TextModel.of(modules), Batches(sentences, 5, 0, "equal"), sentences


def _measured(job: LatentJob, modules: TextModel, batches: Batches) -> dict[str, float]:
    return text_metrics(job, modules, batches.evaluation(1000, 0, 1), DrawCounts(S, 1000))


def _bounded(
    job: LatentJob, modules: TextModel, batches: Batches, weighted: int = K, samples: int = S
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """The figures, and the perplexities with their errors."""
    bounds = LikelihoodBounds(weighted, refit_steps=5)
    figures = text_metrics(job, modules, batches.evaluation(1000, 0, 1), DrawCounts(samples), bounds)
    return figures, bounds.metrics()


@torch.no_grad()
@pytest.mark.parametrize("preset", ["vae", "ivae_mi", "clvae_plus_mi_paper", "ae", "lstm_lm"])
def test_the_configuration_knows_what_validation_reports(preset: str, tmp_path: Path) -> None:
    job, modules, batches, _ = _setup(preset, tmp_path)
    figures = {"loss", *text_metrics(job, modules, batches.evaluation(1000, 0, 1), DrawCounts(1))}
    assert figures == job.metric_names() - ({"mi_aggregate"} - figures)


@torch.no_grad()
@pytest.mark.parametrize("preset", ["vae", "ivae_mi"])
def test_figures_are_those_of_a_loop_over_draws(preset: str, tmp_path: Path) -> None:
    job, modules, batches, sentences = _setup(preset, tmp_path)
    figures, bounds = _bounded(job, modules, batches)
    assert modules.encoder is not None
    rec = kl = f_q = exp_f_p = 0.0
    nlls, nelbos, words_of = [], [], []
    means = []
    for number, batch in batches.evaluation(1000, 0, 1):
        noise = StepNoise(0, ("measure", number), None, batch.total, CPU)
        eps = noise.normal(max(S, K), modules.encoder.head.noise).view(max(S, K), batch.total, -1)
        prior = noise.normal(S, 4).view(S, batch.total, 4)
        for i in range(batch.total):
            row = batch.tokens[i : i + 1]
            weights, recs = [], []
            for s in range(max(S, K)):
                encoded = modules.encoder(row, eps[s, i : i + 1], None)
                log_p = float(modules.decoder.log_likelihood(encoded.z, row))
                log_q = float(encoded.density.log_prob(encoded.z))
                if s < K:
                    weights.append(log_p + float(standard_log_prob(encoded.z)) - log_q)
                if s < S:
                    rec -= log_p / S
                    recs.append(-log_p)
                    if modules.critics is not None:
                        values = modules.critics(encoded.z, encoded.h, prior[s, i : i + 1])
                        f_q += float(values.f_q) / S
                        exp_f_p += math.exp(float(values.f_p)) / S
            kl += float(encoded.density.kl())
            nlls.append(math.log(K) - float(torch.logsumexp(torch.tensor(weights, dtype=torch.float64), 0)))
            nelbos.append(sum(recs) / S + float(encoded.density.kl()))
            words_of.append(row.shape[1] - 1)
            means.append(encoded.density.mean[0])
    n = len(sentences)
    words = sentences.scored / n
    assert figures["sentences"] == n
    assert figures["rec"] == pytest.approx(rec / n, rel=1e-6)
    assert figures["kl_exact"] == pytest.approx(kl / n, rel=1e-5)
    assert figures["nelbo_exact"] == pytest.approx((rec + kl) / n, rel=1e-5)
    assert figures["ppl_exact"] == pytest.approx(math.exp((rec + kl) / n / words), rel=1e-5)
    for name, bound in (("ppl_iw_q", nlls), ("ppl_exact", nelbos)):
        value = math.exp(sum(bound) / sum(words_of))
        residuals = [b - sum(bound) / sum(words_of) * w for b, w in zip(bound, words_of, strict=True)]
        error = value * math.sqrt(n / (n - 1) * sum(r * r for r in residuals)) / sum(words_of)
        assert bounds[name]["value"] == pytest.approx(value, rel=1e-5)
        assert bounds[name]["nats"] == pytest.approx(sum(bound) / n, rel=1e-5)
        assert bounds[name]["standard_error"] == pytest.approx(error, rel=1e-4)
        assert (bounds[name]["sentences"], bounds[name]["draws"]) == (n, K if name == "ppl_iw_q" else S)
    assert bounds["ppl_exact"]["value"] == pytest.approx(figures["ppl_exact"], rel=1e-9)
    assert figures["au"] == int((torch.stack(means).var(0, correction=0) > 0.01).sum())
    assert figures["nelbo_exact"] > bounds["ppl_iw_q"]["nats"]
    if modules.critics is not None:
        dual = (f_q - exp_f_p) / n + 1
        assert figures["kl_dual"] == pytest.approx(dual, rel=1e-4, abs=1e-5)
        assert figures["nelbo_dual"] == pytest.approx(rec / n + dual, rel=1e-5)
        assert figures["kl_dual_clamped"] == max(0.0, figures["kl_dual"])
        assert figures["kl_dual"] < figures["kl_exact"]


@pytest.mark.parametrize("at_once", [1, 7])
def test_passes_of_the_decoder_do_not_matter(at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, modules, batches, _ = _setup("vae", tmp_path)
    whole, bounds = _bounded(job, modules, batches)
    monkeypatch.setattr(evaluation_model, "ROWS_PER_PASS", at_once)
    again, other_bounds = _bounded(job, modules, batches)
    assert again == pytest.approx(whole, rel=1e-6)
    for name, found in bounds.items():
        assert other_bounds[name]["value"] == pytest.approx(found["value"], rel=1e-4)


def test_a_posterior_without_a_density_has_a_valid_bound_of_its_own(tmp_path: Path) -> None:
    job, modules, batches, _ = _setup("clvae_plus_paper", tmp_path)
    figures, bounds = _bounded(job, modules, batches, weighted=40)
    assert "nelbo_exact" not in figures
    assert "mi_aggregate" not in figures
    assert bounds["ppl_exact"] == {"value": None, "reason": "the posterior has no density"}
    _, one_draw = _bounded(job, modules, batches, weighted=40, samples=1)
    assert one_draw["ppl_iw_q"]["value"] == pytest.approx(bounds["ppl_iw_q"]["value"], rel=0.05)
    for name in ("q", "prior", "mixture", "refitted"):
        assert bounds["ppl_best"]["value"] <= bounds[f"ppl_iw_{name}"]["value"] < 100


def test_an_autoencoders_decoder_is_a_model_too(tmp_path: Path) -> None:
    job, modules, batches, _ = _setup("ae", tmp_path)
    _, bounds = _bounded(job, modules, batches, weighted=20)
    assert bounds["ppl_exact"]["value"] is None
    assert "infinite" in bounds["ppl_exact"]["reason"]
    assert bounds["ppl_iw_q"]["value"] is None
    assert bounds["ppl_best"]["proposal"] in ("prior", "refitted")
    assert bounds["ppl_best"]["value"] > 1


def test_a_language_model_has_one_figure(tmp_path: Path) -> None:
    job, modules, batches, sentences = _setup("lstm_lm", tmp_path)
    figures, bounds = _bounded(job, modules, batches)
    assert set(figures) == {"sentences", "scored_a_sentence", "rec", "ppl_rec"}
    assert bounds["ppl_best"] == bounds["ppl_exact"] | {"proposal": "exact"}
    assert bounds["ppl_best"]["value"] == pytest.approx(figures["ppl_rec"], rel=1e-6)
    assert (bounds["ppl_best"]["sentences"], bounds["ppl_best"]["draw_error"]) == (len(sentences), 0.0)
    assert bounds["ppl_iw_prior"]["value"] is None
    fewer = LikelihoodBounds(K, weighted={0})
    text_metrics(job, modules, batches.evaluation(1000, 0, 1), DrawCounts(S), fewer)
    found = fewer.metrics()
    assert found["ppl_best"] == found["ppl_exact_there"] | {"proposal": "exact"}, "the sentences that other rows have"
    assert found["ppl_best"]["sentences"] == batches.take(0, 0, 1).total < found["ppl_exact"]["sentences"]


def test_refined_posteriors_are_better(tmp_path: Path) -> None:
    job, modules, batches, _ = _setup("sa_vae", tmp_path, "objective.svi_steps=6", "objective.svi_lr=0.5")
    plain = job.model_copy(update={"objective": job.objective.model_copy(update={"svi_steps": 0})})
    assert _measured(job, modules, batches)["nelbo_exact"] < _measured(plain, modules, batches)["nelbo_exact"]


def test_a_collapsed_encoder_has_no_active_unit_though_its_draws_vary(tmp_path: Path) -> None:
    job, modules, batches, _ = _setup("ivae", tmp_path)
    assert modules.encoder is not None
    with torch.no_grad():
        weight = modules.encoder.head.linear.weight
        weight.zero_()
        weight[:, -4:] = 2.0 * torch.eye(4)
    figures = _measured(job, modules, batches)
    assert figures["au"] == 0
    assert figures["au_sampled"] == 4
    assert figures["mi_aggregate"] == pytest.approx(0.0, abs=1e-5)
    assert figures["kl_exact"] > 2.0


def test_a_batch_says_at_most_the_log_of_its_size(tmp_path: Path) -> None:
    job, modules, batches, sentences = _setup("ivae", tmp_path)
    assert modules.encoder is not None
    with torch.no_grad():
        modules.encoder.head.linear.weight[:, :-4] *= 100
        modules.encoder.head.linear.weight[:, -4:] = 0.01 * torch.eye(4)
    figures = _measured(job, modules, batches)
    assert 0.5 < figures["mi_batch"] <= math.log(5)
    assert figures["mi_batch"] < figures["mi_aggregate"] <= math.log(len(sentences)) + 1e-9


def test_rows_of_a_batch_are_its_own(tmp_path: Path) -> None:
    _, _, batches, _ = _setup("vae", tmp_path)
    number, batch = next(batches.evaluation(1000, 0, 1))
    assert isinstance(batch, Batch)
    assert (number, batch.total) == (0, len(batch.tokens))

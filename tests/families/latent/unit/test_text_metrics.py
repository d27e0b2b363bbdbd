"""The figures of a set of sentences against a loop over sentences and draws."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from capt.pretrain.latent.batches import Batches, LatentBatch, StepNoise
from capt.pretrain.latent.config import LatentJob
from capt.pretrain.latent.corpus import UNK, Sentences, build_vocabulary, load_sentences
from capt.pretrain.latent.evaluation import model as evaluation_model
from capt.pretrain.latent.evaluation.bounds import Mixture, fitted_normal, prior
from capt.pretrain.latent.evaluation.likelihood import LikelihoodBounds
from capt.pretrain.latent.evaluation.model import sample_posterior
from capt.pretrain.latent.evaluation.text import DrawCounts, text_metrics
from capt.pretrain.latent.models import LatentTextModel, build
from capt.pretrain.latent.posterior import standard_log_prob
from tests.latent import small_job, write_text

S, K = 4, 6
CPU = torch.device("cpu")


def _setup(preset: str, folder: Path, *more: str) -> tuple[LatentJob, LatentTextModel, Batches, Sentences]:
    job = small_job(preset, write_text(folder, 30), folder / "run", "model.init_range=0.6", *more, batch=5, micro=5)
    vocabulary = build_vocabulary(job.data)
    sentences = load_sentences(job.data, "test", vocabulary)
    assert sentences is not None
    torch.manual_seed(0)
    modules = build(job, len(vocabulary))
    for part in modules.values():
        part.eval()
    return job, LatentTextModel.of(modules), Batches(sentences, 5, 0, "equal"), sentences


def _measured(job: LatentJob, modules: LatentTextModel, batches: Batches) -> dict[str, float]:
    return text_metrics(job, modules, batches.evaluation(1000, 0, 1), DrawCounts(S, 1000), UNK)


def _bounded(
    job: LatentJob, modules: LatentTextModel, batches: Batches, weighted: int = K, samples: int = S
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """The figures, and the perplexities with their errors."""
    bounds = LikelihoodBounds(weighted, UNK, refit_steps=5)
    figures = text_metrics(job, modules, batches.evaluation(1000, 0, 1), DrawCounts(samples), UNK, bounds)
    return figures, bounds.metrics()


@torch.no_grad()
@pytest.mark.parametrize("preset", ["vae", "ivae_mi", "clvae_plus_mi_paper", "ae", "lstm_lm"])
def test_the_configuration_knows_what_validation_reports(preset: str, tmp_path: Path) -> None:
    job, modules, batches, _ = _setup(preset, tmp_path)
    figures = {"loss", *text_metrics(job, modules, batches.evaluation(1000, 0, 1), DrawCounts(1, mixture=4), UNK)}
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


def test_passes_of_the_decoder_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, modules, batches, _ = _setup("vae", tmp_path)
    whole, bounds = _bounded(job, modules, batches)
    for at_once in (1, 7):
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
    assert set(figures) == {"sentences", "scored_a_sentence", "unknown_share", "rec", "ppl_rec"}
    validated = text_metrics(job, modules, batches.evaluation(1000, 0, 1), DrawCounts(1, mixture=4), UNK)
    assert set(validated) == {*figures, "nelbo_iw", "ppl_iw", "ppl_known"}
    assert validated["nelbo_iw"] == validated["rec"] == figures["rec"]
    assert bounds["ppl_best"] == bounds["ppl_exact"] | {"proposal": "exact"}
    assert bounds["ppl_best"]["value"] == pytest.approx(figures["ppl_rec"], rel=1e-6)
    assert (bounds["ppl_best"]["sentences"], bounds["ppl_best"]["draw_error"]) == (len(sentences), 0.0)
    assert bounds["ppl_iw_prior"]["value"] is None
    fewer = LikelihoodBounds(K, UNK, weighted={0})
    text_metrics(job, modules, batches.evaluation(1000, 0, 1), DrawCounts(S), UNK, fewer)
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
    assert isinstance(batch, LatentBatch)
    assert (number, batch.total) == (0, len(batch.tokens))


@torch.no_grad()
@pytest.mark.parametrize("preset", ["vae", "clvae_plus_mi_paper", "lstm_lm"])
def test_known_words_are_scored_by_the_same_draws(preset: str, tmp_path: Path) -> None:
    """Word 5 is made the unknown one: with and without it, against a loop over words, draws and sentences."""
    job, modules, batches, sentences = _setup(preset, tmp_path)
    bounds = LikelihoodBounds(K, 5, refit_steps=2)
    counts = DrawCounts(S, mixture=4)
    figures = text_metrics(job, modules, batches.evaluation(1000, 0, 1), counts, 5, bounds)
    unknown = int((sentences.tokens == 5).sum())
    assert unknown > 0
    assert figures["unknown_share"] == pytest.approx(unknown / sentences.scored)
    nll = known = 0.0
    for number, batch in batches.evaluation(1000, 0, 1):
        noise = StepNoise(0, ("measure", number), None, batch.total, CPU)
        z, weights = torch.zeros(1, batch.total, 4), torch.zeros(1, batch.total)
        if modules.encoder is not None:
            sampled = sample_posterior(job, modules, batch, noise, max(S, K if preset == "vae" else 32))
            if modules.critics is not None:
                noise.normal(S, 4)  # the dual's draws of the prior
            own = sampled.density or fitted_normal(sampled.z)
            mixture = Mixture([own, prior(batch.total, 4, CPU)])
            z = mixture.sample(4, noise.generator)
            weights = standard_log_prob(z) - mixture.log_prob(z)
        for i, row in enumerate(batch.tokens):
            words = [_log_p(modules, draw[i], row) for draw in z]
            sums = torch.tensor([sum(scores) for scores in words])
            some = [sum(p for p, word in zip(scores, row[1:], strict=True) if word != 5) for scores in words]
            nll += math.log(len(z)) - float((sums + weights[:, i]).logsumexp(0))
            known += math.log(len(z)) - float((torch.tensor(some) + weights[:, i]).logsumexp(0))
    assert figures["nelbo_iw"] == pytest.approx(nll / len(sentences), rel=1e-5)
    assert figures["ppl_iw"] == pytest.approx(math.exp(nll / sentences.scored), rel=1e-5)
    assert figures["ppl_known"] == pytest.approx(math.exp(known / (sentences.scored - unknown)), rel=1e-5)
    best, of_known = bounds.metrics()["ppl_best"], bounds.metrics()["ppl_known"]
    assert (best["proposal"], best["draws"]) == (of_known["proposal"], of_known["draws"])
    if preset == "lstm_lm":
        assert of_known["value"] == pytest.approx(figures["ppl_known"], rel=1e-6)
    else:
        assert of_known["value"] == pytest.approx(figures["ppl_known"], rel=0.1)


def _log_p(modules: LatentTextModel, z: torch.Tensor, row: torch.Tensor) -> list[float]:
    """log p(w_t | w_<t, z) of each word, from whole prefixes."""
    cut = [0.0] + [float(modules.decoder.log_likelihood(z[None], row[None, : t + 1])) for t in range(1, len(row))]
    return [after - before for before, after in itertools.pairwise(cut)]


@torch.no_grad()
def test_a_text_without_unknown_words_has_one_perplexity(tmp_path: Path) -> None:
    job, modules, batches, _ = _setup("vae", tmp_path)
    figures = text_metrics(job, modules, batches.evaluation(1000, 0, 1), DrawCounts(1, mixture=4), UNK)
    assert figures["unknown_share"] == 0
    assert figures["ppl_known"] == pytest.approx(figures["ppl_iw"], rel=1e-12)

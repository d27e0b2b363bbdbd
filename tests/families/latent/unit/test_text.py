"""Encoder and decoder against a plain rendering, word by word."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from capt.pretrain.latent import models
from capt.pretrain.latent.config import ModelSection
from capt.pretrain.latent.corpus import END, PAD, START
from capt.pretrain.latent.evaluation.model import log_likelihoods
from capt.pretrain.latent.models import LatentTextEncoder, TextDecoder
from capt.pretrain.latent.posterior import frozen

WORDS = 23
SECTION = ModelSection(embedding=6, hidden=7, latent=3, noise=5, posterior="linear", dropout=0.0)


@pytest.fixture
def decoder() -> TextDecoder:
    torch.manual_seed(0)
    return TextDecoder(WORDS, SECTION.model_copy(update={"init_range": 0.8}))


def _tokens(n: int = 4, words: int = 5) -> Tensor:
    edge = torch.ones(n, 1, dtype=torch.int64)
    generator = torch.Generator().manual_seed(1)
    return torch.cat([START * edge, torch.randint(4, WORDS, (n, words), generator=generator), END * edge], dim=1)


def _plain(decoder: TextDecoder, z: Tensor, tokens: Tensor, keep: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """-log p(x | z) of each row, a word at a time, with an LSTM cell written out."""
    weights = decoder.lstm
    state, cell = decoder.start(z), torch.zeros(len(z), 7)
    total = torch.zeros(len(z))
    for t in range(tokens.shape[1] - 1):
        word = decoder.embedding(tokens[:, t])
        word = word if keep is None else word * keep[0][t]
        gates = (
            torch.cat([word, z], 1) @ weights.weight_ih_l0.t() + weights.bias_ih_l0
            + state @ weights.weight_hh_l0.t() + weights.bias_hh_l0
        )  # fmt: skip
        i, f, g, o = gates.chunk(4, dim=1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        state = o.sigmoid() * cell.tanh()
        out = state if keep is None else state * keep[1][t]
        total = total + F.cross_entropy(decoder.output(out), tokens[:, t + 1], reduction="none")
    return total


def test_loss_and_gradients_are_those_of_a_loop_over_words(decoder: TextDecoder) -> None:
    tokens, valid = _tokens(), torch.tensor([True, True, False, True])
    z = torch.randn(4, 3, requires_grad=True)
    keep = (2.0 * (torch.rand(6, 4, 6) < 0.5), 2.0 * (torch.rand(6, 4, 7) < 0.5))
    loss = decoder(z, tokens, valid, keep)
    ours = torch.autograd.grad(loss, [z, *decoder.parameters()])
    reference = (_plain(decoder, z, tokens, keep) * valid).sum()
    theirs = torch.autograd.grad(reference, [z, *decoder.parameters()])
    torch.testing.assert_close(loss, reference)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert (ours[0][2] == 0).all(), "a row without weight has no gradient"


@pytest.mark.parametrize("block", [1, 5, 1024])
def test_likelihood_of_many_draws_is_that_of_each_alone(
    decoder: TextDecoder, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_BLOCK", block)
    monkeypatch.setattr(models, "_CACHED", 3 * WORDS)
    tokens, z = _tokens(), torch.randn(9, 4, 3)
    with torch.no_grad():
        alone = torch.stack([-_plain(decoder, part, tokens) for part in z])
    torch.testing.assert_close(log_likelihoods(decoder, z, tokens), alone, rtol=1e-5, atol=1e-5)


def test_the_language_model_is_a_distribution(decoder: TextDecoder) -> None:
    """All sentences of up to two words, and the rest of the mass in the prefixes of longer ones.

    ``<pad>``, which is never predicted, has no mass here.
    """
    with torch.no_grad():
        decoder.output.bias[PAD] = -1e9
    z = torch.zeros(1, 3)
    words = [word for word in range(WORDS) if word not in (PAD, END)]
    one = torch.tensor([[START, word, END] for word in words])
    empty = decoder.log_likelihood(z, torch.tensor([[START, END]])).exp()
    longer = torch.tensor([[START, a, b] for a in words for b in words])
    ended = decoder.log_likelihood(z.expand(len(one), -1), one).exp().sum()
    open_ended = decoder.log_likelihood(z.expand(len(longer), -1), longer).exp().sum()
    assert float(empty + ended + open_ended) == pytest.approx(1.0, abs=1e-5)


def test_the_representation_is_the_state_at_the_end(decoder: TextDecoder) -> None:
    torch.manual_seed(0)
    encoder = LatentTextEncoder(WORDS, SECTION)
    tokens = _tokens()
    out, _ = encoder.lstm(encoder.embedding(tokens).transpose(0, 1))
    eps = torch.randn(4, 5)
    encoded = encoder(tokens, eps, None)
    torch.testing.assert_close(encoded.h, out[-1])
    torch.testing.assert_close(encoded.z, encoder.head.linear(torch.cat([out[-1], eps], 1)))
    assert encoded.density is not None
    torch.testing.assert_close(encoded.density.mean, encoder.head.linear(torch.cat([out[-1], 0 * eps], 1)))


def test_every_parameter_starts_within_the_range() -> None:
    module = LatentTextEncoder(WORDS, SECTION.model_copy(update={"init_range": 0.01}))
    assert all(float(parameter.detach().abs().max()) <= 0.01 for parameter in module.parameters())


def test_greedy_sentences_are_the_most_probable_words(decoder: TextDecoder) -> None:
    z = torch.randn(6, 3)
    written = decoder.generate(z, 8)
    for row, at in zip(written, z, strict=True):
        assert END not in row
        assert len(row) <= 8
        prefix = [START]
        for word in [*row, END][:8]:
            candidates = torch.tensor([[*prefix, w] for w in range(WORDS)])
            scores = decoder.log_likelihood(at.expand(WORDS, -1), candidates)
            scores[[PAD, START]] = -torch.inf
            assert int(scores.argmax()) == word
            prefix.append(word)


def test_words_are_drawn_from_the_nucleus_and_never_from_those_left_out(decoder: TextDecoder) -> None:
    z = torch.randn(1, 3)
    greedy = decoder.generate(z, 1)
    assert decoder.generate(z, 1, top_p=1e-9, generator=torch.Generator()) == greedy  # the best word always stays
    scores = torch.stack([
        decoder.log_likelihood(z, torch.tensor([[START, word]]))[0] for word in range(WORDS)
    ])  # fmt: skip
    scores[[PAD, START]] = -torch.inf
    probabilities = scores.double().softmax(0)
    generator = torch.Generator().manual_seed(5)
    for top_p, never in ((1.0, ()), (0.5, ()), (0.7, (int(probabilities.argmax()),))):
        allowed = probabilities.clone()
        allowed[list(never)] = 0
        allowed /= allowed.sum()
        ranked = allowed.sort(descending=True)
        size = int((ranked.values.cumsum(0) < top_p - 1e-9).sum()) + 1
        expected = torch.zeros_like(allowed)
        expected[ranked.indices[:size]] = ranked.values[:size] / ranked.values[:size].sum()
        drawn = decoder.generate(z.expand(20_000, -1), 1, top_p=top_p, never=never, generator=generator)
        counts = torch.bincount(torch.tensor([row[0] if row else END for row in drawn]), minlength=WORDS)
        torch.testing.assert_close(counts / 20_000, expected.float(), rtol=0, atol=0.015)
        assert not bool(counts[expected == 0].any())


def test_a_frozen_decoder_gives_gradients_to_z_alone(decoder: TextDecoder) -> None:
    tokens, valid, z = _tokens(), torch.ones(4, dtype=torch.bool), torch.randn(4, 3, requires_grad=True)
    frozen(decoder, z, tokens, valid).backward()
    assert z.grad is not None
    assert all(parameter.grad is None for parameter in decoder.parameters())
    decoder(z.detach(), tokens, valid).backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())

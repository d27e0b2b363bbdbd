"""Sentences in a padded batch against the same sentences alone, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.engine.run import run_job
from capt.pretrain.latent.batches import LatentBatch, StepNoise, sample_batch, swapped
from capt.pretrain.latent.config import LatentJob
from capt.pretrain.latent.corpus import END, PAD, START, UNK, LatentVocabulary, Sentences, ends_of
from capt.pretrain.latent.models import build
from capt.pretrain.latent.objectives import contrast_loss
from tests.latent import small_job
from tests.runs import training_rows
from tests.support import run_ranks

WORDS, LENGTHS = 19, (3, 7, 1, 6, 3)
CPU = torch.device("cpu")


def _sentences() -> Sentences:
    generator = np.random.default_rng(2)
    words = [generator.integers(4, WORDS, size=n) for n in LENGTHS]
    words[4] = words[0]
    return Sentences.of(words)


def _tokens() -> Tensor:
    return torch.from_numpy(_sentences().rows(np.arange(len(LENGTHS))))


def _modules(preset: str, folder: Path, *more: str) -> tuple[LatentJob, dict[str, Any]]:
    job = small_job(preset, folder, folder / "run", "model.init_range=0.5", *more)
    torch.manual_seed(0)
    return job, dict(build(job, WORDS))


def test_rows_end_where_their_sentences_end() -> None:
    tokens = _tokens()
    assert ends_of(tokens).tolist() == [n + 1 for n in LENGTHS]
    for row, n in zip(tokens.tolist(), LENGTHS, strict=True):
        assert (row[0], row[n + 1], set(row[n + 2 :]) <= {PAD}) == (START, END, True)


def test_a_pad_in_the_text_is_an_unknown_word() -> None:
    assert LatentVocabulary(["a", "<pad>"]).encode(["<pad>", "a"]).tolist() == [UNK, 4]


@pytest.mark.parametrize("preset", ["vae", "clvae", "clvae_plus_mi_paper"])
def test_a_sentence_is_what_it_is_alone(preset: str, tmp_path: Path) -> None:
    """h, z, density and log p(x | z) of each row, and the loss and its gradients, are those of single sentences."""
    _, modules = _modules(preset, tmp_path)
    encoder, decoder, tokens = modules["encoder"], modules["decoder"], _tokens()
    n, length = tokens.shape
    eps = torch.randn(n, encoder.head.noise)
    factors = [2.0 * (torch.rand(length - e, n, w) < 0.5) for e, w in ((0, 12), (1, 12), (1, 16))]

    def loss_of(rows: slice, length: int) -> tuple[Any, Tensor]:
        part = tokens[rows, :length]
        inputs, words, hidden = (f[: length - (i > 0), rows] for i, f in enumerate(factors))
        encoded = encoder(part, eps[rows], inputs)
        loss = decoder(encoded.z, part, torch.ones(len(part), dtype=torch.bool), (words, hidden))
        return encoded, loss if encoded.density is None else loss + encoded.density.kl().sum()

    encoded, loss = loss_of(slice(None), length)
    parameters = [p for name in ("encoder", "decoder") for p in modules[name].parameters()]
    ours = torch.autograd.grad(loss, parameters, retain_graph=True)
    alone = [loss_of(slice(i, i + 1), words + 2) for i, words in enumerate(LENGTHS)]
    torch.testing.assert_close(loss, sum(part for _, part in alone), rtol=1e-6, atol=0)
    for name in ("h", "z"):
        rows = torch.cat([getattr(part, name) for part, _ in alone])
        torch.testing.assert_close(getattr(encoded, name), rows, rtol=0, atol=1e-6)
    theirs = torch.autograd.grad(sum(part for _, part in alone), parameters)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * max(1.0, float(b.abs().max())))
    scores = decoder.token_log_likelihoods(encoded.z, tokens)
    for i, words in enumerate(LENGTHS):
        single = decoder.token_log_likelihoods(encoded.z[i : i + 1], tokens[i : i + 1, : words + 2])
        torch.testing.assert_close(scores[: words + 1, i], single[:, 0], rtol=0, atol=1e-6)
        assert (scores[words + 1 :, i] == 0).all()
    torch.testing.assert_close(decoder.log_likelihood(encoded.z, tokens), scores.sum(0))


def test_the_contrast_is_that_of_sentences_alone(tmp_path: Path) -> None:
    """Equal sentences are known as equal whatever follows them, and are the same negatives as without padding."""
    job, modules = _modules("clvae", tmp_path, "contrast.mask_duplicates=true", "model.encoder_dropout=0")
    n = len(LENGTHS)
    losses, ids = [], []
    for extra in (0, 4):
        tokens = torch.from_numpy(_sentences().rows(np.arange(n), 9 + extra))
        batch = LatentBatch(tokens, torch.arange(n), n, n, tokens.numel() - sum(LENGTHS) - 2 * n)
        noise = StepNoise(1, ("step", 0), None, n, CPU)
        sampled = sample_batch(job, batch, noise)
        assert sampled.scored == sum(LENGTHS) + n
        encoded = modules["encoder"](sampled.encoder_tokens, sampled.eps, None)
        losses.append(float(contrast_loss(encoded, sampled, job.contrast, None).detach()))
        assert sampled.ids is not None
        ids.append(sampled.ids.tolist())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert ids[0] == ids[1]
    assert [ids[0].index(i) for i in ids[0]] == [0, 1, 2, 3, 0]


def test_swapped_words_stay_before_the_end() -> None:
    tokens = _tokens()
    everywhere = swapped(tokens, torch.ones_like(tokens, dtype=torch.bool))
    for row, words in enumerate(LENGTHS):
        alone = tokens[row : row + 1, : words + 2]
        expected = swapped(alone, torch.ones_like(alone, dtype=torch.bool))
        assert everywhere[row, : words + 2].tolist() == expected[0].tolist()
        assert (everywhere[row, words + 2 :] == PAD).all()


def _run(folder: Path, run_dir: Path, lengths: str) -> int:
    quiet_libraries(debug=False)
    return run_job(small_job("clvae_plus_mi", folder, run_dir, f"batch.lengths={lengths}"))


@pytest.mark.parametrize("lengths", ["equal", "similar"])
def test_a_sentence_alone_has_no_contrast_and_is_counted(lengths: str, tmp_path: Path) -> None:
    """Nine sentences in batches of eight: by equal lengths one is alone, of which log 2 would be no contrast."""
    for split in ("train", "valid"):
        (tmp_path / f"{split}.txt").write_text("the cat sees\nthe dog sees\na bird finds\n" * 3)
    assert run_ranks(_run, 1, tmp_path, tmp_path / "run", lengths) == [0]
    rows = training_rows(tmp_path / "run")
    left_out = [row for row in rows if "loss/contrast" not in row]
    assert len(left_out) == rows[-1]["contrast/left_out_so_far"] == (3 if lengths == "equal" else 0)
    for row in left_out:
        assert row["loss"] == pytest.approx(row["loss/rec"] + row["loss/reg"])

"""Sentences that a trained model writes: from the prior, from another sentence, and between two sentences."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pretrain.base.errors import ConfigError, DataError, shown
from pretrain.latent.data.batches import Batch
from pretrain.latent.data.corpus import Sentences
from pretrain.latent.data.noise import StepNoise
from pretrain.latent.evaluation.model import sample_posterior
from pretrain.latent.restore import LoadedModel

logger = logging.getLogger(__name__)

MAX_WORDS = 78
"""The words of a generated sentence, at most: as released, decoding stops at 80 tokens with ``<s>`` and a last one."""


def sample(
    model: LoadedModel,
    number: int,
    seed: int = 1,
    max_words: int = MAX_WORDS,
    *,
    top_p: float | None = None,
    unknown: bool = True,
) -> list[str]:
    """Decode ``number`` draws of the prior, greedily or by nucleus sampling.

    Args:
        model: a trained model.
        number: sentences.
        seed: of the draws of codes and words.
        max_words: words of a sentence, at most.
        top_p: probability of the words that each word is drawn from; None = the most probable word.
        unknown: whether the word for unknown ones may be written.

    Raises:
        ConfigError: a language model, which has no z; or ``top_p`` outside of 0 to 1.
    """
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p is a probability above 0, at most 1, got {top_p:g}")
    text_model, _ = model.text
    if text_model.encoder is None:
        raise ConfigError(f"{model.checkpoint}: a language model has no z to draw")
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(number, model.job.model.latent, generator=generator)
    return _decode(model, z, max_words, unknown=unknown, top_p=top_p, generator=generator)


def mean_codes(model: LoadedModel, sentences: Sequence[str], samples: int = 128, seed: int = 1) -> Float[Tensor, "n d"]:
    """Average ``samples`` draws of each sentence's posterior.

    Raises:
        DataError: a sentence without a known word, or over the job's limit.
        ConfigError: a language model, which has no encoder.
    """
    text_model, vocabulary = model.text
    if text_model.encoder is None:
        raise ConfigError(f"{model.checkpoint}: a language model has no encoder")
    means: list[Tensor] = []
    unknown: list[str] = []
    for sentence in sentences:
        words = vocabulary.encode(sentence.split())
        found = zip(sentence.split(), words, strict=True)
        unknown += [word for word, i in found if i == vocabulary.unknown_id and word != vocabulary.unknown]
        if len(words) == 0 or (words == vocabulary.unknown_id).all():
            raise DataError(f"{sentence!r}: no word of it is among the {len(vocabulary)} known ones")
        if len(words) > model.job.data.max_words:
            raise DataError(f"{sentence[:40]!r}...: {len(words)} words, data.max_words is {model.job.data.max_words}")
        tokens = torch.from_numpy(Sentences.of([words]).rows(np.zeros(1, dtype=np.int64)))
        batch = Batch(tokens, torch.zeros(1, dtype=torch.int64), 1, 1)
        noise = StepNoise(seed, ("codes",), None, 1, tokens.device)
        means.append(sample_posterior(model.job, text_model, batch, noise, samples).z.mean((0, 1)))
    if unknown:
        logger.warning(
            "unknown words, read as %s: %s; write words as the training text does (case, blanks before punctuation)",
            vocabulary.unknown,
            shown(" ".join(dict.fromkeys(unknown))),
        )
    return torch.stack(means)


def reconstruct(
    model: LoadedModel, sentences: Sequence[str], max_words: int = MAX_WORDS, *, unknown: bool = True
) -> list[str]:
    """Decode the mean code of each sentence greedily; without ``unknown`` the word for unknown ones is not written."""
    return _decode(model, mean_codes(model, sentences), max_words, unknown=unknown)


def interpolate(
    model: LoadedModel, first: str, second: str, steps: int = 11, max_words: int = MAX_WORDS, *, unknown: bool = True
) -> list[tuple[float, str]]:
    """Decode ``(1 - t) z1 + t z2`` greedily for ``t`` from 0 (``first``) to 1 (``second``), as in the released code."""
    start, end = mean_codes(model, [first, second])
    t = torch.linspace(0, 1, steps)
    sentences = _decode(model, torch.lerp(start, end, t[:, None]), max_words, unknown=unknown)
    return list(zip([round(x, 3) for x in t.tolist()], sentences, strict=True))


def _decode(model: LoadedModel, z: Tensor, max_words: int, *, unknown: bool, **draws: Any) -> list[str]:
    text_model, vocabulary = model.text
    never = () if unknown else (vocabulary.unknown_id,)
    rows = text_model.decoder.generate(z.to(text_model.device), max_words, never=never, **draws)
    return [" ".join(vocabulary.decode(row)) for row in rows]

"""What a trained model writes: samples of the prior, reconstructions, and the way between two sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pretrain.base.errors import ConfigError, DataError
from pretrain.latent.data.batches import Batch
from pretrain.latent.data.corpus import Sentences
from pretrain.latent.data.noise import StepNoise
from pretrain.latent.evaluation.measure import draws
from pretrain.latent.restore import Restored

MAX_WORDS = 78
"""Of a generated sentence: 80 tokens with ``<s>`` and a last one that is cut off, as released."""


def sample(model: Restored, number: int, seed: int = 1, max_words: int = MAX_WORDS) -> list[str]:
    """Greedy sentences of ``number`` draws of the prior."""
    modules, _ = model.text
    if modules.encoder is None:
        raise ConfigError(f"{model.checkpoint}: a language model has no z to draw")
    z = torch.randn(number, model.job.model.latent, generator=torch.Generator().manual_seed(seed))
    return _written(model, z, max_words)


def codes(model: Restored, sentences: Sequence[str], samples: int = 128, seed: int = 1) -> Float[Tensor, "n d"]:
    """The mean of ``samples`` draws of each sentence's posterior.

    Raises:
        DataError: a sentence without a known word, or over the job's limit.
        ConfigError: a language model, which has no encoder.
    """
    modules, vocabulary = model.text
    if modules.encoder is None:
        raise ConfigError(f"{model.checkpoint}: a language model has no encoder")
    rows = []
    for sentence in sentences:
        words = vocabulary.encode(sentence.split())
        if len(words) == 0 or (words == vocabulary.unknown_id).all():
            raise DataError(f"{sentence!r}: no word of it is among the {len(vocabulary)} known ones")
        if len(words) > model.job.data.max_words:
            raise DataError(f"{sentence[:40]!r}...: {len(words)} words, data.max_words is {model.job.data.max_words}")
        tokens = torch.from_numpy(Sentences.of([words]).rows(np.zeros(1, dtype=np.int64)))
        batch = Batch(tokens, torch.zeros(1, dtype=torch.int64), 1, 1)
        noise = StepNoise(seed, ("codes",), None, 1, tokens.device)
        _, z, _ = draws(model.job, modules, batch, noise, samples)
        rows.append(z.mean((0, 1)))
    return torch.stack(rows)


def reconstruct(model: Restored, sentences: Sequence[str], max_words: int = MAX_WORDS) -> list[str]:
    """What the decoder makes of each sentence's code."""
    return _written(model, codes(model, sentences), max_words)


def interpolate(
    model: Restored, first: str, second: str, steps: int = 11, max_words: int = MAX_WORDS
) -> list[tuple[float, str]]:
    """Greedy sentences at ``(1 - t) z1 + t z2`` for ``t`` from 0 (``first``) to 1, as in the released code."""
    start, end = codes(model, [first, second])
    t = torch.linspace(0, 1, steps)
    written = _written(model, torch.lerp(start, end, t[:, None]), max_words)
    return list(zip([round(x, 3) for x in t.tolist()], written, strict=True))


def _written(model: Restored, z: Tensor, max_words: int) -> list[str]:
    modules, vocabulary = model.text
    z = z.to(next(modules.decoder.parameters()).device)
    return [" ".join(vocabulary.decode(row)) for row in modules.decoder.generate(z, max_words)]

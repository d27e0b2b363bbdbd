"""Forward and reverse perplexity: how much generated text looks like real text, and how much of real text it covers.

Forward: a 5-gram model of the real training text scores the generated sentences; low means fluent. Reverse: a 5-gram
model of the generated sentences scores real text; low means diverse as well (Zhao et al. 2018; Table 4 of the clVAE
paper, UAI 2022). The rules are those of the code released with that paper: :data:`SAMPLES` sentences, decoded greedily
from the prior; at most :data:`LONGEST` words each; every word of the vocabulary once more as a sentence of its own in
the text that the reverse model learns from; modified Kneser-Ney with the fallback discounts; ``<unk>`` in a training
text is white space, in a scored text an unknown word that counts; ``</s>`` does not count.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_never

from pretrain.base.errors import DataError
from pretrain.latent.evaluation.word_scores import LanguageModel, Text
from pretrain.latent.ngram import kenlm, kneser_ney

logger = logging.getLogger(__name__)

SAMPLES = 1280
"""Generated sentences of the paper: 10 batches of 128."""

LONGEST = 78
"""Words of a generated sentence: decoding stops at 80 with ``<s>``; then the first and the last are cut off."""

ORDER = 5

Estimator = Literal["kenlm", "builtin"]
"""``kenlm``: its own programs. ``builtin``: :mod:`pretrain.latent.ngram.kneser_ney`, the same model in numpy."""


@dataclass(frozen=True)
class TextPerplexity:
    """Perplexity of one text under one n-gram model.

    ``released`` counts as the paper's code does (no ``</s>``), ``with_ends`` as KenLM's ``query`` (``</s>`` is a word).
    ``words`` and ``unknown`` count the text's words, and those that the model does not know.
    """

    released: float
    with_ends: float
    words: int
    unknown: int


def estimator(name: Estimator, folder: Path, programs: Path | None = None) -> Callable[[Text], LanguageModel]:
    """What turns a text into a 5-gram model by the paper's rules.

    Args:
        name: nothing replaces the one that was asked for.
        folder: where ``lmplz`` puts its models, each under a name of its own and for the caller to remove (PTB: 90 MB).
        programs: the folder of ``lmplz`` and ``query``, see :func:`pretrain.latent.ngram.kenlm.find_programs`.

    Raises:
        ConfigError: ``kenlm``, and its programs are not found.
    """
    match name:
        case "kenlm":
            found = kenlm.find_programs(programs)

            def estimate(text: Text) -> LanguageModel:
                with tempfile.NamedTemporaryFile(dir=folder, suffix=".arpa", delete=False) as file:
                    arpa = Path(file.name)
                return kenlm.estimate(text, arpa, found, ORDER, kneser_ney.FALLBACK)

            return estimate
        case "builtin":
            return lambda text: kneser_ney.estimate(text, ORDER, kneser_ney.FALLBACK)
        case _:
            assert_never(name)


def as_scored(samples: Text) -> list[list[str]]:
    """Generated sentences as the paper scores them: the words before ``</s>``, at most :data:`LONGEST`."""
    sentences = [list(words[: words.index("</s>")] if "</s>" in words else words) for words in samples]
    long = sum(len(words) > LONGEST for words in sentences)
    if long:
        logger.info("%d of %d generated sentences are cut to %d words", long, len(sentences), LONGEST)
    return [words[:LONGEST] for words in sentences]


def forward_perplexity(samples: Text, train: Text, estimate: Callable[[Text], LanguageModel]) -> TextPerplexity:
    """Perplexity of the generated ``samples`` under a model of the real ``train`` text.

    Raises:
        DataError: a text holds no word, or no model can be estimated from it.
    """
    _warn_of_number(samples)
    return _perplexity(estimate(train), as_scored(samples))


def reverse_perplexity(
    samples: Text, vocabulary: Sequence[str], real: Mapping[str, Text], estimate: Callable[[Text], LanguageModel]
) -> dict[str, TextPerplexity]:
    """Perplexity of each text in ``real`` under a model of the generated ``samples``.

    The paper says that it scores the test set; its code scores the training set: give both.

    Args:
        samples: generated sentences.
        vocabulary: all words of the generating model, the special ones included (``<s>``, ``</s>`` and ``<unk>`` are
            white space in a training text: they add empty sentences, as in the paper's code).
        real: texts by name.
        estimate: see :func:`estimator`.

    Raises:
        DataError: a text holds no word, or no model can be estimated from it.
    """
    _warn_of_number(samples)
    model = estimate([[word] for word in vocabulary] + as_scored(samples))
    return {name: _perplexity(model, text) for name, text in real.items()}


def _perplexity(model: LanguageModel, text: Text) -> TextPerplexity:
    scores = model.score(text)
    return TextPerplexity(
        released=scores.perplexity(ends=False),
        with_ends=scores.perplexity(ends=True),
        words=int((~scores.is_end).sum()),
        unknown=int(scores.is_unknown.sum()),
    )


def _warn_of_number(samples: Text) -> None:
    if not samples:
        raise DataError("forward and reverse perplexity: no generated sentence")
    if len(samples) != SAMPLES:
        logger.warning(
            "forward and reverse perplexity of %d generated sentences: the paper's are of %d, and the reverse one "
            "falls with their number",
            len(samples),
            SAMPLES,
        )

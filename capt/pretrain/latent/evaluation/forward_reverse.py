"""Forward and reverse perplexity: how much generated text looks like real text, and how much of real text it covers.

Forward: a 5-gram model of the real training text scores the generated sentences; low means fluent. Reverse: a 5-gram
model of the generated sentences scores real text; low means diverse as well (Zhao et al. 2018; Table 4 of the clVAE
paper, UAI 2022). The rules are those of the code released with that paper: :data:`SAMPLES` sentences, decoded greedily
from the prior; at most :data:`~capt.pretrain.latent.evaluation.text.MAX_WORDS` words each; every word of the vocabulary
once more as a sentence of its own in the text that the reverse model learns from; modified Kneser-Ney with the fallback
discounts; ``<unk>`` in a training text is white space, in a scored text an unknown word that counts; ``</s>`` does not
count.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_never

from capt.pretrain.base.errors import DataError
from capt.pretrain.engine.evaluations import save_artifact
from capt.pretrain.latent import kenlm, ngram
from capt.pretrain.latent.config import GENERATED_TEXT
from capt.pretrain.latent.corpus import read
from capt.pretrain.latent.evaluation.text import MAX_WORDS, sample
from capt.pretrain.latent.models import LoadedLatentModel
from capt.pretrain.latent.ngram import LanguageModel, Text
from capt.pretrain.latent.text_files import file_of

logger = logging.getLogger(__name__)

SAMPLES = 1280
"""The number of generated sentences in the paper: 10 batches of 128."""

ORDER = 5
"""The longest n-grams of both models."""

Estimator = Literal["kenlm", "builtin"]
"""``kenlm``: its own programs. ``builtin``: :mod:`capt.pretrain.latent.ngram`, the same model in numpy."""


@dataclass(frozen=True)
class TextPerplexity:
    """The perplexity of one text under one n-gram model.

    Attributes:
        released: without ``</s>``, as the paper's code counts.
        with_ends: with ``</s>`` as a word, as KenLM's ``query`` counts.
        words: the number of words of the text.
        unknown: how many of them the model does not know.
    """

    released: float
    with_ends: float
    words: int
    unknown: int


def estimator(name: Estimator, folder: Path, programs: Path | None = None) -> Callable[[Text], LanguageModel]:
    """Choose the function that estimates a 5-gram model of a text by the paper's rules.

    Args:
        name: the estimator; no other one replaces it.
        folder: where ``lmplz`` writes its models, each in a file of its own that the caller removes (PTB: 90 MB).
        programs: the folder of ``lmplz`` and ``query``, see :func:`capt.pretrain.latent.kenlm.find_programs`.

    Raises:
        ConfigError: the programs of ``kenlm`` are missing.
    """
    match name:
        case "kenlm":
            executables = kenlm.find_programs(programs)

            def estimate(text: Text) -> LanguageModel:
                with tempfile.NamedTemporaryFile(dir=folder, suffix=".arpa", delete=False) as file:
                    arpa = Path(file.name)
                return kenlm.estimate(text, arpa, executables, ORDER, ngram.FALLBACK)

            return estimate
        case "builtin":
            return lambda text: ngram.estimate(text, ORDER, ngram.FALLBACK)
        case _:
            assert_never(name)


def as_scored(samples: Text) -> list[list[str]]:
    """Cut generated sentences as the paper does: the words before ``</s>``, at most ``MAX_WORDS`` of them."""
    sentences = [list(words[: words.index("</s>")] if "</s>" in words else words) for words in samples]
    too_long = sum(len(words) > MAX_WORDS for words in sentences)
    if too_long:
        logger.info("%d of %d generated sentences are cut to %d words", too_long, len(sentences), MAX_WORDS)
    return [words[:MAX_WORDS] for words in sentences]


def forward_perplexity(samples: Text, train: Text, estimate: Callable[[Text], LanguageModel]) -> TextPerplexity:
    """Compute the perplexity of the generated ``samples`` under a model of the real ``train`` text.

    Raises:
        DataError: a text holds no word, or no model can be estimated from it.
    """
    _require_some(samples)
    return _perplexity(estimate(train), as_scored(samples))


def reverse_perplexity(
    samples: Text, vocabulary: Sequence[str], real: Mapping[str, Text], estimate: Callable[[Text], LanguageModel]
) -> dict[str, TextPerplexity]:
    """Compute the perplexity of each text in ``real`` under a model of the generated ``samples``.

    The paper says that it scores the test set, and its code scores the training set: give both.

    Args:
        samples: generated sentences.
        vocabulary: all words of the generating model, the special ones included (``<s>``, ``</s>`` and ``<unk>`` are
            white space in a training text: they add empty sentences, as in the paper's code).
        real: texts by name.
        estimate: the function that :func:`estimator` chooses.

    Raises:
        DataError: a text holds no word, or no model can be estimated from it.
    """
    _require_some(samples)
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


def _require_some(samples: Text) -> None:
    if not samples:
        raise DataError("forward and reverse perplexity: no generated sentence")


def generated_perplexities(
    model: LoadedLatentModel, *, by: Estimator = "builtin", data: Path | None = None, programs: Path | None = None,
    number: int = SAMPLES, seed: int = 1,
) -> dict[str, float]:  # fmt: skip
    """Compute the 5-gram perplexities of what a trained model writes, with and without ``</s>`` counted (Table 4).

    ``forward`` is that of the sentences under a model of the training text; ``reverse_train`` (the released rule) and
    ``reverse_test`` (the paper's words) are those of the real texts under a model of the sentences.

    Args:
        model: the trained model.
        by: the estimator of the 5-gram models; no other one replaces it.
        data: the folder with the texts; None reads them where the job did, and keeps the result in the run folder.
        programs: the folder of KenLM's programs.
        number: how many sentences are decoded greedily from the prior.
        seed: the seed of the draws.

    Raises:
        DataError: a text is missing, or holds no word of the vocabulary.
        ConfigError: KenLM's programs are missing, or the model has no z.
    """
    if by == "kenlm":
        kenlm.find_programs(programs)  # fail before a minute of writing
    if number != SAMPLES:
        logger.warning(
            "forward and reverse perplexity of %d generated sentences: the paper's are of %d, and the reverse one "
            "falls with their number",
            number,
            SAMPLES,
        )
    _, vocabulary = model.text
    section = model.job.data.read_from(data)
    texts = {}
    for split in ("train", "test"):
        file = file_of(section, split)
        if file is None:
            raise DataError(f"{section.path}: no file whose name says {split}")
        texts[split] = list(read(file, section.format))
        if not vocabulary.knows_any(texts[split]):
            raise DataError(
                f"{file}: holds no known word; the vocabulary of {len(vocabulary)} words belongs to other text"
            )
    sentences = [text.split() for text in sample(model, number, seed)]
    with tempfile.TemporaryDirectory() as folder:
        estimate = estimator(by, Path(folder), programs)
        perplexities = {"forward": forward_perplexity(sentences, texts["train"], estimate)}
        for split, reverse in reverse_perplexity(sentences, vocabulary.words, texts, estimate).items():
            perplexities[f"reverse_{split}"] = reverse
    metrics: dict[str, float] = {}
    for name, value in perplexities.items():
        metrics |= {f"{name}_ppl": value.released, f"{name}_ppl_with_ends": value.with_ends}
    if data is None:
        settings = {"checkpoint": str(model.checkpoint), "by": by, "number": number, "seed": seed}
        save_artifact(model.checkpoint, GENERATED_TEXT, settings | metrics)
    return metrics

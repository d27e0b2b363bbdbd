"""The tokenizer of a job without a pretrained model: the one that it names, or one trained on its sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from pretrain.base.verification import ALONE, Ranks
from pretrain.models.hub import TOKENIZER_FILES, local_folder
from pretrain.models.tokenizer import trained_tokenizer
from pretrain.vision_language.sections import SentenceTokenizer


def tokenizer_folder(
    section: SentenceTokenizer, sentences: Sequence[str], cache: Path, positions: int, ranks: Ranks = ALONE
) -> Path:
    """``tokenizer.path``, or a tokenizer trained on ``sentences``, cached by content.

    All ``ranks`` call this with the same sentences: one trains, the others wait.

    Args:
        section: of the job.
        sentences: to train on, in an order that is the same for every run; a sentence that occurs twice counts twice.
        cache: where trained tokenizers are kept, in ``tokenizers``.
        positions: the longest sentence of the model in tokens.
        ranks: the processes of the job.

    Raises:
        ConfigError: ``vocab_size`` is too small for the characters of the sentences.
        DataError: it is too large for them, or there is no text in them.
    """
    if section.path is not None:
        with ranks.synchronize_errors():
            return local_folder(section.path, TOKENIZER_FILES)
    digest = sha256()
    for sentence in sentences:
        data = sentence.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return trained_on(section, digest.hexdigest(), lambda: sentences, cache, positions, ranks)


def trained_on(
    section: SentenceTokenizer,
    key: str,
    sentences: Callable[[], Iterable[str]],
    cache: Path,
    positions: int,
    ranks: Ranks = ALONE,
) -> Path:
    """A tokenizer trained on the sentences that ``key`` represents; they are asked for where it is not in the cache.

    Arguments and errors are those of `tokenizer_folder`.
    """
    if section.lower_case and not section.normalization.endswith("_cf"):
        section = section.model_copy(update={"normalization": f"{section.normalization}_cf"})
    return trained_tokenizer(
        section,
        {"sentences": key, "positions": positions},
        sentences,
        cache,
        longest=positions,
        ranks=ranks,
    )

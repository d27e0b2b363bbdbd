"""The tokenizer of a job without a pretrained model: the one that it names, or one trained on its sentences."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from pretrain.base.locks import cache_lock
from pretrain.base.verification import ALONE, Ranks
from pretrain.models.hub import TOKENIZER_FILES, local_folder
from pretrain.vision_language.sections import SentenceTokenizer

logger = logging.getLogger(__name__)


def tokenizer_folder(
    section: SentenceTokenizer, sentences: Sequence[str], cache: Path, positions: int, ranks: Ranks = ALONE
) -> Path:
    """``tokenizer.path``, or a tokenizer trained on ``sentences``, cached by content.

    All ``ranks`` call this with the same sentences: one trains, the others wait.

    Args:
        section: of the job.
        sentences: to train on, in an order that is the same for every run; a sentence that stands twice counts twice.
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
    digest = sha256(section.model_dump_json(exclude={"path"}).encode() + f"/{positions}/".encode())
    for sentence in sentences:
        data = sentence.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    folder = cache / "tokenizers" / digest.hexdigest()[:32]
    with ranks.synchronize_errors():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with cache_lock(folder.with_suffix(".lock")):
            if not folder.exists():
                _train(section, sentences, folder, positions)
    return folder


def _train(section: SentenceTokenizer, sentences: Sequence[str], folder: Path, positions: int) -> None:
    from tokenizer.train import train

    logger.info("no tokenizer.path: one is trained on the sentences, and kept in %s", folder)
    train(
        sentences,
        folder,
        vocab_size=section.vocab_size,
        type=section.type,
        byte_fallback=section.byte_fallback,
        normalization="nmt_nfkc_cf" if section.lower_case else "nmt_nfkc",
        model_max_length=positions,
        max_sentences=section.max_sentences,
    )

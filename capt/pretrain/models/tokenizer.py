"""The tokenizer of a model: the section of a job that names it, or says how one is trained. No torch here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from capt.pretrain.base.locks import make_once
from capt.pretrain.base.verification import ALONE, Ranks, digest_of
from capt.pretrain.config.base import PositiveInt, Section
from capt.pretrain.models.hf_config import FolderOrId

logger = logging.getLogger(__name__)


Normalization = Literal["nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity"]


class TokenizerSection(Section):
    """A tokenizer to use (``path``), or how to train one on ``data.*`` when there is none (cached by content)."""

    removed: ClassVar = {"max_sentences": 1_000_000}

    path: FolderOrId | None = Field(
        None,
        description="folder with a tokenizer (ours, any Hugging Face one, vocab.json + merges.txt, vocab.txt), or"
        " USER/NAME[@REV] of the hub",
    )
    type: Literal["unigram", "bpe"] = Field("unigram", description="SentencePiece model to train")
    vocab_size: PositiveInt = Field(8192, le=2**24, description="pieces of a trained tokenizer, special ones included")
    byte_fallback: bool = Field(True, description="write unknown characters as bytes instead of <unk>")
    normalization: Normalization = Field(
        "nmt_nfkc",
        description="how a trained tokenizer normalises text, in training and in use: Unicode's NFKC, nmt: control"
        " characters and kinds of spaces as well, cf: case folded; identity: not at all",
    )


def trained_tokenizer(
    section: TokenizerSection,
    content: Mapping[str, Any],
    texts: Callable[[], Iterable[str]],
    cache: Path,
    *,
    longest: int,
    ranks: Ranks = ALONE,
) -> Path:
    """The folder of a tokenizer trained on ``texts``, in the cache. All ``ranks`` call this: one trains, others wait.

    Args:
        section: how it is trained.
        content: what the texts are, as JSON, and all else that decides the result: it names the folder, together with
            the section.
        texts: called where the tokenizer is not in the cache yet.
        cache: the host's.
        longest: sequence in tokens that ``transformers`` should let pass.
        ranks: those that need it.
    """
    # With removed keys, so that what an earlier version has trained is found.
    recipe = {**content, **section.removed, **section.model_dump(mode="json", exclude={"path"})}
    folder = cache / "tokenizers" / digest_of(recipe)
    if not folder.exists():  # said by every rank: the one that trains may be one whose log is not shown
        logger.info("no tokenizer.path: one is trained on the text, and kept in %s", folder)

    def make() -> None:
        from capt.tokenizer.train import train

        train(
            texts(),
            folder,
            vocab_size=section.vocab_size,
            type=section.type,
            byte_fallback=section.byte_fallback,
            normalization=section.normalization,
            model_max_length=longest,
            max_sentences=section.removed["max_sentences"],
        )

    with ranks.synchronize_errors():
        make_once(folder.with_suffix(".lock"), folder.exists, make)
    return folder

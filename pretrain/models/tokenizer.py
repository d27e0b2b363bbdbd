"""The section of a job that names the tokenizer of its model, or says how one is trained. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pretrain.config.base import PositiveInt, Section
from pretrain.models.hub import Source


class TokenizerSection(Section):
    """A tokenizer to use (``path``), or how to train one on ``data.*`` when there is none (cached by content)."""

    path: Source | None = Field(
        None,
        description="folder with a tokenizer (ours, any Hugging Face one, vocab.json + merges.txt, vocab.txt), or"
        " USER/NAME[@REV] of the hub",
    )
    type: Literal["unigram", "bpe"] = Field("unigram", description="SentencePiece model to train")
    vocab_size: PositiveInt = Field(8192, le=2**24, description="pieces of a trained tokenizer, special ones included")
    byte_fallback: bool = Field(True, description="write unknown characters as bytes instead of <unk>")
    max_sentences: PositiveInt = Field(1_000_000, description="lines of the corpus to train on, sampled by seed")

"""A tokenizer whose ids can be read back by hand: one token a byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from capt.pretrain.data.corpus import Corpus, Piece
from capt.tokenizer.special import SpecialIds

SPECIAL = SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=4)


@dataclass(frozen=True)
class ByteTokenizer:
    vocab_size: int = 261
    fingerprint: str = "b" * 64
    special: SpecialIds = SPECIAL
    special_ids: tuple[int, ...] = (0, 1, 2, 3, 4)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) + 5 for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) - 5 for i in ids if i >= 5).decode(errors="replace")


class ListCorpus(Corpus):
    """Documents from a list."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.size = list(texts), len(texts)

    def pieces(self) -> Iterable[Piece]:
        for position, text in enumerate(self.texts, start=1):
            self.position = position
            yield text + "\n", True

    def contents(self) -> list[dict[str, str | int]]:
        return [{"name": "list", "format": "list", "sha256": "0" * 64}]


def documents(corpus: Corpus) -> Iterator[str]:
    """The documents of ``corpus`` as whole strings (each must fit in memory)."""
    parts: list[str] = []
    for passage in corpus:
        if passage.starts and parts:
            yield "".join(parts)
            parts = []
        parts.append(passage.text)
    if parts:
        yield "".join(parts)

"""Words with their vectors, wherever they came from: a run, a checkpoint or a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Float32, Float64


@dataclass(frozen=True)
class WordVectors:
    """Words and the rows of their vectors.

    Attributes:
        words: every word once.
        matrix: the vector of each word; of a run the input table.
        context: the vector of each word as a context, where it is known: files of vectors do not hold it.
    """

    words: tuple[str, ...]
    matrix: Float32[np.ndarray, "V d"]
    context: Float32[np.ndarray, "V d"] | None = None

    def __len__(self) -> int:
        return len(self.words)

    @property
    def width(self) -> int:
        """The dimensions of a vector."""
        return int(self.matrix.shape[1])

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The row of each word."""
        return {word: row for row, word in enumerate(self.words)}

    @cached_property
    def norms(self) -> Float64[np.ndarray, " V"]:
        """The length of each vector; in float64, where the squares of all float32 numbers have room."""
        norms: Float64[np.ndarray, " V"] = np.sqrt(np.einsum("vd,vd->v", self.matrix, self.matrix, dtype=np.float64))
        return norms

    def find(self, word: str) -> int | None:
        """Return the row of a word as it is written, else of its lower-case form; None where neither is there."""
        row = self.index.get(word)
        return self.index.get(word.lower()) if row is None else row

    def cosines_to(self, row: int) -> Float64[np.ndarray, " V"]:
        """Return the cosine of every vector to that of ``row``; 0 where one of both is zero."""
        products = np.einsum("vd,d->v", self.matrix, self.matrix[row], dtype=np.float64)
        lengths = self.norms * self.norms[row]
        cosines: Float64[np.ndarray, " V"] = np.divide(products, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        return cosines

    def cosines(self, first: Sequence[int], second: Sequence[int]) -> Float[np.ndarray, " n"]:
        """Return the cosine of each pair of rows in float64; 0 where a vector is zero."""
        a, b = (self.matrix[np.asarray(rows, dtype=np.int64)].astype(np.float64) for rows in (first, second))
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        products = np.einsum("nd,nd->n", a, b)
        cosines: Float[np.ndarray, " n"] = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
        return cosines

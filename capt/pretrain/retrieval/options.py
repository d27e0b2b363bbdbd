"""Options of encoders, stored vectors, evaluations and mining, declared once for the command line and what it calls.

What is typed as a text of several values has these as a property.

``capt`` reads them before it knows what to run, so that nothing heavy is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from capt.pretrain.base.cache import default_cache
from capt.pretrain.base.errors import ConfigError

CACHE_BYTES = 100_000_000_000
"""Bytes that the vectors of an object store may take of this host's cache, where nothing else is said."""

Pooling = Annotated[
    str | None,
    typer.Option(
        "--pooler",
        "--pooling",
        help="mean, cls or head; default the vector that a bottleneck has trained, else mean. A sentence-transformers "
        "folder says it itself.",
    ),
]
Length = Annotated[int | None, typer.Option(min=3, help="Tokens of a text at most; default as the model's own limit.")]
QueryPrompt = Annotated[str | None, typer.Option(help="Precedes every query; default as the folder says.")]
DocumentPrompt = Annotated[str | None, typer.Option(help="Precedes every document; default as the folder says.")]


@dataclass(frozen=True)
class EncoderOptions:
    """Choices of the user about an encoder."""

    pooling: Pooling = None
    length: Length = None
    query_prompt: QueryPrompt = None
    document_prompt: DocumentPrompt = None


@dataclass(frozen=True)
class VectorOptions:
    """Options of vectors that are stored."""

    dtype: Annotated[
        str, typer.Option(help="What vectors are stored in: fp32, fp16, or (not to mine) int8 or binary.")
    ] = "fp32"
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a batch at most, with padding; default 2,048, on a GPU 65,536."),
    ] = None
    cache_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="What vectors of a store may take of this host's cache, as 200GB; default 100GB."
        ),
    ] = None

    def __post_init__(self) -> None:
        _ = self.cache_limit  # what is no number is refused before anything is begun

    @property
    def cache_limit(self) -> int:
        """The number of ``cache_bytes``. Raises ``ConfigError`` where it is none."""
        if self.cache_bytes is None:
            return CACHE_BYTES
        from pydantic import TypeAdapter, ValidationError

        from capt.pretrain.config.base import Bytes

        try:
            found: int = TypeAdapter(Bytes).validate_python(self.cache_bytes)
        except ValidationError:
            raise ConfigError(f"--cache-bytes {self.cache_bytes!r}: is not a number of bytes, such as 200GB") from None
        return found


def default_store() -> Path:
    """The store of this host, which is in the cache: `capt cache prune` removes it."""
    return default_cache() / "vectors"


@dataclass(frozen=True)
class _Stored:
    store: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Folder of the vectors, here or in a store (s3://, gs://, az://; read only: hf://, https://); default "
            "in this host's cache.",
        ),
    ] = None


@dataclass(frozen=True)
class EncodeOptions(VectorOptions, _Stored):  # whose fields come first
    """Options of encoding texts and keeping their vectors in a store, a folder or an address in an object store."""


@dataclass(frozen=True)
class RetrievalSettings:
    """Settings of an evaluation of retrieval: what is measured beside whole vectors.

    ``fusion`` fuses whole vectors with BM25, which is measured as well. Without ``precision`` the store's own is
    measured.
    """

    dims: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Also by the first N numbers of each vector. (--retrieval)")
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="What vectors are compared in: float, int8, binary. (--retrieval)"),
    ] = None
    rescore: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            help="Also score this many times the usual number of int8's and binary's first documents again, by queries "
            "in float. (--retrieval)",
        ),
    ] = None
    bm25: Annotated[bool, typer.Option("--bm25", help="BM25 beside the model. (--retrieval)")] = False
    fusion: Annotated[
        bool,
        typer.Option("--fusion", help="BM25, and both fused by reciprocal ranks, with the difference. (--retrieval)"),
    ] = False

    def __post_init__(self) -> None:
        _ = self.dimensions  # what are no numbers is refused before anything is begun

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The numbers of ``dims``. Raises ``ConfigError`` where they are none."""
        words = _words(self.dims)
        if not all(word.isascii() and word.isdigit() and 0 < int(word) < 1 << 20 for word in words):
            raise ConfigError(f"--dims {self.dims}: whole numbers separated by commas are expected, such as 256,64")
        return tuple(dict.fromkeys(map(int, words)))

    @property
    def precisions(self) -> tuple[str, ...]:
        """The names of ``precision``."""
        return tuple(_words(self.precision))


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",")] if text else []


@dataclass(frozen=True)
class RerankSettings:
    """Settings of an evaluation of a reranker: the candidates of each query."""

    candidates: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="The first stage: bm25 (default), a run file in TREC's form, or an encoder as for capt encode. "
            "(--rerank)",
        ),
    ] = None
    depth: Annotated[
        int | None, typer.Option(min=1, help="Candidates of a query that are scored; default 100. (--rerank)")
    ] = None


@dataclass(frozen=True)
class Rules:
    """Rules by which documents that were found become negatives."""

    number: Annotated[int, typer.Option(min=0, help="Negatives of a row; 0 = none, only --keep-top.")] = 7
    first: Annotated[int, typer.Option(min=0, help="Documents of a ranking to skip.")] = 0
    last: Annotated[int, typer.Option(min=1, help="Documents of a ranking to look at.")] = 100
    max_score: Annotated[float | None, typer.Option(help="Highest score of a negative.")] = None
    margin: Annotated[float | None, typer.Option(help="Least distance below the score of the positive.")] = None
    relative_margin: Annotated[float | None, typer.Option(help="The same as a share m: s_pos - |s_pos| m at most.")] = (
        None
    )
    choice: Annotated[str, typer.Option(help="top: the nearest that are left. random: drawn from them.")] = "top"
    keep_top: Annotated[
        int, typer.Option(min=0, help="Leave out rows whose positive is not among this number of nearest documents.")
    ] = 0
    short: Annotated[
        str, typer.Option(help="Rows with too few negatives: keep them with what they have, drop them, or refuse all.")
    ] = "keep"
    seed: Annotated[int, typer.Option(min=0, help="Seed of --choice random.")] = 1

    def check(self) -> None:
        """Raise ``ConfigError`` for a value that cannot be meant."""
        if self.choice not in ("top", "random"):
            raise ConfigError(f"--choice {self.choice}: choose top or random")
        if self.short not in ("refuse", "keep", "drop"):
            raise ConfigError(f"--short {self.short}: choose keep, drop or refuse")
        if not 0 <= self.first < self.last:
            raise ConfigError(f"--first {self.first} --last {self.last}: --last must be the larger one")
        if self.number > self.last - self.first:
            raise ConfigError(f"--number {self.number}: --first and --last leave {self.last - self.first} documents")
        if self.keep_top > self.last:
            raise ConfigError(f"--keep-top {self.keep_top}: more than --last {self.last}")
        if self.max_score is not None and self.max_score != self.max_score:
            raise ConfigError(f"--max-score {self.max_score}: a number is expected")
        for name, value in (("margin", self.margin), ("relative-margin", self.relative_margin)):
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"--{name} {value}: give a number of 0 or more")

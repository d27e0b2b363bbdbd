"""The section ``validate.retrieval``: BEIR folders that are searched during training. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from capt.pretrain.base.errors import DataError, repeated
from capt.pretrain.config.base import PathField, PositiveInt, Section

METRICS = ("ndcg@10", "mrr@10", "recall@1", "recall@10", "recall@100", "map@100")
"""The figures of a ranking (`capt.pretrain.retrieval.metrics`)."""


class RetrievalSection(Section):
    """Retrieval on BEIR folders at validations: exact search, the figures of ``capt evaluate --retrieval``.

    A validation encodes at most ``queries`` + ``documents`` texts of each folder, which the ranks share.
    """

    folders: list[PathField] = Field(
        [], max_length=64, description="BEIR folders (corpus.jsonl, queries.jsonl, qrels); [] = none"
    )
    split: str | None = Field(None, description="split of the qrels; null = the first of test, dev and train")
    every: PositiveInt | None = Field(
        None, description="steps between two, a multiple of validate.every; null = at each validation"
    )
    queries: PositiveInt = Field(1000, le=1_000_000, description="judged queries of a folder, at most")
    documents: PositiveInt = Field(
        10_000, le=10_000_000, description="documents of a folder, at most: those judged for the queries, and others"
    )

    @model_validator(mode="after")
    def _names_differ(self) -> RetrievalSection:
        if twice := repeated(folder.name for folder in self.folders):
            raise ValueError(f"validate.retrieval.folders: two folders are called {twice!r}; rename one of them")
        return self

    def metric_names(self) -> tuple[str, ...]:
        """Names of the reported metrics: the mean over the folders, and with several the figures of each."""
        several = [folder.name for folder in self.folders] if len(self.folders) > 1 else []
        each = [f"{metric}/{name}" for metric in METRICS for name in several]
        return (*METRICS, *each) if self.folders else ()

    def check_rhythm(self, every: int, best: str | None) -> None:
        """Raise ``ValueError`` where it does not fit a validation every ``every`` steps, or ``checkpoint.best``."""
        if self.every is None:
            return
        if not every or self.every % every:
            raise ValueError(
                f"validate.retrieval.every {self.every} is not a multiple of validate.every {every}; null = at each one"
            )
        if self.every != every and best in self.metric_names():
            raise ValueError(
                f"checkpoint.best {best} is needed at each validation; set validate.retrieval.every=null, or "
                f"validate.every={self.every}"
            )

    def describe(self) -> list[str]:
        """Say what the folders are. Raises ``DataError`` where one is not a BEIR folder."""
        return [f"retrieval: {folder}, {_bytes_of(folder):,} bytes" for folder in self.folders]


class PooledRetrieval(RetrievalSection):
    """Retrieval with vectors of an encoder that was not trained for it."""

    pooling: Literal["mean", "cls", "head"] = Field("mean", description="how a text's vector is made of its tokens")


def _bytes_of(folder: Path) -> int:
    for name in ("corpus.jsonl", "queries.jsonl"):
        if not any((folder / each).is_file() for each in (name, f"{name}.gz")):
            raise DataError(f"validate.retrieval.folders: {folder}: no {name}, which a BEIR folder has")
    if not any((folder / "qrels").glob("*.tsv")):
        raise DataError(f"validate.retrieval.folders: {folder}: no qrels/SPLIT.tsv, which a BEIR folder has")
    return sum(path.stat().st_size for path in folder.glob("*.jsonl*"))

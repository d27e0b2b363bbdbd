"""The configuration of the ``rerank`` job: a cross-encoder from queries and their candidates. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, field_validator, model_validator

from capt.finetune.config import FineTuningCheckpoint, TextData, TextJob, TextOptimizer
from capt.finetune.rerank.losses import LOSSES
from capt.finetune.text_task import Kind
from capt.pretrain.base.errors import ConfigError, counted, did_you_mean
from capt.pretrain.config.base import NonNegativeInt, PositiveInt, Section
from capt.pretrain.config.schema import BatchSection
from capt.pretrain.data.config import Patterns
from capt.pretrain.pairs.data_config import PairData, PairReading, PairSource
from capt.pretrain.pairs.selection import Selection

METRICS = ("ndcg@10", "mrr@10")
STORED = tuple(f"stored/{name}" for name in METRICS)
"""The same of the order that the scores in the rows give."""


@dataclass(frozen=True)
class RerankTask:
    """A score of a query and a document (`capt.finetune.text_task.TextTask`)."""

    title: str
    pair: bool = True
    kind: Kind = "regression"
    names: tuple[str, ...] = ()
    metrics: tuple[str, ...] = METRICS
    tags: tuple[str, ...] = ("text-ranking", "reranker")
    scale: float = 1.0
    offset: float = 0.0
    score_range: None = None


class CandidateSource(PairSource):
    """Queries with candidates: a score of both is a grade or a teacher's, and the loss says if negatives are needed."""

    needs_negatives: ClassVar[bool] = False

    @property
    def selection(self) -> Selection:
        """The rows that are read, whatever their scores."""
        return replace(super().selection, scores=None)


class RerankData(TextData, PairReading):
    """Queries with their candidates: pairs with hard negatives, or pairs with grades."""

    train: Patterns = Field(min_length=1, description="paths or globs of files of pairs with hard negatives or grades")
    validation: Patterns = Field([], description="held-out ones; without them a fraction of the queries")
    validation_fraction: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = Field(
        "auto", description="share of the queries to hold out; 0 = none; auto = 2%, of few rows the share of 200, a "
        "tenth at most"
    )  # fmt: skip
    negatives: PositiveInt = Field(
        7, le=2**20, description="negatives of a query in a step, drawn anew at each visit; a query with fewer has all"
    )
    positives: PositiveInt = Field(
        1, le=2**20, description="positives of a query in a step, its next ones at each visit"
    )
    ranks: tuple[NonNegativeInt, PositiveInt | None] = Field(
        (0, None), description="draw negatives from these ranks of a row's list alone: [FIRST, END], from 0, END not "
        "in it; null = the last"
    )  # fmt: skip
    positive_above: float = Field(0.0, description="of pairs with grades: those above it are positives")

    @field_validator("ranks")
    @classmethod
    def _is_a_range(cls, value: tuple[int, int | None]) -> tuple[int, int | None]:
        if value[1] is not None and value[0] >= value[1]:
            raise ValueError(f"data.ranks {list(value)}: the first rank must be below the end")
        return value

    @property
    def text_task(self) -> RerankTask:
        """Meaning of the output: the score of a document for a query."""
        return RerankTask(f"the candidates of {', '.join(Path(name).name for name in self.train[:3])}")

    def source(self, key: Literal["train", "validation"], length: int) -> PairSource:
        """The files of a key as a source of pairs, whose texts are cut to ``length`` tokens."""
        reading = {name: getattr(self, name) for name in PairReading.model_fields}
        files = getattr(self, key)
        lengths = {"query_length": length, "document_length": length}
        return CandidateSource(**{**reading, "negatives": 1}, name=key, files=files, **lengths).completed(PairData())


class RerankLoss(Section):
    """The loss of a query's candidates; its mean over the queries of a step, on all ranks, is trained on."""

    type: str = Field("infonce", description="; ".join(f"{name}: {loss.about}" for name, loss in LOSSES.items()))
    temperature: PositiveFloat = Field(1.0, description="divides the scores under a softmax (infonce, kl)")

    @field_validator("type")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in LOSSES:
            raise ValueError(f"loss.type: unknown loss {value!r}; {did_you_mean(value, list(LOSSES))}")
        return value

    @model_validator(mode="after")
    def _has_a_softmax(self) -> RerankLoss:
        if self.temperature != 1 and not LOSSES[self.type].scaled:
            raise ValueError(f"loss.temperature belongs to a softmax, and loss.type {self.type} has none: leave it out")
        return self


class RerankBatch(BatchSection):
    """Queries of an optimizer step (``global``), and what a forward pass on one rank takes of them."""

    micro: PositiveInt | None = Field(
        None, le=65_536, description="most queries of a forward pass on one rank; null = by batch.micro_tokens alone"
    )
    micro_tokens: PositiveInt = Field(
        16_384, le=2**31 - 1, description="most tokens of pairs in a forward pass on one rank, padding counted, but a "
        "pair at least; the candidates of a query that are more go by two passes, scores first, then gradients"
    )  # fmt: skip


class RerankOptimizer(TextOptimizer):
    """Adam as rerankers are trained."""

    lr: PositiveFloat = Field(2e-5, description="peak learning rate")


class RerankCheckpoint(FineTuningCheckpoint):
    """The newest checkpoint is kept beside the best one."""

    best: str | None = Field(
        "ndcg@10", description="validation metric whose best checkpoint is kept, linked as checkpoints/best"
    )


class RerankJob(TextJob):
    """A ``rerank`` job: a pretrained encoder trained to order the candidates of a query."""

    shares_unevenly: ClassVar[bool] = True

    data: RerankData
    loss: RerankLoss = RerankLoss()
    batch: RerankBatch = RerankBatch(global_=32)
    optimizer: RerankOptimizer = RerankOptimizer()
    checkpoint: RerankCheckpoint = RerankCheckpoint()

    @model_validator(mode="after")
    def _has_one_size(self) -> RerankJob:
        if self.batch.ramp:
            raise ValueError("batch.ramp: a step of a rerank job has the same number of queries always; leave it out")
        return self

    def metric_names(self) -> frozenset[str]:
        """The metrics of validation."""
        return frozenset({*METRICS, *STORED, "loss"})

    def describe_data(self) -> str:
        """Describe the files; no row is read."""
        from capt.pretrain.pairs.forms import check_form

        try:
            check_form(self.data.form, self.data.corpus)
        except ConfigError as error:
            raise ConfigError(f"data: {error}") from None
        described = []
        for key in ("train", "validation"):
            if getattr(self.data, key):
                files = self.data.source(key, 8).paths()
                size = sum(file.stat().st_size for file in files if file.is_file())
                described.append(f"{key}: {counted(len(files), 'file')}, {size:,} bytes")
        return "; ".join(described)


JOB = RerankJob

"""The configuration of the ``ace`` job: word embeddings against fixed or adaptive noise. Imports no torch.

A preset of ``configs/pretrain/ace`` makes each method: plain skip-gram, self-adversarial weights, ACE, NCE with ACE.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from pretrain.base.cache import default_cache
from pretrain.base.errors import DataError
from pretrain.config.base import NonNegativeInt, PathField, PositiveInt, Section
from pretrain.config.schema import (
    BatchSection,
    CheckpointSection,
    EngineSection,
    Job,
    OptimizerSection,
    ScheduleSection,
    ValidateSection,
)
from pretrain.data.config import MISSING, Patterns
from pretrain.data.files import resolve_paths
from pretrain.embeddings.sections import (
    GeneratorSection,
    ModelSection,
    NegativesSection,
    ObjectiveSection,
    check_parts,
)


class DataSection(Section):
    """Text with one sentence a line."""

    files: Patterns = Field(
        default=..., min_length=1, description="paths or globs of .txt, .jsonl, .json, .tokens, .raw (or .gz), .parquet"
    )
    text_column: str = Field("text", description="key or column with the text of a jsonl, json or parquet row")
    missing: Literal["skip", "refuse"] = Field("skip", description=MISSING)
    lowercase: bool = Field(True, description="words are read in lower case")
    split: Literal["blanks", "punctuation"] = Field(
        "blanks",
        description="blanks: words are split at blanks alone; punctuation: marks at both ends of a word are words, too",
    )
    min_count: PositiveInt = Field(5, description="rarer words are left out, as if they were not there")
    max_vocabulary: PositiveInt | None = Field(
        None, le=2**31 - 2, description="the largest number of words, the most frequent; null = all"
    )
    window: PositiveInt = Field(
        5, le=100, description="a word's contexts reach 1 to window words to each side, as drawn for each centre"
    )
    subsample: NonNegativeFloat = Field(
        1e-4, description="words more frequent than this share of the text are thinned out, as in word2vec; 0 = off"
    )
    workers: PositiveInt | None = Field(
        None, le=1024, description="processes that count and encode words; without it one per usable core"
    )
    cache: PathField = Field(default_factory=default_cache, description="where encoded text is kept")
    allow_change: bool = Field(False, description="a resumed run may continue with other text than it began with")


class EmbeddingSchedule(ScheduleSection):
    """A schedule in epochs, which become steps once the text is known; word2vec's learning rate."""

    max_steps: PositiveInt = Field(1_000_000_000, description="optimizer steps; with epochs an upper bound")
    epochs: PositiveFloat | None = Field(5.0, description="passes over the text; null = max_steps alone")
    final: NonNegativeFloat = Field(
        0.004, le=1, description="share of the peak learning rate that is left at the end (0.025 becomes 1e-4)"
    )


class EmbeddingOptimizer(OptimizerSection):
    """The discriminator's: word2vec's SGD; adagrad and sparse_adam take the step through autograd."""

    type: Literal["sgd", "adagrad", "sparse_adam"] = Field("sgd", description="all of them update only rows in use")
    lr: PositiveFloat = Field(0.025, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of sparse_adam's two moments")
    momentum: NonNegativeFloat = Field(0.0, le=0, description="momentum would touch every row")
    eps: PositiveFloat = Field(1e-8, ge=1e-37, description="added to the root of the squared gradients")
    weight_decay: NonNegativeFloat = Field(0.0, le=0, description="decay would touch every row")


class EmbeddingEngine(EngineSection):
    """Tables are sharded by rows over the ranks; ZeRO is not used."""

    zero_stage: Literal[0] = Field(0, description="the tables are sharded by rows, without ZeRO")
    precision: Literal["fp32"] = Field("fp32", description="precision of the step")


class EmbeddingBatch(BatchSection):
    """Words of the text in an update (``global``); each rank takes its part in one pass, so ``micro`` is null."""

    global_: PositiveInt = Field(
        4096,
        le=2**31 - 1,
        alias="global",
        description="words of the text in an update over all ranks, a multiple of 512",
    )
    micro: None = Field(None, description="null: a rank takes batch.global / ranks words in one pass")


class EmbeddingValidate(ValidateSection):
    """Validation: only at the end, unless asked for."""

    every: NonNegativeInt = Field(0, description="steps between two validations; 0 = only at the end")


class EmbeddingCheckpoint(CheckpointSection):
    """Checkpoints, of which each is as large as the tables."""

    every: NonNegativeInt = Field(10_000, description="steps between two checkpoints; 0 = only at the end")


SEGMENT = 512
"""Words of the text that are drawn as one: a batch is made of segments from all over the text."""


class EmbeddingJob(Job):
    """The configuration of a job that learns word embeddings."""

    pretrains: ClassVar[bool] = True

    data: DataSection
    model: ModelSection = ModelSection()
    negatives: NegativesSection = NegativesSection()
    objective: ObjectiveSection = ObjectiveSection()
    generator: GeneratorSection = GeneratorSection()
    batch: EmbeddingBatch = EmbeddingBatch()
    schedule: EmbeddingSchedule = EmbeddingSchedule()
    optimizer: EmbeddingOptimizer = EmbeddingOptimizer()
    engine: EmbeddingEngine = EmbeddingEngine()
    validate_: EmbeddingValidate = Field(EmbeddingValidate(), alias="validate")
    checkpoint: EmbeddingCheckpoint = EmbeddingCheckpoint()

    @property
    def has_generator(self) -> bool:
        """Whether a generator draws negatives and is trained."""
        return self.negatives.sampler != "noise"

    @property
    def is_plain(self) -> bool:
        """Whether the job is skip-gram with fixed noise and SGD, whose step needs no autograd."""
        return (
            self.negatives.sampler == "noise"
            and self.negatives.weights == "uniform"
            and self.objective.type == "sgns"
            and self.optimizer.type == "sgd"
            and not self.optimizer.clip
            and not self.model.freeze_input
        )

    @model_validator(mode="after")
    def _parts_fit(self) -> EmbeddingJob:
        check_parts(self.negatives, self.objective)
        if self.batch.global_ % SEGMENT:
            raise ValueError(f"batch.global {self.batch.global_} is not a multiple of {SEGMENT} words")
        return self

    def metric_names(self) -> frozenset[str]:
        """Nothing: word vectors are measured by `capt evaluate`."""
        return frozenset()

    def check_inputs(self) -> list[str]:
        """Describe the files of the text."""
        paths = resolve_paths(self.data.files, "data.files")
        size = sum(path.stat().st_size for path in paths)
        lines = [f"corpus: {paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}, {size:,} bytes"]
        if self.model.init is not None:
            if not self.model.init.exists():
                raise DataError(
                    f"model.init: there is no {self.model.init}; give a run, a checkpoint or a file of vectors"
                )
            lines.append(f"model.init: {self.model.init}")
        return lines

    def completed(self, segments: int) -> EmbeddingJob:
        """The job with its epochs turned into steps, once the number of segments of an epoch is known."""
        schedule = self.schedule
        steps = schedule.max_steps
        if schedule.epochs is not None:
            steps = min(steps, math.ceil(schedule.epochs * segments / (self.batch.global_ // SEGMENT)))
        return self.model_copy(update={"schedule": schedule.model_copy(update={"max_steps": steps})})


JOB = EmbeddingJob

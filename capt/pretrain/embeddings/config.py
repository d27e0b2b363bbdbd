"""The configuration of the ``ace`` job: word embeddings against fixed or adaptive noise. Imports no torch.

A preset of ``capt/configs/pretrain/ace`` makes each method: plain skip-gram, self-adversarial weights, ACE, NCE with
ACE.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from capt.pretrain.base.cache import default_cache
from capt.pretrain.base.errors import DataError
from capt.pretrain.config.base import NonNegativeInt, PathField, PositiveInt, Section
from capt.pretrain.config.schema import (
    BatchSection,
    CheckpointSection,
    EngineSection,
    Job,
    OptimizerSection,
    ScheduleSection,
    ValidateSection,
)
from capt.pretrain.data.config import MISSING, Patterns
from capt.pretrain.data.paths import resolve_paths

# The sections of the ``ace`` job that say where negatives come from and what is learned from them. Imports no torch.
#
# Defaults are those of word2vec where it has the same thing, else those of ``docs/decisions.md``.


class NegativesSection(Section):
    """Source of the negatives of a pair. ``mixture`` is lambda of the paper's section 2.2."""

    removed: ClassVar = {"power": 0.75}

    number: PositiveInt = Field(5, le=65_536, description="negatives of each pair of words, in expectation")
    sampler: Literal["noise", "generator", "mixture"] = Field(
        "noise", description="noise: unigram^0.75; generator: the learned softmax; mixture: both"
    )
    mixture: float = Field(
        0.5, ge=0.0, le=1.0, description="sampler mixture: share of the negatives that the noise draws"
    )
    weights: Literal["uniform", "self_adversarial"] = Field(
        "uniform", description="self_adversarial: softmax of alpha times the discriminator's own scores"
    )
    alpha: PositiveFloat = Field(1.0, description="inverse temperature of the self-adversarial weights")
    block: PositiveInt = Field(
        32, le=4096, description="consecutive centre words that share their noise (the plain skip-gram step)"
    )
    shared: PositiveInt = Field(
        64, le=65_536, description="noise words that a block shares; their weight makes `number` of each pair"
    )


class ObjectiveSection(Section):
    """Objective that is learned from a pair and its negatives."""

    type: Literal["sgns", "nce", "margin"] = Field(
        "sgns", description="sgns: sigmoid(s); nce: sigmoid(s - log k q(w)) with the known density q; margin: ranking"
    )
    margin: PositiveFloat = Field(1.0, description="margin: how far a positive must score above a negative")


class GeneratorSection(Section):
    """The generator: two tables of its own, a softmax over the vocabulary, trained with REINFORCE."""

    removed: ClassVar = {"normalise": True, "entropy_words": 100, "importance_clip": 10.0, "collapse": 0.05}

    type: Literal["adagrad", "sparse_adam", "sgd"] = Field("sparse_adam", description="optimizer of the generator")
    lr: PositiveFloat = Field(1e-2, description="learning rate of the generator")
    every: PositiveInt = Field(16, description="updates of the discriminator for one of the generator")
    samples: int = Field(
        5, ge=2, le=65_536, description="words drawn for each centre; their weight makes `number` of each pair"
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="of the products over the vocabulary; bf16 draws from the softmax of rounded scores"
    )
    reward: Literal["d", "softplus"] = Field(
        "d", description="d: D(x, y), the discriminator's sigmoid; softplus: -log(1 - D(x, y))"
    )
    temperature: PositiveFloat = Field(
        0.5, description="the reward is the sigmoid of (r - mean) / deviation over the batch, divided by this"
    )
    baseline: Literal["none", "constant", "batch_mean", "self_critical"] = Field(
        "none",
        description="what is taken from the reward (it matters with masks or importance alone); constant: 0.5; "
        "self_critical: the reward of the argmax",
    )
    entropy: NonNegativeFloat = Field(
        0.0, description="weight of max(0, log 100 - H(G(.|x))), which keeps G from collapsing; 0 = none"
    )
    importance: bool = Field(False, description="also learn from the noise's negatives, weighted by G / noise")
    mask_false_negatives: bool = Field(
        False, description="negatives that are words of the centre's own window count for nothing"
    )


def check_parts(negatives: NegativesSection, objective: ObjectiveSection) -> None:
    """Raise ``ValueError`` where sampler, weights and objective exclude each other."""
    if objective.type == "nce" and negatives.weights == "self_adversarial":
        raise ValueError(
            "objective.type nce needs the density that the negatives are drawn from, and negatives.weights "
            "self_adversarial changes it: set negatives.weights=uniform"
        )


class ModelSection(Section):
    """Two tables of word vectors: ``input`` for centre words, whose rows are the embeddings, and ``context``."""

    dim: PositiveInt = Field(300, le=65_536, description="width of the word vectors")
    init: PathField | None = Field(
        None, description="start from these vectors: a run, a checkpoint, or a file of word2vec or GloVe"
    )
    context_init: Literal["zeros", "copy", "random"] = Field(
        "zeros", description="init without a context table (GloVe's files): zeros, the input vectors, or random"
    )
    other_words: Literal["keep", "drop"] = Field(
        "keep", description="init: words that the text lacks keep their vectors, untrained, or are dropped"
    )
    freeze_input: NonNegativeInt = Field(0, description="init: the input table stays as it is for this number of steps")

    @model_validator(mode="after")
    def _frozen_only_when_given(self) -> ModelSection:
        if self.freeze_input and self.init is None:
            raise ValueError("model.freeze_input keeps vectors that model.init gives: set model.init")
        return self


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
        """True if a generator draws negatives and is trained."""
        return self.negatives.sampler != "noise"

    @property
    def is_plain(self) -> bool:
        """True if the job is skip-gram with fixed noise and SGD, whose step needs no autograd."""
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
        """Nothing that could choose a checkpoint: word vectors are measured by `capt evaluate`."""
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

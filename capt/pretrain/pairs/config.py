"""The configuration of the ``capt_pairs`` job: an embedding model from pairs of texts, on any encoder. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_serializer, model_validator

from capt.pretrain.base.cache import default_cache
from capt.pretrain.base.errors import ConfigError, DataError, counted, repeated
from capt.pretrain.config.base import NonNegativeInt, PathField, PositiveInt, Section, StorePlace
from capt.pretrain.config.contrast import ContrastSection, TemperatureSection, check_validation_samples
from capt.pretrain.config.lora import LoraSection
from capt.pretrain.config.retrieval import RetrievalSection
from capt.pretrain.config.schema import (
    BatchSection,
    Job,
    LoaderSection,
    OptimizerSection,
    ScheduleSection,
    ValidateSection,
)
from capt.pretrain.data.config import CorruptionConfig, Patterns
from capt.pretrain.data.row_filter import RowFilter
from capt.pretrain.data.views import ABOUT, Spans, find_view
from capt.pretrain.engine.judgement import error_of
from capt.pretrain.models.hf_config import FolderOrId, hub_id
from capt.pretrain.pairs.losses import LOSSES, NO_LOSS, check_source, find_loss
from capt.pretrain.pairs.representations import REPRESENTATIONS, check_representation, find_representation
from capt.pretrain.pairs.selection import Selection

RECALLS = ("recall/to_document", "recall/to_query")
RETRIEVAL = (*RECALLS, "mrr/to_document", "mrr/to_query")
"""Metrics of retrieval in validation, also at each width of ``contrast.matryoshka``."""
METRICS = ("loss/pairs", *RETRIEVAL, *map(error_of, RECALLS), "validation_samples")
"""Metrics of validation beside the figures of scored pairs (`PairLoss.figures`)."""
SPREAD = ("alignment", "uniformity", "first_direction")
"""Metrics of vectors beside them."""


TAUGHT = ("teacher/cosine", "teacher/cosine_p5", "teacher/reached")
"""Metrics of what a teacher's vectors train: the cosine to them, in the mean and its 5th percentile, and the share that
is reached of the teacher's own figure of retrieval."""


def of_teacher(metric: str) -> str:
    """The name of the teacher's own figure beside ``metric``."""
    return f"teacher/{metric}"


def at_width(metric: str, width: int) -> str:
    """The name of a metric of vectors that are cut to ``width`` columns."""
    return f"{metric}/{width}"


Pooling = Literal["mean", "cls", "last"]

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]


class Prompts(Section):
    """Text before each query and before each document, in training, validation and the export."""

    query: str = Field("", description="text before a query, such as 'search_query: '")
    document: str = Field("", description="text before a document, such as 'search_document: '")


class PairReading(Section):
    """Settings for reading pairs, and for drawing their hard negatives."""

    form: str = Field("auto", description="form of the rows; auto recognises it")
    corpus: PathField | None = Field(None, description="texts of the ids that the files name")
    columns: dict[str, str] = Field({}, description="role of a column -> its name in the files")
    split: Name = Field(
        "train",
        description="split of a data set of the hub, of the qrels of a BEIR folder, or of the tables of candidates",
    )
    where: str | None = Field(
        None,
        description="condition on the columns of a row, such as 'drop == false and duplicate is null'; the other rows "
        "are left out; null = none is",
    )
    negatives: NonNegativeInt = Field(
        0, le=1024, description="hard negatives of a query in a step, drawn anew at each visit; 0 = none"
    )
    draw: Literal["turns", "random"] = Field(
        "turns",
        description="hard negatives of a visit: turns = the row's next ones, in their order; random = any of them",
    )
    negatives_below: PositiveFloat | None = Field(
        None, le=1, description="keep a hard negative if its teacher's score is below this share of the positive's; "
        "null = all"
    )  # fmt: skip
    stored_negatives: PositiveInt | None = Field(
        None, le=2**20, description="hard negatives that are kept of a row, the first ones; a row with fewer is left "
        "out; null = all, whatever their number"
    )  # fmt: skip

    @field_validator("where")
    @classmethod
    def _is_a_condition(cls, value: str | None) -> str | None:
        if value is not None:
            RowFilter(value)
        return value

    @property
    def selection(self) -> Selection:
        """The rows, and the hard negatives of a row, that are read."""
        return Selection(self.where, self.negatives_below, self.stored_negatives)


class PairOptions(PairReading):
    """Settings for reading pairs and training on them: in ``data`` for all sources, in ``data.sources`` for one."""

    prompts: Prompts = Prompts()
    query_length: PositiveInt | None = Field(
        None, ge=8, le=2**20, description="tokens of a query, prompt not counted; null = data.sequence_length"
    )
    own_length: PositiveInt | None = Field(
        None, description="the encoder's own length, where data.sequence_length asks for it; filled in by the job"
    )
    loss: str = Field(
        "auto",
        description="; ".join(f"{name}: {loss.about}" for name, loss in LOSSES.items())
        + "; auto: by the form of the rows",
    )
    loss_options: dict[str, Any] = Field({}, description="settings of a loss of another package, as it defines them")
    view: str = Field("dropout", description=f"both views of a text in rows of one text alone; {ABOUT}")
    spans: Spans = Spans()

    @field_validator("view")
    @classmethod
    def _is_a_view(cls, value: str) -> str:
        find_view(value)
        return value

    @field_validator("loss")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value != "auto":
            find_loss(value)
        return value


class PairSource(PairOptions):
    """A source of pairs. What is not set, or null, is as ``data`` says."""

    name: Name = Field(description="name in the log, in errors and in the metrics")
    files: Patterns = Field(description="paths or globs of files with pairs")
    weight: NonNegativeFloat = Field(1.0, description="share of the global batches, relative to the other sources")
    document_length: PositiveInt | None = Field(
        None, ge=8, le=2**20, description="tokens of a document, prompt not counted; null = data.sequence_length"
    )
    in_batch: bool = Field(True, description="false: a query is compared with its own hard negatives alone")
    temperature: PositiveFloat | None = Field(None, description="temperature; null = contrast.temperature")

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, values: Any) -> Any:
        return (
            {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values
        )

    @model_serializer(mode="wrap")
    def _without_unset(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        # A default that is written out would no longer be as `data` says.
        unset = PairOptions.model_fields.keys() - self.model_fields_set
        return {key: value for key, value in write(self).items() if key not in unset}

    def completed(self, data: PairData) -> PairSource:
        """The source with all that ``data`` says filled in, lengths if it says any."""
        unset = PairOptions.model_fields.keys() - self.model_fields_set
        asked = None if data.sequence_length == "encoder" else data.sequence_length
        lengths = {
            "query_length": self.query_length or data.query_length or asked,
            "document_length": self.document_length or asked,
            "own_length": data.own_length if data.sequence_length == "encoder" else None,
        }
        return self.model_copy(update={**{name: getattr(data, name) for name in unset}, **lengths})

    def paths(self) -> list[Path]:
        """The files and folders that are named. Raises ``DataError`` where one is not there."""
        return _paths(self.files, f"source {self.name}")


class PairData(PairOptions):
    """Pairs of texts: one source in ``files``, or several in ``sources``."""

    files: Patterns = Field([], description="paths or globs of files with pairs; for several sources set data.sources")
    sources: list[PairSource] = Field(
        [], description="sources of pairs; each global batch comes from one of them, in proportion to its weight"
    )
    temperature: float | None = Field(
        None, ge=0.0, le=1.0, description="exponent of the sizes of data.sources: the weight of each is times its "
        "number of rows to this power (1 = in proportion to the rows); null = 0, weights alone"
    )  # fmt: skip
    validation_files: Patterns = Field([], description="held-out pairs; without them a fraction of the pairs")
    validation_fraction: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = Field(
        "auto",
        description="share of the queries of each source to hold out, with all their pairs; 0 = none; auto = 2%, of "
        "few pairs the share of 200, a tenth at most",
    )
    sequence_length: Literal["encoder"] | Annotated[PositiveInt, Field(ge=8, le=2**20)] | None = Field(
        "encoder",
        description="tokens of a document, prompt not counted; encoder = what the encoder reads: as its "
        "sentence-transformers folder or run says, else its positions, 512 at most; null = 128, or what its positions "
        "leave",
    )
    bucketing: bool = Field(
        True,
        description="micro-batches of texts of similar length within a step (contrast.cached); the loss is the same",
    )
    batches: Literal["single", "mixed"] = Field(
        "single",
        description="single: each global batch is of one source; mixed: each has rows of all, by their weights",
    )
    cache: PathField = Field(default_factory=default_cache, description="where the tokens of pairs are kept")
    allow_change: bool = Field(False, description="a resumed run may continue with other pairs than it began with")

    @model_validator(mode="after")
    def _names_pairs(self) -> PairData:
        if self.files and self.sources:
            raise ValueError("data.files and data.sources are both set: name every source in data.sources")
        if twice := repeated(source.name for source in self.sources):
            raise ValueError(f"data.sources: {twice} is the name of several sources")
        drawn = [find_view(each.view if "view" in each.model_fields_set else self.view).draw for each in self.sources]
        drawn = drawn or [find_view(self.view).draw]
        if self.spans.gap and not self.sources and self.view == "crop":
            raise ValueError(f"data.spans.gap {self.spans.gap} is of neighbouring spans: set data.view to neighbour")
        if not any(drawn) and any(each.spans != Spans() for each in (self, *self.sources)):
            raise ValueError(f"data.spans is of spans, and data.view is {self.view}: set it to crop or neighbour")
        if self.sources and not sum(source.weight for source in self.sources):
            raise ValueError("data.sources: all weights are 0; give at least one source a weight above 0")
        return self

    def held_out_paths(self) -> list[Path]:
        """The files of ``validation_files``. Raises ``DataError`` where one is missing, or is trained on."""
        held_out = _paths(self.validation_files, "data.validation_files")
        trained_on = {path.resolve() for source in self.each() for path in source.paths()}
        if both := [path for path in held_out if path.resolve() in trained_on]:
            raise DataError(f"data.validation_files: {both[0]} is trained on too; name other pairs")
        return held_out

    def each(self) -> Iterator[PairSource]:
        """Yield every source whose weight is above 0, `PairSource.completed`.

        Raises:
            ConfigError: no pairs are named, or a source has nothing to compare a query with or not what its loss needs.
        """
        if not self.sources and not self.files:
            raise ConfigError("data names no pairs: set data.files (paths or globs), or data.sources")
        # A source of weight 0 is switched off, and may be incomplete.
        for each in self.sources or [PairSource(name="pairs", files=self.files)]:
            source = each.completed(self)
            if not source.weight:
                continue
            check_source(source.name, source.loss, source.loss_options, source.negatives)
            if not source.in_batch and not source.negatives:
                raise ConfigError(
                    f"source {source.name}: in_batch false leaves no negatives; set its negatives above 0"
                )
            yield source


def _paths(patterns: Sequence[str], key: str) -> list[Path]:
    """The files of paths and globs, and folders and data sets of the hub as they are."""
    from capt.pretrain.data.paths import resolve_paths

    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        whole = path.is_dir() or hub_id(path) is not None
        found += [path] if whole else resolve_paths([pattern], key, any_suffix=True)
    names: dict[Path, Path] = {}  # file -> its first name; a link, and ./a beside a, are the same file
    for path in found:
        if path.resolve() in names:
            raise DataError(f"{key}: {path} is named twice, or by a link as well ({names[path.resolve()]})")
        names[path.resolve()] = path
    return found


class PairModel(Section):
    """The encoder, which queries and documents share, and how a text's representation is made of its output."""

    init: FolderOrId = Field(
        description="a run or checkpoint of ours, a Hugging Face folder, or USER/NAME[@REV] of the hub"
    )
    pooling: Literal["auto", "mean", "cls", "last"] = Field(
        "auto", description="mean over tokens, first or last token; auto: as model.init was trained, else mean"
    )
    projection: PositiveInt | None = Field(
        None, le=65_536, description="columns of a linear map after the pooling; null = none"
    )
    representation: str = Field(
        "dense",
        description="what a text becomes: "
        + "; ".join(f"{name}: {row.about}" for name, row in REPRESENTATIONS.items())
        + "; or one of another package",
    )
    representation_options: dict[str, Any] = Field(
        {}, description="settings of a representation of another package, as it defines them"
    )
    dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of embeddings and layer outputs")
    attention_dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of the attention weights")
    random: bool = Field(False, description="random weights of the sizes of init, whose tokenizer is taken alone")
    allow_missing: bool = Field(False, description="continue where weights of the encoder are missing or unknown")
    lora: LoraSection | None = Field(
        None, description="train low-rank adapters of the encoder, and what is on it, with its own weights frozen; "
        "null = train all weights"
    )  # fmt: skip
    encoder: dict[str, Any] | None = Field(
        None, description="the encoder as config.json describes it; filled in by the job"
    )


class PairMasked(Section):
    """The masked-language-model loss beside the contrast, on corruptions of queries and documents."""

    weight: NonNegativeFloat = Field(
        0.0, description="factor of the loss in the total (0.1 in SimCSE); 0 = none, and no head"
    )


class PairDistillation(Section):
    """Scores by a teacher of a row's own documents (``pos_scores`` and ``neg_scores``), and its vectors of texts."""

    weight: NonNegativeFloat = Field(
        0.0, description="factor of the divergence from a teacher's scores; 0 = scores are not read"
    )
    temperature: PositiveFloat = Field(1.0, description="temperature by which the teacher's scores are divided")
    vectors: StorePlace | None = Field(
        None,
        description="a teacher's vectors of all texts: what capt encode has written (the folder or address of the "
        "store, or of one kind of vectors in it), a table with a text and its vector, or a .npy file; null = none",
    )
    query_vectors: StorePlace | None = Field(
        None, description="those of queries, where a prompt or a path of their own makes others; null = vectors"
    )
    vector_column: str | None = Field(
        None, description="column of a table that holds the vectors; null = vector, embedding or label"
    )
    ids: PathField | None = Field(
        None,
        description="a .npy file: a table whose row i has the text of vector i, or its id, where corpus has the texts",
    )
    corpus: PathField | None = Field(None, description="texts of the ids, as for data.corpus")
    cosine: NonNegativeFloat = Field(
        0.0, description="factor of 1 - cosine of a text's vector and the teacher's, in the mean over all texts"
    )
    mse: NonNegativeFloat = Field(0.0, description="factor of their mean squared difference")
    listwise: NonNegativeFloat = Field(
        0.0, description="factor of the divergence of a text's softmax over the cosines with the step's other texts"
    )
    listwise_temperature: PositiveFloat = Field(0.02, description="temperature of both softmaxes of listwise")
    projection: Literal["drop", "beside", "export"] = Field(
        "drop",
        description="a linear map to a teacher of another width: drop = trained, and left out of the export; beside = "
        "in a file beside it; export = part of the model, whose vectors are then of the teacher's space",
    )
    teacher: dict[str, Any] | None = Field(
        None, description="what the vectors say of the teacher; filled in by the job"
    )

    @model_validator(mode="after")
    def _names_vectors(self) -> PairDistillation:
        weights = {name: getattr(self, name) for name in VECTOR_LOSSES}
        if self.vectors is None and (used := next((name for name, weight in weights.items() if weight), None)):
            raise ValueError(f"distillation.{used} is of a teacher's vectors: set distillation.vectors")
        if self.vectors is not None and not any(weights.values()):
            raise ValueError(
                "distillation.vectors is read for a loss: set distillation.cosine, distillation.mse or "
                "distillation.listwise above 0"
            )
        return self

    def projected_width(self, width: int) -> int | None:
        """The width of the map from vectors of ``width`` to the teacher's that no export has; None without one."""
        pointwise = self.cosine or self.mse
        if self.teacher is None or not pointwise or self.teacher["dimension"] == width:
            return None
        return int(self.teacher["dimension"])


VECTOR_LOSSES = ("cosine", "mse", "listwise")
"""The losses of a teacher's vectors: keys of ``distillation`` with their factors."""


class PairSchedule(ScheduleSection):
    """``epochs`` are turned into steps once the pairs are read, unless ``max_steps`` alone is given."""

    max_steps: PositiveInt = Field(1_000_000_000, description="optimizer steps; with epochs an upper bound")
    epochs: Literal["auto"] | PositiveFloat | None = Field(
        "auto",
        description="passes over the pairs of all sources; auto = those that come to 256,000 pairs, 1 at least and 10 "
        "at most; null = max_steps alone, as where max_steps is given and epochs is not",
    )
    warmup_ratio: NonNegativeFloat | None = Field(
        0.1, le=1, description="with epochs: warmup as a share of the steps; null = warmup_steps"
    )

    @model_validator(mode="before")
    @classmethod
    def _steps_are_meant(cls, values: Any) -> Any:
        # A run of a release without epochs has steps alone, and is resumed with them.
        if isinstance(values, dict) and "max_steps" in values and "epochs" not in values:
            return {**values, "epochs": None}
        return values

    def in_steps(self, rows: int, batch: int) -> PairSchedule:
        """The schedule with steps in place of epochs, for ``rows`` pairs in batches of ``batch``."""
        if self.epochs is None:
            return self
        epochs = min(_MOST_EPOCHS, max(1.0, _PAIRS_ENOUGH / rows)) if self.epochs == "auto" else self.epochs
        steps = min(self.max_steps, math.ceil(epochs * rows / batch))
        warmup = self.warmup_steps if self.warmup_ratio is None else int(self.warmup_ratio * steps)
        if warmup > steps:
            raise ConfigError(
                f"schedule.warmup_steps {warmup} is longer than the {steps} steps of {epochs:g} epochs of {rows:,} "
                "pairs; lower it, or set schedule.warmup_ratio"
            )
        return self.with_steps(steps, warmup)


_PAIRS_ENOUGH, _MOST_EPOCHS = 256_000, 10.0
"""Pairs of 1,000 steps of 256, and passes after which few pairs are learnt by heart."""


class PairTemperature(TemperatureSection):
    """tau over training; ``constant`` at .05 unless set."""

    type: Literal["inverted_triangle", "constant", "linear", "learned"] = Field(
        "constant", description="how tau changes over training"
    )
    value: PositiveFloat = Field(0.05, description="constant: tau; learned: its first value")


class PairContrast(ContrastSection):
    """The contrast of queries and documents."""

    queue: NonNegativeInt = Field(0, le=2**31 - 1, description="documents kept as negatives, over all ranks; 0 = none")
    directions: Literal["infonce", "symmetric", "gte", "qwen3"] = Field(
        "infonce",
        description="cosines in the loss: infonce = query to documents; symmetric = also document to queries, one "
        "softmax each; gte and qwen3 = also queries and documents among themselves, in one softmax",
    )
    mask_duplicates: bool = Field(
        True, description="what a row of any source gives to a query, and copies of it, are not negatives of the query"
    )
    hard_negatives: Literal["all", "own"] | None = Field(
        None, description="a query sees the hard negatives of all queries, or its own; null = as directions has it"
    )
    hardness_own: NonNegativeFloat = Field(
        0.0,
        le=1000,
        description="this factor times the cosine is added to the logit of a query's own hard negatives, without "
        "gradient (5 in EmbeddingGemma)",
    )
    precisions: tuple[Literal["float", "int8", "binary"], ...] = Field(
        (),
        description="the loss is the sum over these precisions of the vectors (float, int8, binary), which learn to be "
        "quantized; with matryoshka at each width; [] = float alone",
    )
    precision_weights: tuple[NonNegativeFloat, ...] = Field(
        (), description="a factor of each of precisions; [] = 1 each"
    )
    temperature: PairTemperature = PairTemperature()

    @model_validator(mode="after")
    def _precisions_fit(self) -> PairContrast:
        if len(set(self.precisions)) < len(self.precisions):
            raise ValueError(f"contrast.precisions names one twice: {', '.join(self.precisions)}")
        if self.precision_weights and len(self.precision_weights) != len(self.precisions):
            raise ValueError(
                f"contrast.precision_weights has {len(self.precision_weights)} numbers for {len(self.precisions)} of "
                "contrast.precisions; give one each, or []"
            )
        if self.precisions and self.drift != "none":
            raise ValueError(
                f"contrast.drift={self.drift} moves queued rows, which are then no int8 or binary ones: set it to "
                "none, or contrast.precisions=[]"
            )
        return self

    def columns(self, width: int) -> int:
        """The numbers of a row that the loss reads, of vectors of ``width``: those of every precision."""
        return width * max(1, len(self.precisions))


class PairValidate(ValidateSection):
    """Validation on held-out pairs: each query searches its document among all of them, and the other way round."""

    first: bool = Field(True, description="validate before the first step as well: the baseline of the run")
    samples: PositiveInt = Field(1000, description="held-out pairs")
    temperature: PositiveFloat = Field(0.05, description="temperature of the validation loss, the same at every step")
    retrieval: RetrievalSection = RetrievalSection()


class PairBatching(BatchSection):
    """Pairs of an optimizer step (``global``), and what a forward pass on one rank takes of them.

    With ``micro_tokens`` the number of micro-batches follows from the texts of each step, on all ranks together.
    """

    micro_tokens: PositiveInt | None = Field(
        None,
        le=2**31 - 1,
        description="most tokens of queries and documents in a forward pass on one rank, padding counted, in place of "
        "batch.micro; the texts of a step decide how many passes it has, and its loss is the same; null = batch.micro",
    )


class PairOptimizer(OptimizerSection):
    """Adam as embedding models are trained."""

    lr: PositiveFloat = Field(2e-5, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of Adam's two moments")
    clip: NonNegativeFloat = Field(1.0, description="largest global gradient norm; 0 = off")


class PairJob(Job):
    """The configuration of an embedding model trained on pairs of texts."""

    data: PairData
    model: PairModel
    batch: PairBatching = PairBatching()
    schedule: PairSchedule = PairSchedule()
    contrast: PairContrast = PairContrast()
    mlm: PairMasked = PairMasked()
    distillation: PairDistillation = PairDistillation()
    corruption: CorruptionConfig = CorruptionConfig()
    optimizer: PairOptimizer = PairOptimizer()
    loader: LoaderSection = LoaderSection()
    validate_: PairValidate = Field(PairValidate(), alias="validate")

    @model_validator(mode="after")
    def _fits_together(self) -> PairJob:
        if self.contrast.weight == 0:
            raise ValueError("contrast.weight 0: the contrast is the only loss of capt_pairs; set it above 0")
        if self.contrast.queue_weight is not None:
            raise ValueError(
                "contrast.queue_weight: in capt_pairs the queue is part of the contrast and has no loss of its own; "
                "remove the key, contrast.queue_share bounds the weight of the queue"
            )
        sources = self.data.sources
        if self.contrast.temperature.type == "learned" and (own := [s.name for s in sources if s.temperature]):
            raise ValueError(
                f"data.sources: {own[0]} has a temperature of its own, and contrast.temperature.type is learned: "
                "remove one of them"
            )
        # Mixed batches have one contrast over the whole step: from cached vectors, at one temperature.
        if self.data.batches == "mixed" and self.contrast.cached is False:
            raise ValueError(
                "data.batches mixed has one contrast over the whole step: it needs contrast.cached=auto or true"
            )
        if self.batch.micro_tokens and self.contrast.cached is False:
            raise ValueError(
                "batch.micro_tokens divides a step by its texts, which leaves the loss as it is where the step has one "
                "contrast: it needs contrast.cached=auto or true"
            )
        hardness = self.contrast.hardness or self.contrast.hardness_in_batch or self.contrast.hardness_own
        if self.data.batches == "mixed" and hardness and (own := [s.name for s in sources if s.temperature]):
            raise ValueError(
                f"data.sources: {own[0]} has a temperature of its own in mixed batches, and hardness needs one "
                "temperature: set contrast.hardness* to 0, or data.batches=single"
            )
        each: list[PairOptions] = [source.completed(self.data) for source in sources]
        if self.distillation.vectors is None and any(one.loss == NO_LOSS for one in each or [self.data]):
            raise ValueError("data.loss=none leaves rows to a teacher's vectors: set distillation.vectors")
        if self.distillation.vectors is not None and self.contrast.precisions:
            raise ValueError(
                "contrast.precisions does not go with distillation.vectors, whose losses are of vectors in float: "
                "leave one of the two out"
            )
        if self.distillation.vectors is not None and any(find_view(one.view).draw for one in each or [self.data]):
            raise ValueError(
                "distillation.vectors: a teacher's vector is of a whole text, and data.view draws spans: leave it out"
            )
        if self.distillation.weight and not any(source.negatives for source in each or [self.data]):
            raise ValueError(
                "distillation.weight: a teacher's scores compare a row's documents; set data.negatives above 0"
            )
        return self

    @model_validator(mode="after")
    def _searches_in_time(self) -> PairJob:
        self.validate_.retrieval.check_rhythm(self.validate_.every, self.checkpoint.best)
        return self

    @model_validator(mode="after")
    def _suits_its_representation(self) -> PairJob:
        check_representation(self)
        return self

    @classmethod
    def replaced_by(cls, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
        """Steps that are given later take the place of epochs that were given before, and the other way round."""
        old, new = below.get("schedule"), above.get("schedule")
        if not isinstance(old, Mapping) or not isinstance(new, Mapping) or {"epochs", "max_steps"} <= new.keys():
            return below
        left_out = {"epochs"} if "max_steps" in new else {"max_steps"} if new.get("epochs") else set()
        return {**below, "schedule": {key: value for key, value in old.items() if key not in left_out}}

    def metric_names(self) -> frozenset[str]:
        """Names of the metrics of validation."""
        widths = [at_width(name, width) for name in RETRIEVAL for width in self.contrast.matryoshka]
        named = {each.loss for each in [self.data, *self.data.sources]} - {"auto"}
        figures = [name for loss in [*LOSSES.values(), *map(find_loss, named)] for name in loss.figures]
        spread = SPREAD if find_representation(self.model.representation).similarity is None else ()
        searched = self.validate_.retrieval.metric_names()
        taught: list[str] = []
        if self.distillation.vectors is not None:
            taught = [*TAUGHT, *(of_teacher(name) for name in (*RETRIEVAL, *searched))]
        return frozenset([*METRICS, *spread, *figures, *widths, *searched, *taught])

    def queue_bytes(self) -> int | None:
        """Bytes of the queue, whose rows are as wide as the vectors; None for a width that ``init`` brings."""
        width = self.model.projection
        return None if width is None else self.contrast.queue_bytes(width)

    def encoder_config(self) -> dict[str, Any] | None:
        """The encoder of ``model.init``, which the job notes when it starts."""
        return self.model.encoder

    def check_inputs(self) -> list[str]:
        """Describe the files of each source and ``model.init``; no pair is read.

        Refuse ``validate.samples=1`` too: validation compares pairs with each other.
        """
        check_validation_samples(self.validate_.samples)
        from capt.pretrain.language.inputs import describe_initial_model
        from capt.pretrain.pairs.forms import check_form

        lines = []
        for source in self.data.each():
            files = source.paths()
            try:
                check_form(source.form, source.corpus)
            except ConfigError as error:
                raise ConfigError(f"source {source.name}: {error}") from None
            if source.corpus is not None:
                _paths([str(source.corpus)], f"source {source.name}: corpus")
            size = sum(file.stat().st_size for file in files if file.is_file())
            lines.append(
                f"source {source.name}: {counted(len(files), 'file')}, {size:,} bytes, weight {source.weight:g}"
            )
        if self.data.validation_files:
            lines.append(f"held-out pairs: {counted(len(self.data.held_out_paths()), 'file')}")
        if self.batch.micro_tokens is not None:
            lines.append(f"micro-batches: of at most {self.batch.micro_tokens:,} tokens, in place of batch.micro")
        if self.distillation.vectors is not None:
            lines.append(f"distillation.vectors: {self.distillation.vectors}")
        lines += self.validate_.retrieval.describe()
        return [*lines, f"model.init: {describe_initial_model(self.model.init)}"]


JOB = PairJob

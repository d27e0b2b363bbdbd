"""``data`` of a ``capt_pairs`` job: where pairs are read, and how each source of them is trained on. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_serializer, model_validator

from capt.pretrain.base.cache import default_cache
from capt.pretrain.base.errors import ConfigError, DataError, repeated
from capt.pretrain.config.base import NonNegativeInt, PathField, PositiveInt, Section
from capt.pretrain.data.config import Patterns
from capt.pretrain.data.row_filter import RowFilter
from capt.pretrain.data.views import ABOUT, Spans, find_view
from capt.pretrain.models.hf_config import hub_id
from capt.pretrain.pairs.losses import LOSSES, check_source, find_loss
from capt.pretrain.pairs.selection import Selection

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

    needs_negatives: ClassVar[bool] = True
    """True where rows without any negative are refused if ``negatives`` asks for some."""

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
        return paths_of(self.files, f"source {self.name}")


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
            raise ValueError(
                f"data.spans.gap {self.spans.gap} applies to neighbouring spans: set data.view to neighbour"
            )
        if not any(drawn) and any(each.spans != Spans() for each in (self, *self.sources)):
            raise ValueError(f"data.spans applies to spans, and data.view is {self.view}: set it to crop or neighbour")
        if self.sources and not sum(source.weight for source in self.sources):
            raise ValueError("data.sources: all weights are 0; give at least one source a weight above 0")
        return self

    def held_out_paths(self) -> list[Path]:
        """The files of ``validation_files``. Raises ``DataError`` where one is missing, or is trained on."""
        held_out = paths_of(self.validation_files, "data.validation_files")
        trained_on = (path for source in self.each() for path in source.paths())
        require_others(held_out, trained_on, "data.validation_files", "pairs")
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


def require_others(held_out: Iterable[Path], trained_on: Iterable[Path], key: str, what: str) -> None:
    """Refuse held-out files that are trained on."""
    trained = {path.resolve() for path in trained_on}
    if both := [path for path in held_out if path.resolve() in trained]:
        raise DataError(f"{key}: {both[0]} is trained on too; name other {what}")


def paths_of(patterns: Sequence[str], key: str) -> list[Path]:
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

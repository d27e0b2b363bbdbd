"""The ``data.*`` and ``corruption.*`` sections of a job. No torch: a launcher validates them on a login node."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, field_validator, model_validator

from capt.pretrain.base.cache import default_cache
from capt.pretrain.base.errors import repeated, shown
from capt.pretrain.config.base import Bytes, PathField, PathText, PositiveInt, Section, StorePlace, StoreText
from capt.pretrain.data.views import ABOUT, Spans, View, find_view
from capt.pretrain.registry import look_up

CORRUPTIONS = {
    "mask_tokens": "capt.pretrain.data.corruption:MaskTokens",
    "mask_spans": "capt.pretrain.data.corruption:MaskSpans",
    "shuffle": "capt.pretrain.data.corruption:Shuffle",
    "replace": "capt.pretrain.data.corruption:Replace",
}
"""The classes of ``corruption.type``; other packages add theirs as entry points in the group ``capt.corruptions``."""

SOURCES = {
    "files": "capt.pretrain.data.sources:Files",
    "docstrings": "capt.pretrain.data.sources:Docstrings",
    "hub": "capt.pretrain.data.sources:Hub",
}
"""The classes of ``data.source``; other packages add theirs as entry points in the group ``capt.sources``."""


NO_TEXT = (
    "data names no text: set data.files (paths or globs), data.shards (a folder of capt data prepare) or data.name "
    "(a dataset of the hub)"
)
"""The error of a job without text."""


TEXT_KEYS = (
    "source", "source_options", "files", "shards", "name", "subset", "validation_files", "validation_split", "mixture",
)  # fmt: skip
"""The keys of ``data`` that say which text is read."""


def corruption_path(name: str) -> str:
    """The path ``module:Class`` of a corruption. Nothing is imported. Raises ``ConfigError`` with the nearest name."""
    return look_up(name, CORRUPTIONS, "capt.corruptions", "corruption.type: unknown corruption")


def source_path(name: str) -> str:
    """The path ``module:Class`` of a source; nothing is imported. Raises ``ConfigError`` naming the nearest name."""
    return look_up(name, SOURCES, "capt.sources", "data.source: unknown source")


def _require_expression(value: str | None) -> str | None:
    try:
        re.compile(value or "")
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    return value


def _as_list(value: Any) -> Any:
    """Let ``data.files=my.txt`` on the command line mean a list of one."""
    return [value] if isinstance(value, str | Path) else value


def _as_word(value: Any) -> Any:
    return {True: "once", False: "never"}[value] if isinstance(value, bool) else value


PARAGRAPHS = "(?m)^"
"""The ``data.document_start`` of text whose every line is a document, within the rows of tables too."""


def _as_passage(value: Any) -> Any:
    # One line, where a union of types would have one for each.
    if isinstance(value, bool) or not isinstance(value, int | str) or (isinstance(value, int) and value < 1):
        raise ValueError(f"{value!r} is no passage: give document, paragraph, or a number of tokens above 0")
    if isinstance(value, str) and value not in ("document", "paragraph"):
        raise ValueError(f"{shown(value)} is no passage: give document, paragraph, or a number of tokens above 0")
    return value


MISSING = (
    "rows of a table whose text is null, NaN or absent: skip leaves them out, and says how many; refuse ends the job"
)
"""The description of ``data.missing``."""

Patterns = Annotated[list[PathText], BeforeValidator(_as_list)]
StorePatterns = Annotated[list[StoreText], BeforeValidator(_as_list)]
"""Patterns that may be addresses in a store as well."""


def schedule_at(points: Sequence[tuple[float, float]], place: float) -> float:
    """The value at a place of a schedule of ``(place, value)``, after the jump where there is one; constant outside."""
    before, value = points[0]
    for at, new in points:
        if at > place:
            return value + (new - value) * (place - before) / (at - before) if place >= before else value
        before, value = at, new
    return value


def require_schedule(value: Any) -> Any:
    """Raise ``ValueError`` for a schedule without points, or one whose shares fall; a number passes."""
    shares = [share for share, _ in value] if isinstance(value, list) else [0.0]
    if not shares or shares != sorted(shares):
        raise ValueError("a schedule has one point or more, and its shares do not fall: [[0, 0.3], [1, 0.15]]")
    return value


Share = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(gt=0.0, lt=1.0)]
Weight = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)]
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]


class Weighted(Section):
    """A source of a mixture: its name, and how much of it a training sees."""

    name: SourceName = Field(description="name in the log, in errors, in the metrics and in the ledger")
    weight: Weight | list[tuple[Share, Weight]] = Field(
        1.0, description="share of the samples, relative to the other sources; or its schedule, [[share of "
        "schedule.max_steps, weight], ...]: straight lines between these points, a jump where a share comes twice"
    )  # fmt: skip
    epochs: PositiveFloat | None = Field(
        None, allow_inf_nan=False, description="times that it is read at most; the others continue without it"
    )

    _goes_forward = field_validator("weight")(require_schedule)

    @property
    def schedule(self) -> list[tuple[float, float]]:
        """The points of the weight; one where it does not change."""
        return self.weight if isinstance(self.weight, list) else [(0.0, self.weight)]

    @model_validator(mode="after")
    def _has_a_weight(self) -> Weighted:
        if not any(weight for _, weight in self.schedule):
            raise ValueError(f"source {self.name}: weight 0 never reads it: give it one above 0, or leave it out")
        return self


def check_mixture(sources: Sequence[Weighted]) -> None:
    """Raise ``ValueError`` for a name that comes twice, or a time at which all weights are 0."""
    if twice := repeated(source.name for source in sources):
        raise ValueError(f"data.mixture: {twice} is the name of several sources; rename one of them")
    for share in sorted({share for source in sources for share, _ in source.schedule}):
        backwards = [[(-at, weight) for at, weight in reversed(source.schedule)] for source in sources]
        before = sum(schedule_at(schedule, -share) for schedule in backwards)
        if not before or not sum(schedule_at(source.schedule, share) for source in sources):
            raise ValueError(f"data.mixture: all weights are 0 at {share:g} of the training; raise one of them")


class TextPart(Weighted):
    """A source of text of a mixture. What is not set is as ``data`` says."""

    files: StorePatterns = Field([], description="paths or globs, as data.files")
    shards: StorePlace | None = Field(None, description="folder written by capt data prepare, as data.shards")
    validation_files: StorePatterns = Field(
        [], description="held-out text of this source; without it a fraction of its text is held out"
    )
    text_column: str | None = Field(None, description="key or column with the text; null = data.text_column")
    document_start: str | None = Field(
        None, description="expression of the first line of a document; null = data.document_start"
    )

    _compiles = field_validator("document_start")(_require_expression)

    @model_validator(mode="after")
    def _names_text(self) -> TextPart:
        if bool(self.files) == (self.shards is not None):
            raise ValueError(f"source {self.name}: set either files or shards")
        return self


class DataConfig(Section):
    """The source of the text, and how it becomes windows of token ids.

    ``source`` follows from what is named: ``files`` where ``files`` or ``shards`` is given, ``hub`` where ``name`` is.
    ``docstrings`` (those of the installed Python packages) has to be asked for, and gives way to text that is named.
    A ``mixture`` has several sources of ``files`` or ``shards``.
    """

    source: str | None = Field(
        None,
        description="files, hub, docstrings (a small corpus for trying things out) or an entry point of capt.sources;"
        " if unset it follows from files, shards or name",
    )
    source_options: dict[str, Any] = Field(
        {}, description="settings of a source of another package, as it defines them"
    )
    files: StorePatterns = Field(
        [],
        description="paths or globs of .txt, .md, .jsonl, .json, .csv, .tsv, .tokens, .raw (or .gz, .zst), .parquet; "
        "also in a store: s3://, gs://, az://, hf://, https://",
    )
    validation_files: StorePatterns = Field(
        [], description="held-out text; without it a fraction of the text is held out"
    )
    mixture: list[TextPart] = Field(
        [], description="several sources of text, each with name, files or shards, weight and epochs"
    )
    temperature: float | None = Field(
        None, ge=0.0, le=1.0, description="exponent of the sizes of the sources of data.mixture: the weight of each is "
        "times its number of windows to this power (0.3 = XLM-R's for languages); null = 0, weights alone"
    )  # fmt: skip
    name: PathText | None = Field(
        None, description="id of a hub dataset, or a folder written by save_to_disk of the datasets library"
    )
    subset: str | None = Field(
        None, description="configuration of the hub dataset; if unset its first one, with a warning"
    )
    split: str = Field("train", description="split of the hub dataset to train on")
    validation_split: str | None = Field(
        None, description="hub split to validate on; if unset a fraction of the text is held out"
    )
    text_column: str = Field("text", description="key or column with the text of a jsonl, csv, parquet or hub row")
    missing: Literal["skip", "refuse"] = Field("skip", description=MISSING)
    document_start: str | None = Field(
        None,
        description="regular expression: a line or row that begins with a match begins a document. Without it, text has"
        " a blank line between documents, and a row of a table is one; WikiText's files have their own, '^ = [^=]'."
        " With '.' every line is a document, with (?m) lines within rows of a table as well",
    )
    view: str = Field("corrupted", description=f"both views of a sample; {ABOUT}")
    passage: Annotated[Literal["document", "paragraph"] | PositiveInt, BeforeValidator(_as_passage)] = Field(
        "document", description="crop, neighbour: what spans are drawn from: a document, a paragraph (a line of text, "
        "or of a row's text), or runs of at most this number of tokens of a document"
    )  # fmt: skip
    apart: PositiveInt | None = Field(
        None, description="runs of data.passage that begin in the same stretch of this many tokens of a document are "
        "no negatives of each other; null = all are"
    )  # fmt: skip
    spans: Spans = Spans()
    sequence_length: int = Field(512, ge=8, le=2**20, description="tokens per window, <s> and </s> included")
    cross_document_attention: bool = Field(True, description="false: tokens attend only within their document")
    validation_fraction: float = Field(0.01, ge=0.0, lt=1.0, description="share of the text to hold out; 0 = none")
    workers: PositiveInt | None = Field(
        None, le=1024, description="processes that tokenize; without it one per usable core"
    )
    cache: PathField = Field(default_factory=default_cache, description="where prepared shards and docstrings are kept")
    cache_bytes: Bytes = Field(
        100 * 10**9, description="bytes that shards of a store may take in data.cache of each host, as 200GB"
    )
    shards: StorePlace | None = Field(
        None,
        description="folder written by capt data prepare, here or in a store (s3://, gs://, az://, hf://, https://); no"
        " other text is read then",
    )
    shards_at_once: PositiveInt | None = Field(
        None,
        le=2**20,
        description="for sets that are larger than data.cache_bytes: the windows (of spans the passages) of this many "
        "shards are shuffled with each other, then those of the next ones; no window goes over the end of a shard. "
        "Unset: an epoch shuffles all of them",
    )
    verify: Annotated[Literal["always", "once", "never"], BeforeValidator(_as_word)] = Field(
        "once",
        description="compare every shard's SHA-256 before use: in full at every start (always), not again while a file"
        " stays as it is on this host (once, true), or not at all (never, false)",
    )
    allow_change: bool = Field(False, description="a resumed run may continue with other text than it began with")

    @model_validator(mode="before")
    @classmethod
    def _lines_are_documents(cls, values: Any) -> Any:
        """Read every line as a document where passages are paragraphs."""
        if not isinstance(values, dict) or values.get("passage") != "paragraph":
            return values
        if values.get("document_start") not in (None, PARAGRAPHS):
            raise ValueError(
                "data.passage paragraph has every line begin a passage: leave data.document_start out, or set "
                "data.passage to document"
            )
        return {**values, "document_start": PARAGRAPHS}

    @model_validator(mode="before")
    @classmethod
    def _infer_source(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("source") not in (None, "docstrings"):
            return values
        if values.get("files") or values.get("shards") or values.get("mixture"):
            return {**values, "source": "files"}
        return {**values, "source": "hub"} if values.get("name") else values

    @field_validator("view")
    @classmethod
    def _is_a_view(cls, value: str) -> str:
        find_view(value)
        return value

    @property
    def views(self) -> View:
        """The row of ``view``."""
        return find_view(self.view)

    @model_validator(mode="after")
    def _spans_fit(self) -> DataConfig:
        runs = self.passage if isinstance(self.passage, int) else None
        if self.views.draw is None:
            if self.passage != "document" or self.apart is not None or self.spans != Spans():
                raise ValueError(
                    f"data.passage, data.apart and data.spans apply to spans, and data.view is {self.view}"
                )
            return self
        if self.view == "crop" and self.spans.gap:
            raise ValueError(
                f"data.spans.gap {self.spans.gap} applies to neighbouring spans: set data.view to neighbour"
            )
        if self.spans.least > self.sequence_length - 2:
            raise ValueError(f"data.spans.least {self.spans.least} is longer than data.sequence_length allows")
        if runs is not None and runs < 2 * self.spans.shortest:
            lower = ", or lower data.spans.gap" if self.spans.gap else ""
            raise ValueError(
                f"data.passage {runs}: runs are half as long at least, and {self.spans.need}: set data.passage to "
                f"{2 * self.spans.shortest} or more{lower}"
            )
        if self.apart is not None and runs is None:
            raise ValueError("data.apart tells the runs of a document apart: set data.passage to a number of tokens")
        return self

    @field_validator("source")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is not None:
            source_path(value)
        return value

    _compiles = field_validator("document_start")(_require_expression)

    @model_validator(mode="after")
    def _keys_fit_source(self) -> DataConfig:
        if self.mixture:
            self._check_mixture()
        elif self.temperature is not None:
            raise ValueError("data.temperature is given without data.mixture: name the sources there")
        if self.source == "files" and not (self.files or self.shards or self.mixture):
            raise ValueError("data.source is files, but data.files is empty: name at least one file or glob")
        if self.source == "hub" and self.name is None:
            raise ValueError("data.source is hub, but data.name is not set: give a dataset id, as Salesforce/wikitext")
        if self.source not in ("files", None) and self.files:
            raise ValueError(f"data.files is given, but data.source is {self.source}: set data.source=files")
        if self.source_options and self.source in (None, *SOURCES):
            raise ValueError("data.source_options is given, but data.source names no source of another package")
        for key in ("name", "subset", "validation_split"):
            if self.source != "hub" and getattr(self, key) is not None:
                raise ValueError(f"data.{key} is given, but data.source is {self.source}: set data.source=hub")
        return self

    def _check_mixture(self) -> None:
        for key in ("files", "shards", "validation_files", "name", "source_options"):
            if getattr(self, key):
                raise ValueError(f"data.mixture and data.{key} are both given: name all text in data.mixture")
        if self.source != "files":
            raise ValueError(f"data.mixture is given, but data.source is {self.source}: set data.source=files")
        check_mixture(self.mixture)
        starts = {source.document_start for source in self.mixture} - {None, PARAGRAPHS}
        if self.passage == "paragraph" and starts:
            raise ValueError("data.passage paragraph has every line begin a passage: leave document_start out")

    def parts(self) -> Iterator[tuple[str, DataConfig]]:
        """Each source of the mixture, by name, as the data of a job of its own; without a mixture the one, unnamed."""
        if not self.mixture:
            yield "", self
        for part in self.mixture:
            own = {"files": part.files, "shards": part.shards, "validation_files": part.validation_files}
            own |= {
                key: value for key in ("text_column", "document_start") if (value := getattr(part, key)) is not None
            }
            yield part.name, self.model_copy(update={**own, "mixture": [], "temperature": None})


class CorruptionConfig(Section):
    """The noise that turns a window ``x`` into the view ``x_hat`` (CAPT, section 5.2 and Table 1)."""

    removed: ClassVar = {"mask_fraction": 0.8, "random_fraction": 0.1, "span_p": 0.2, "span_max": 10}

    type: str | list[str] = Field(
        "mask_tokens",
        description="mask_tokens, mask_spans, shuffle or replace; or several, applied in order: a list, or joined by +",
    )
    rate: Rate | list[tuple[Share, Rate]] = Field(
        0.15, description="share of a sequence's tokens that each corruption chooses; or its schedule, [[share of "
        "schedule.max_steps, rate], ...]: straight lines between these points, a jump where a share comes twice"
    )  # fmt: skip
    validation_rate: Rate | None = Field(
        None, description="the rate of validation, which does not change; null = corruption.rate, or its last one"
    )
    window: PositiveInt = Field(3, le=2**20, description="shuffle: how far a token may move (k of Lample et al. 2018)")

    @property
    def names(self) -> list[str]:
        """The names of the corruptions to apply, in order."""
        return self.type.split("+") if isinstance(self.type, str) else self.type

    @property
    def _schedule(self) -> list[tuple[float, float]]:
        return self.rate if isinstance(self.rate, list) else [(0.0, self.rate)]

    @property
    def highest_rate(self) -> float:
        """The highest rate of the training."""
        return max(rate for _, rate in self._schedule)

    @property
    def rate_of_validation(self) -> float:
        """The rate of every validation."""
        return self._schedule[-1][1] if self.validation_rate is None else self.validation_rate

    def rate_at(self, share: float) -> float:
        """Return the rate when ``share`` of the training is done: constant outside the points."""
        return schedule_at(self._schedule, share)

    _goes_forward = field_validator("rate")(require_schedule)

    @model_validator(mode="after")
    def _known_and_whole(self) -> CorruptionConfig:
        if not self.names:
            raise ValueError("corruption.type is empty: name at least one corruption, for example mask_tokens")
        for name in self.names:
            corruption_path(name)
        return self

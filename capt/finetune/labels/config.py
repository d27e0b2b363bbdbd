"""The configuration of the ``labels`` job: a pretrained encoder fine-tuned on labelled texts of one's own.

What the job finds in its training data (columns, kind, class names, scale) is filled in when it starts, so that every
checkpoint says what its outputs mean. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field, PositiveFloat, field_validator, model_validator

from capt.finetune.columns import find_columns, open_labelled
from capt.finetune.config import FineTuningCheckpoint, TextData, TextJob
from capt.finetune.text_task import METRICS, Kind
from capt.pretrain.base.errors import ConfigError, did_you_mean, repeated
from capt.pretrain.config.base import NonNegativeInt, PathField


@dataclass(frozen=True)
class OwnTask:
    """Labels of one's own (`capt.finetune.text_task.TextTask`)."""

    title: str
    pair: bool
    kind: Kind
    names: tuple[str, ...]
    scale: float
    offset: float
    score_range: None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """The tag of a model card."""
        return (self.kind.replace("_", "-"),)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of the kind."""
        return METRICS[self.kind]


class LabelsData(TextData):
    """The files, their columns, and what the labels are."""

    train: PathField = Field(description="a .csv, .tsv, .jsonl (each also .gz) or .parquet file, a labelled text a row")
    validation: PathField | None = Field(None, description="held-out rows; if unset a share of data.train")
    validation_share: PositiveFloat = Field(0.1, lt=1, description="of the rows of data.train, without data.validation")
    split_seed: NonNegativeInt = Field(0, description="which rows that share is; the same for every run.seed")
    text: str | None = Field(None, min_length=1, description="column of the text; if unset a usual name is looked for")
    second: str | None = Field(None, min_length=1, description="column of the second text of a pair")
    label: str | list[str] | None = Field(
        None, min_length=1, description="column of the label, or one column a label, with 0 or 1; if unset a usual name"
    )
    kind: Kind | None = Field(
        None, description="classification (one class a row), regression (a number) or multi_label (any number of "
        "labels); if unset: lists and several columns are multi_label, numbers that are not all whole are regression"
    )  # fmt: skip
    labels: list[str] | None = Field(None, min_length=1, description="the classes in order; if unset those of the rows")
    label_separator: str = Field(",", min_length=1, description="between the labels in a cell of a multi_label table")
    quotes: bool | None = Field(
        None, description="a cell in double quotes may hold separators and line ends; if unset in .csv and not in .tsv"
    )
    scale: PositiveFloat | None = Field(
        None, description="regression: labels are divided by it; if unset their standard deviation"
    )
    offset: float | None = Field(None, description="regression: subtracted before that; if unset their mean")

    @field_validator("labels", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if isinstance(value, list):  # YAML reads 0, 1 and true as what they look like
            return [str(each).lower() if isinstance(each, bool) else str(each) for each in value]
        return value

    @model_validator(mode="after")
    def _fits(self) -> LabelsData:
        named = [name for name in (self.text, self.second, *self.label_columns) if name is not None]
        if twice := repeated(named):
            raise ValueError(f"data.text, data.second and data.label name the column {twice!r} twice")
        if self.second is not None and self.text is None:
            raise ValueError("data.second needs data.text: name both columns")
        if self.validation is not None and self.validation.resolve() == self.train.resolve():
            raise ValueError(
                f"data.validation is {self.train}, which is trained on (data.train): name other rows, or leave it out "
                "to hold out data.validation_share of them"
            )
        if isinstance(self.label, list) and self.kind not in (None, "multi_label"):
            raise ValueError(f"data.label names several columns, which is data.kind=multi_label, not {self.kind}")
        if self.labels is not None:
            if twice := repeated(self.labels):
                raise ValueError(f"data.labels names {twice!r} twice")
            if self.kind == "regression":
                raise ValueError("data.labels are classes; data.kind=regression has none")
            if isinstance(self.label, list) and self.labels != self.label:
                raise ValueError("data.labels are the columns of data.label; leave the key out")
        return self

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns that ``label`` names; none if it is unset."""
        return (self.label,) if isinstance(self.label, str) else tuple(self.label or ())

    @property
    def text_task(self) -> OwnTask:
        """Meaning of the outputs; known once the training data has been read
        (`capt.finetune.labels.data.read_splits`)."""
        assert self.kind is not None, "read_splits fills it in"
        title = f"the labels of {self.train.name}"
        scale = 1.0 if self.scale is None else self.scale
        return OwnTask(title, self.second is not None, self.kind, tuple(self.labels or ()), scale, self.offset or 0.0)


class LabelsCheckpoint(FineTuningCheckpoint):
    """The newest checkpoint is kept beside the best one."""

    best: str | None = Field(
        None, description="validation metric whose best checkpoint is kept, linked as checkpoints/best; if unset "
        "accuracy, pearson (regression) or micro_f1 (multi_label)"
    )  # fmt: skip


class LabelsJob(TextJob):
    """A ``labels`` job: a pretrained encoder fine-tuned on labelled texts of one's own."""

    data: LabelsData
    checkpoint: LabelsCheckpoint = LabelsCheckpoint()

    def metric_names(self) -> frozenset[str]:
        """The metrics of the kind (of all kinds, until it is known), the loss and what `compute_metrics` adds."""
        kinds = METRICS if self.data.kind is None else (self.data.kind,)
        return frozenset({name for kind in kinds for name in METRICS[kind]} | {"loss", "degenerate", "baseline"})

    def describe_data(self) -> str:
        """Describe the files and their columns; of each file the first row is looked at."""
        data, described = self.data, []
        for path in (data.train, data.validation):
            if path is not None:
                table = open_labelled(path, data.quotes)
                columns = find_columns(table, data.text, data.second, data.label_columns)
                second = "" if columns.second is None else f" and {columns.second!r}"
                labels = ", ".join(map(repr, columns.labels))
                described.append(f"{path} (text {columns.text!r}{second}, label {labels})")
        if data.validation is None:
            described.append(f"{data.validation_share:g} of its rows are held out")
        return "; ".join(described)

    def with_data(self, data: LabelsData) -> LabelsJob:
        """The job with what was found in its data, and the metric of the kind as ``checkpoint.best``, if that is unset.

        Raises:
            ConfigError: ``checkpoint.best`` is a metric of another kind of labels.
        """
        best = self.checkpoint.best or data.text_task.metrics[0]
        checkpoint = self.checkpoint.model_copy(update={"best": best})
        found = self.model_copy(update={"data": data, "checkpoint": checkpoint})
        if best not in (names := found.metric_names()):
            raise ConfigError(
                f"checkpoint.best: validation of {data.text_task.kind} reports no {best!r}; "
                f"{did_you_mean(best, sorted(names))}"
            )
        return found


JOB = LabelsJob

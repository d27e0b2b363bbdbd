"""The description of a task of labelled texts: what the outputs of its classifier mean. No torch here."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

Kind = Literal["classification", "regression", "multi_label"]

METRICS: dict[Kind, tuple[str, ...]] = {
    "classification": ("accuracy", "macro_f1", "matthews"),
    "regression": ("pearson", "spearman"),
    "multi_label": ("micro_f1", "macro_f1", "accuracy"),
}
"""Metrics of labels of one's own; the first one selects models."""


@runtime_checkable
class TextTask(Protocol):
    """A task with one label, one score or several labels for each text or pair of texts."""

    @property
    def title(self) -> str:
        """Name of the task in messages and model cards."""
        ...

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of a model card."""
        ...

    @property
    def pair(self) -> bool:
        """True if an example is two texts."""
        ...

    @property
    def kind(self) -> Kind:
        """Kind of label: a class, a score or several labels."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The classes, class 0 first; none for a score."""
        ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics; the first one selects models."""
        ...

    @property
    def scale(self) -> float:
        """The factor of a score: a score is ``scale * output + offset``."""
        ...

    @property
    def offset(self) -> float:
        """The score of an output of 0."""
        ...

    @property
    def score_range(self) -> tuple[float, float] | None:
        """The lowest and the highest score, where there are any."""
        ...

"""The tasks of GLUE (Wang et al. 2019): files, columns, labels, metrics and the number of rows of each split."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from capt.finetune.text_task import Kind
from capt.pretrain.base.errors import ConfigError


@dataclass(frozen=True)
class Columns:
    """Places of a file's cells: by name in its header, or by number (from 0) in a file without one, ``width`` wide."""

    first: str | int
    second: str | int | None = None
    label: str | int | None = None
    index: str | None = None
    width: int | None = None


@dataclass(frozen=True)
class GlueTask:
    """The description of one task (`capt.finetune.text_task.TextTask`): its files, labels and metrics.

    ``labels`` are the files' strings, class 0 first, in the order of ``datasets``; ``names`` say what they mean, as
    ``datasets`` does (both are empty for STS-B, whose label is a score from 0 to ``highest``). ``metrics`` are all that
    GLUE reports; the first one selects models. ``rows`` and ``columns`` have a key a split: train, dev, test; for MNLI
    ``dev_matched``, ``dev_mismatched``, ``test_matched`` and ``test_mismatched``.
    """

    name: str
    folder: str
    labels: tuple[str, ...]
    names: tuple[str, ...]
    metrics: tuple[str, ...]
    rows: Mapping[str, int]
    columns: Mapping[str, Columns]
    hub_columns: tuple[str, ...]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    drops_malformed: bool = False
    highest: float | None = None

    @property
    def title(self) -> str:
        """Name of the task in model cards."""
        return f"GLUE {self.folder}"

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of a model card."""
        return "glue", self.name

    @property
    def kind(self) -> Kind:
        """Kind of label: a class or a score."""
        return "regression" if self.regression else "classification"

    @property
    def scale(self) -> float:
        """The score of an output of 1."""
        return self.highest or 1.0

    @property
    def offset(self) -> float:
        """The score of an output of 0."""
        return 0.0

    @property
    def score_range(self) -> tuple[float, float] | None:
        """The lowest and the highest score."""
        return None if self.highest is None else (0.0, self.highest)

    @property
    def pair(self) -> bool:
        """True if an example is two texts."""
        return len(self.hub_columns) == 2

    @property
    def metric(self) -> str:
        """The metric that selects models: ``matthews``, ``pearson`` or ``accuracy``."""
        return self.metrics[0]

    @property
    def regression(self) -> bool:
        """True if the label is a score (STS-B) rather than a class."""
        return not self.labels

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return tuple(self.rows)

    def split(self, name: str) -> str:
        """The split that ``name`` means; ``dev`` and ``test`` of MNLI are the matched ones.

        Raises ``ConfigError`` for a split that the task lacks.
        """
        for known in (name, f"{name}_matched"):
            if known in self.rows:
                return known
        raise ConfigError(f"{self.folder} has no split {name!r}; it has {', '.join(self.splits)}")


def glue_task(name: str) -> GlueTask:
    """The task called ``name``, in lower case (``rte``). Raises ``ConfigError`` with the nearest name."""
    if name not in GLUE:
        near = difflib.get_close_matches(name.lower(), [*GLUE, *(task.folder.lower() for task in GLUE.values())], n=1)
        by_folder = {task.folder.lower(): task.name for task in GLUE.values()}
        hint = f"did you mean {by_folder.get(near[0], near[0])!r}?" if near else f"known: {', '.join(GLUE)}"
        raise ConfigError(f"unknown GLUE task {name!r}; {hint}")
    return GLUE[name]


def _headed(first: str, second: str | None, label: str) -> dict[str, Columns]:
    """Files with a header and the same text columns in every split."""
    labelled = Columns(first, second, label)
    return {"train": labelled, "dev": labelled, "test": Columns(first, second, index="index")}


def _sizes(train: int, dev: int, test: int) -> dict[str, int]:
    return {"train": train, "dev": dev, "test": test}


# CoLA's train and dev files alone have no header.
_COLA = Columns(first=3, label=1, width=4)
_PAIR = ("sentence1", "sentence2")
_QUESTIONS = ("question1", "question2")
_MNLI = Columns(*_PAIR, label="gold_label")
_UNLABELLED = Columns(*_PAIR, index="index")
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_NLI = ("entailment", "neutral", "contradiction")

_TASKS = (
    GlueTask(
        name="cola", folder="CoLA", labels=_BINARY, names=("unacceptable", "acceptable"),
        metrics=("matthews", "accuracy"), rows=_sizes(8551, 1043, 1063),
        columns={"train": _COLA, "dev": _COLA, "test": Columns("sentence", index="index")}, hub_columns=("sentence",),
    ),
    GlueTask(
        name="sst2", folder="SST-2", labels=_BINARY, names=("negative", "positive"),
        metrics=("accuracy",), rows=_sizes(67349, 872, 1821),
        columns=_headed("sentence", None, "label"), hub_columns=("sentence",),
    ),
    GlueTask(
        name="mrpc", folder="MRPC", labels=_BINARY, names=("not_equivalent", "equivalent"),
        metrics=("accuracy", "f1"), rows=_sizes(3668, 408, 1725),
        columns=_headed("#1 String", "#2 String", "Quality"), hub_columns=_PAIR,
    ),
    GlueTask(
        name="stsb", folder="STS-B", labels=(), names=(), highest=5.0,
        metrics=("pearson", "spearman"), rows=_sizes(5749, 1500, 1379),
        columns=_headed(*_PAIR, "score"), hub_columns=_PAIR,
    ),
    GlueTask(
        name="qqp", folder="QQP", labels=_BINARY, names=("not_duplicate", "duplicate"), drops_malformed=True,
        metrics=("accuracy", "f1"), rows=_sizes(363846, 40430, 390965),
        columns={**_headed(*_QUESTIONS, "is_duplicate"), "test": Columns(*_QUESTIONS, index="id")},
        hub_columns=_QUESTIONS,
    ),
    GlueTask(
        name="mnli", folder="MNLI", labels=_NLI, names=_NLI,
        metrics=("accuracy",),
        rows={
            "train": 392702, "dev_matched": 9815, "dev_mismatched": 9832, "test_matched": 9796, "test_mismatched": 9847,
        },
        columns={
            "train": _MNLI, "dev_matched": _MNLI, "dev_mismatched": _MNLI,
            "test_matched": _UNLABELLED, "test_mismatched": _UNLABELLED,
        },
        hub_columns=("premise", "hypothesis"),
    ),
    GlueTask(
        name="qnli", folder="QNLI", labels=_ENTAILMENT, names=_ENTAILMENT,
        metrics=("accuracy",), rows=_sizes(104743, 5463, 5463),
        columns=_headed("question", "sentence", "label"), hub_columns=("question", "sentence"),
    ),
    GlueTask(
        name="rte", folder="RTE", labels=_ENTAILMENT, names=_ENTAILMENT,
        metrics=("accuracy",), rows=_sizes(2490, 277, 3000),
        columns=_headed(*_PAIR, "label"), hub_columns=_PAIR,
    ),
    GlueTask(
        name="wnli", folder="WNLI", labels=_BINARY, names=("not_entailment", "entailment"),
        metrics=("accuracy",), rows=_sizes(635, 71, 146),
        columns=_headed(*_PAIR, "label"), hub_columns=_PAIR,
    ),
    GlueTask(
        name="ax", folder="AX", labels=_NLI, names=_NLI, aliases={"test": ("AX", "diagnostic")},
        metrics=("matthews",), rows={"test": 1104},
        columns={"test": _UNLABELLED}, hub_columns=("premise", "hypothesis"),
    ),
)  # fmt: skip

GLUE: dict[str, GlueTask] = {task.name: task for task in _TASKS}
"""The nine tasks and the diagnostic set, by name."""

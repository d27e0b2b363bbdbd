"""The configuration of the ``glue`` job: a pretrained encoder fine-tuned on one GLUE task. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from capt.finetune.config import TextData, TextJob
from capt.finetune.glue.tasks import GlueTask, glue_task
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.config.base import PathField


class GlueData(TextData):
    """The task, and the place of its files."""

    task: str = Field(description="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli")
    source: Literal["files", "hub"] = Field("files", description="the official TSV files, or the datasets library")
    path: PathField | None = Field(
        None, description="files: folder with RTE/, CoLA/, ...; hub: a saved copy of the dataset"
    )

    @property
    def text_task(self) -> GlueTask:
        """The task that ``task`` names."""
        return glue_task(self.task)

    @field_validator("task")
    @classmethod
    def _is_known(cls, value: str) -> str:
        try:
            task = glue_task(value)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("data.task: ")) from None
        if "train" not in task.splits:
            raise ValueError(f"{value} has no training data; it is predicted with the model of mnli")
        return value

    @model_validator(mode="after")
    def _has_a_place(self) -> GlueData:
        if self.source == "files" and self.path is None:
            raise ValueError("data.path is missing: name the folder that holds RTE/, CoLA/ and so on")
        return self


class GlueJob(TextJob):
    """A ``glue`` job: a pretrained encoder fine-tuned on one task of GLUE."""

    data: GlueData

    def metric_names(self) -> frozenset[str]:
        """The task's metrics, the loss and what `compute_metrics` adds; for MNLI those of the second dev set too."""
        task = self.data.text_task
        names = (*task.metrics, "loss", "degenerate", "baseline")
        suffixes = ("", "_mismatched") if "dev_mismatched" in task.splits else ("",)
        return frozenset(f"{name}{suffix}" for name in names for suffix in suffixes)

    def describe_data(self) -> str:
        """Describe in one line what the job trains and validates on; no file is read.

        Raises:
            DataError: the folder ``data.path`` is missing, or has no file of the task's training or dev split.
        """
        from capt.finetune.glue.files import find_split  # numpy

        task, path = self.data.text_task, self.data.path
        if self.data.source == "hub":
            if path is not None and not path.is_dir():
                raise DataError(f"data.path: no folder {path}; name one that `datasets` saved, or leave data.path out")
            return f"{task.folder} of {path or 'the hub'}"
        assert path is not None, "GlueData lets no job through without it"
        files = [find_split(path, task, split) for split in task.splits if not split.startswith("test")]
        size = sum(file.stat().st_size for file in files)
        return f"{task.folder}, {', '.join(file.name for file in files)} in {files[0].parent}, {size:,} bytes"


JOB = GlueJob

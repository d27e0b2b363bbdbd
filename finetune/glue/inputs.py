"""Whether what a ``glue`` job reads is there, without torch: for dry runs and ``capt config validate``."""

from __future__ import annotations

from pathlib import Path

from finetune.glue.config import GlueJob
from finetune.glue.files import find_split
from finetune.glue.tasks import glue_task
from pretrain.base.errors import CheckpointError, DataError
from pretrain.models.hub import hub_id


def describe_inputs(job: GlueJob) -> list[str]:
    """A line for the task's files and one for the encoder. No file is read.

    Raises:
        DataError: ``data.path`` is missing, or has no file of the task's training or dev split.
        CheckpointError: ``model.init`` is neither a run or checkpoint of ours nor a Hugging Face folder.
    """
    return [_files(job), f"model.init: {_encoder(job.model.init)}"]


def _files(job: GlueJob) -> str:
    task, data = glue_task(job.data.task), job.data
    if data.source == "hub":
        if data.path is not None and not data.path.is_dir():
            raise DataError(f"data.path: no folder {data.path} with what datasets saved")
        return f"data: {task.folder} of {data.path or 'the hub'}"
    assert data.path is not None, "GlueData lets no job through without it"
    found = [find_split(data.path, task, split) for split in task.splits if not split.startswith("test")]
    size = sum(path.stat().st_size for path in found)
    return f"data: {task.folder}, {', '.join(path.name for path in found)} in {found[0].parent}, {size:,} bytes"


def _encoder(init: Path) -> str:
    marks = ("config.json", "manifest.json", "checkpoints")
    if hub_id(init) is not None:
        return f"the hub's model {init}, fetched at the start"
    if not init.is_dir():
        raise CheckpointError(f"model.init: no folder {init}; name a run, a checkpoint or a Hugging Face folder")
    if not any((init / mark).exists() for mark in marks):
        raise CheckpointError(f"model.init {init}: neither a run or checkpoint of ours nor a Hugging Face folder")
    return str(init)

"""A look at what a ``glue`` job reads, without torch: for dry runs and ``capt config validate``."""

from __future__ import annotations

from finetune.glue.config import GlueJob
from finetune.glue.files import find_split
from finetune.inputs import describe_initial_model
from pretrain.base.errors import DataError


def describe_inputs(job: GlueJob) -> list[str]:
    """One line for the task's files and one for the encoder; no file is read.

    Raises:
        DataError: ``data.path`` is missing, or has no file of the task's training or dev split.
        CheckpointError: ``model.init`` is neither a run or checkpoint of ours nor a Hugging Face folder.
    """
    return [_files(job), f"model.init: {describe_initial_model(job.model.init)}"]


def _files(job: GlueJob) -> str:
    task, data = job.data.glue_task, job.data
    if data.source == "hub":
        if data.path is not None and not data.path.is_dir():
            raise DataError(f"data.path: no folder {data.path} with what datasets saved")
        return f"data: {task.folder} of {data.path or 'the hub'}"
    assert data.path is not None, "GlueData lets no job through without it"
    paths = [find_split(data.path, task, split) for split in task.splits if not split.startswith("test")]
    size = sum(path.stat().st_size for path in paths)
    return f"data: {task.folder}, {', '.join(path.name for path in paths)} in {paths[0].parent}, {size:,} bytes"

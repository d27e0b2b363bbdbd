"""A look at the files that a ``glue`` job reads, without torch: for dry runs and ``capt config validate``."""

from __future__ import annotations

from pathlib import Path

from capt.finetune.glue.files import find_split
from capt.finetune.glue.tasks import GlueTask
from capt.pretrain.base.errors import DataError


def describe_data(task: GlueTask, path: Path | None, *, from_hub: bool) -> str:
    """Describe in one line what the job trains and validates on; no file is read.

    Raises:
        DataError: the folder ``path`` is missing, or has no file of the task's training or dev split.
    """
    if from_hub:
        if path is not None and not path.is_dir():
            raise DataError(f"data.path: no folder {path} with what datasets saved")
        return f"{task.folder} of {path or 'the hub'}"
    assert path is not None, "GlueData lets no job through without it"
    files = [find_split(path, task, split) for split in task.splits if not split.startswith("test")]
    size = sum(file.stat().st_size for file in files)
    return f"{task.folder}, {', '.join(file.name for file in files)} in {files[0].parent}, {size:,} bytes"

"""``capt evaluate`` of a fine-tuned checkpoint: the metrics of its dev set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.glue.predict import as_text, evaluate
from pretrain.base.progress import ProgressCallback

__all__ = ["as_text", "command"]


def command(
    checkpoint: Path,
    *,
    data: Path | None = None,
    out: Path | None = None,
    batch: int = 32,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """`evaluate` by the options of the command line; ``data`` is the folder with GLUE's files, if it has moved."""
    return evaluate(checkpoint, path=data, out=out, batch=batch, progress=progress)

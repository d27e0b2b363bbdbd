"""Predictions and dev metrics of a fine-tuned checkpoint, on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Num

from finetune.glue.data import dev_rows, row_set
from finetune.glue.files import Examples
from finetune.glue.outputs import all_logits, metrics_of, predictions_of
from finetune.glue.restore import Restored, load_classifier
from pretrain.base.errors import ConfigError
from pretrain.base.progress import ProgressCallback
from pretrain.engine.artifacts import write_result
from pretrain.engine.distributed import device
from pretrain.engine.provenance import provenance


def predict(
    checkpoint: Path | Restored, examples: Examples, *, batch: int = 32, progress: ProgressCallback | None = None
) -> Num[np.ndarray, " n"]:
    """What a checkpoint predicts for each of ``examples``: class numbers (int64), or scores from 0 to 5 (float32).

    Args:
        checkpoint: a checkpoint, a run (its best one), or a classifier that is loaded already.
        examples: rows of the checkpoint's task, or of one with the same classes (AX by a model of MNLI).
        batch: rows a forward pass.
        progress: called with the rows done and their number.

    Raises:
        CheckpointError: as `load_classifier`.
        ConfigError: single texts for a task of pairs, or the other way round.
    """
    restored = _load(checkpoint)
    if restored.task.pair != (examples.second is not None):
        kind = "pairs of texts" if restored.task.pair else "single texts"
        raise ConfigError(f"{examples.source}: {restored.task.folder} is a task of {kind}")
    section, types = restored.job.data, restored.model.reads_types
    assert section.sequence_length is not None, "GlueJob.completed fills it in"
    rows = row_set(examples, section, restored.tokenizer, section.sequence_length, types=types)
    return predictions_of(restored.task, all_logits(restored.model, rows, batch, device(), progress))


def evaluate(
    checkpoint: Path | Restored,
    *,
    path: Path | None = None,
    out: Path | None = None,
    batch: int = 32,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """The task's metrics of a checkpoint on its dev set, or both of MNLI's.

    Args:
        checkpoint: a checkpoint, a run (its best one), or a classifier that is loaded already.
        path: the folder with GLUE's files, when it is no longer where the run found it.
        out: JSON file to write the result to as well.
        batch: rows a forward pass.
        progress: called with the rows done and their number, for each set.

    Returns:
        ``checkpoint``, ``task``, ``rows`` (by set), ``metrics`` and ``versions``.

    Raises:
        CheckpointError: as `load_classifier`.
        DataError: the files cannot be read.
    """
    restored = _load(checkpoint)
    data, types = restored.job.data, restored.model.reads_types
    if path is not None:
        data = data.model_copy(update={"path": path, "source": "files"})
    assert data.sequence_length is not None, "GlueJob.completed fills it in"
    metrics: dict[str, float] = {}
    counts: dict[str, int] = {}
    sets = dev_rows(data, restored.task, restored.tokenizer, data.sequence_length, types=types)
    for suffix, rows in sets.items():
        logits = all_logits(restored.model, rows, batch, device(), progress)
        assert rows.labels is not None
        found = metrics_of(restored.task, logits, rows.labels)
        metrics |= {f"{name}{suffix}": value for name, value in found.items()}
        counts[f"dev{suffix}"] = len(rows)
    result = {
        "checkpoint": str(restored.checkpoint),
        "task": restored.task.name,
        "rows": counts,
        "metrics": metrics,
        "versions": provenance(),
    }
    if out is not None:
        write_result(out, result)
    return result


def as_text(result: dict[str, Any]) -> str:
    """The result of `evaluate` for people."""
    rows = ", ".join(f"{name} {count:,} rows" for name, count in result["rows"].items())
    lines = [f"checkpoint {result['checkpoint']}", "", f"{result['task']} ({rows})"]
    return "\n".join(lines + [f"  {name:<24}{value:>12.4f}" for name, value in result["metrics"].items()])


def _load(checkpoint: Path | Restored) -> Restored:
    if isinstance(checkpoint, Restored):
        return checkpoint
    restored = load_classifier(checkpoint)
    restored.model.to(device())
    return restored

"""``capt evaluate`` of a ``visual`` checkpoint: the official metrics and the result file of any split."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from capt.finetune.evaluation import RowResults, as_text, evaluation_result, results_of_all_rows
from capt.finetune.visual.config import VisualData, VisualJob
from capt.finetune.visual.data import read_rows, read_splits, require_counted, require_own_ids, row_set
from capt.finetune.visual.dumps import check_predictions, write_dump
from capt.finetune.visual.module import FineTunedLxmert, load_visual, read_answers
from capt.finetune.visual.objective import objective_of
from capt.finetune.visual.rows import PictureRows
from capt.pretrain.base import distributed
from capt.pretrain.base.errors import counted
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.base.verification import Verifier
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.data.answers import AnswerTable
from capt.pretrain.vision_language.load import open_store
from capt.pretrain.vision_language.pairs import located

logger = logging.getLogger(__name__)

__all__ = ["as_text", "command", "evaluate"]


def evaluate(
    checkpoint: Path | FineTunedLxmert,
    *,
    data: Sequence[Path] | None = None,
    predictions: Path | None = None,
    regions: Path | None = None,
    out: Path | None = None,
    batch: int = 64,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """The metrics of a checkpoint on its validation set or on any files, and its predictions.

    Where the rows come from files, the metrics are the official ones, computed from the result file.

    Args:
        checkpoint: a checkpoint, a run (its best one), or one that is loaded already.
        data: what to predict, with labels or without (VQA: questions, and annotations where there are any); None for
            the validation set of the job.
        predictions: the result file to write, in the benchmark's own format.
        regions: the region store, where it is not the one of the job.
        out: JSON file to write the result to as well.
        batch: rows a forward pass.
        progress: called with the rows done and their number.

    Returns:
        As `capt.finetune.evaluation.evaluate_checkpoint`; no metrics for rows without labels.

    Raises:
        CheckpointError: nothing usable there, or the store holds features of another kind than those of the training.
        DataError: a file cannot be read, or a picture is not in the store.
    """
    trained = checkpoint if not isinstance(checkpoint, Path) else load_visual(checkpoint)
    job = trained.job
    answers = read_answers(job, trained.checkpoint)
    objective = objective_of(job.data.visual_task)
    device = distributed.device()
    files, rows = _rows(trained, data, regions, answers)
    if rows.targets is not None:
        require_counted(rows.examples, "--data")
    results = results_of_all_rows(trained.model.to(device), rows, objective, batch, device, progress)
    metrics = {} if rows.targets is None else objective.metrics(results, rows)
    # Official metrics are those of the result file, which is written and read back.
    metrics |= _dumped(results, rows, job, answers, predictions, files)
    name = "validation" if not files else "+".join(file.name for file in files)
    return evaluation_result(trained.checkpoint, job.data.task, {name: len(rows)}, metrics, out)


command = evaluate
"""The function that ``capt evaluate`` calls."""


def _rows(
    trained: FineTunedLxmert, files: Sequence[Path] | None, regions: Path | None, answers: AnswerTable | None
) -> tuple[Sequence[Path], PictureRows]:
    data = trained.job.data
    # What the job itself names is looked for only where it is needed.
    if not regions or not files:
        data = located(data, data.task)
    store = store_of(trained, data, regions)
    if files is None:
        files = data.validation
    rows = read_rows(files, data.visual_task, "--data") if files else read_splits(data).validation
    require_own_ids(rows, "--data")
    return files, row_set(rows, data, trained.tokenizer, store, answers, "--data")


def store_of(trained: FineTunedLxmert, data: VisualData, regions: Path | None) -> RegionStore:
    """Open the store of ``data``, the section of a checkpoint's job, or the one at ``regions``.

    Raises:
        CheckpointError: it holds features of another kind than those of the training.
        DataError: it is not there, or damaged.
    """
    allow = data.allow_other_features or None
    return open_store(trained.checkpoint, data, regions, Verifier(data.cache), allow_other=allow)


def _dumped(
    results: RowResults,
    rows: PictureRows,
    job: VisualJob,
    answers: AnswerTable | None,
    predictions: Path | None,
    files: Sequence[Path],
) -> dict[str, float]:
    """Write the result file (for a moment, if none is wanted) and score it, where the rows come from files."""
    with TemporaryDirectory(prefix="capt-predictions-") as folder:
        if predictions is None and not files:
            return {}
        dump = predictions or Path(folder) / "predictions"
        write_dump(results, rows, job.data, answers, dump, files)
        if predictions is not None:
            logger.info("%s: %s", predictions, counted(len(rows), "prediction"))
        if not files:
            return {}
        figures = check_predictions(dump, files).figures
        for name, reason in figures.missing.items():
            logger.info("no %s: %s", name, reason)
        return figures.scores

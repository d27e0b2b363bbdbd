"""Losses, answers and metrics of the model's outputs on questions and statements about pictures.

The metrics are those of training: VQA's by the soft scores, GQA's over the balanced questions.
`capt.finetune.visual.evaluate` gives the official ones.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from capt.finetune.batches import Batch
from capt.finetune.evaluation import RowResults
from capt.finetune.metrics import compute_metrics
from capt.finetune.visual.config import VisualTask
from capt.finetune.visual.dumps import StatementFile, result_file
from capt.finetune.visual.rows import PictureInputs, PictureRows, SoftTargets


class AnswerObjective:
    """Questions: binary cross entropy of every answer's soft score (Teney et al. 2018), summed over the answers.

    LXMERT writes it as the mean over all answers times their number.
    """

    def __init__(self, task: VisualTask) -> None:
        self.task = task

    @property
    def metric(self) -> str:
        """The metric that selects models."""
        return self.task.metrics[0]

    def loss(self, outputs: Float[Tensor, "n answers"], labels: Float[Tensor, "n answers"]) -> Float[Tensor, ""]:
        """The mean over the questions of the sum over all answers."""
        return F.binary_cross_entropy_with_logits(outputs, labels) * outputs.shape[1]

    def row_results(self, outputs: Float[Tensor, "n answers"], batch: Batch[PictureInputs]) -> dict[str, Tensor]:
        """The best answer of each row alone, since a table has thousands, and the row's loss."""
        results = {"answer": outputs.argmax(1)}
        if batch.labels is not None:
            losses = F.binary_cross_entropy_with_logits(outputs, batch.labels, reduction="none")
            results["loss"] = losses.sum(1)
        return results

    def metrics(self, results: RowResults, rows: PictureRows) -> dict[str, float]:
        """``loss``; ``accuracy``: the mean soft score of the chosen answers (0 where the file has no such answer).

        ``degenerate`` is 1 where all answers are the same, ``baseline`` the accuracy of the best constant answer.
        Accuracy and baseline are over the rows that count (`capt.pretrain.vision_language.data.examples.Example`).
        """
        targets = rows.targets
        assert isinstance(targets, SoftTargets), "only labelled rows are measured"
        answer: Int64[np.ndarray, " n"] = results["answer"]
        counts = np.array([row.counts for row in rows.examples])
        # Questions that do not count give the best constant answer nothing.
        scores = targets.scores * np.repeat(counts, np.diff(targets.starts))
        totals = np.bincount(targets.ids, weights=scores, minlength=1)
        return {
            "loss": float(results["loss"].mean()),
            "accuracy": float(targets.scores_of(answer)[counts].mean(dtype=np.float64)),
            "degenerate": float(np.ptp(answer) == 0),
            "baseline": float(totals.max() / counts.sum()),
        }


class TruthObjective:
    """Statements: cross entropy of the classes false and true."""

    def __init__(self, task: VisualTask) -> None:
        self.task = task

    @property
    def metric(self) -> str:
        """The metric that selects models."""
        return self.task.metrics[0]

    def loss(self, outputs: Float[Tensor, "n 2"], labels: Int64[Tensor, " n"]) -> Float[Tensor, ""]:
        """Mean cross entropy."""
        return F.cross_entropy(outputs, labels)

    def row_results(self, outputs: Float[Tensor, "n 2"], batch: Batch[PictureInputs]) -> dict[str, Tensor]:
        """The class of each row, and its loss."""
        results = {"answer": outputs.argmax(1)}
        if batch.labels is not None:
            results["loss"] = F.cross_entropy(outputs, batch.labels, reduction="none")
        return results

    def metrics(self, results: RowResults, rows: PictureRows) -> dict[str, float]:
        """``loss``, ``accuracy``, ``consistency``, and what `capt.finetune.metrics.compute_metrics` adds."""
        targets: Any = rows.targets
        assert isinstance(targets, np.ndarray), "only labelled rows are measured"
        answer = results["answer"]
        return {
            "loss": float(results["loss"].mean()),
            **compute_metrics(["accuracy"], answer, targets),
            **cast(StatementFile, result_file(self.task)).scores(truths(results, rows), rows.examples, self.task.key),
        }


def truths(results: RowResults, rows: PictureRows) -> dict[str, bool]:
    """Return the prediction for each statement by its identifier."""
    return {str(row.id): bool(answer) for row, answer in zip(rows.examples, results["answer"], strict=True)}


def objective_of(task: VisualTask) -> AnswerObjective | TruthObjective:
    """The objective of a task."""
    return AnswerObjective(task) if task.answers else TruthObjective(task)

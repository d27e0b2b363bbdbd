"""The objective of a fine-tuning task, evaluation over all rows on all ranks, and the result of ``capt evaluate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from capt.finetune.batches import Batch, RowSet, evaluation_batches
from capt.finetune.load import FineTuned
from capt.pretrain.base import distributed
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.engine.evaluations import write_result
from capt.pretrain.engine.provenance import provenance

# What a fine-tuning task makes of its module's outputs: a loss to train on, and metrics of whole data sets.


RowResults = Mapping[str, np.ndarray]
"""Arrays that an evaluation keeps, by name; the rows of the data are the first axis of each."""


@runtime_checkable
class Objective(Protocol):
    """The outputs' meaning. It needs no data and no run, so that training and ``capt evaluate`` share one."""

    @property
    def metric(self) -> str:
        """The metric that selects models."""
        ...

    def loss(self, outputs: Any, labels: Any) -> Tensor:
        """The mean loss over the examples of a batch: a scalar with a gradient."""
        ...

    def row_results(self, outputs: Any, batch: Batch[Any]) -> dict[str, Tensor]:
        """Return the results of each row for the metrics and predictions, rows first: logits, or the best answer alone.

        Every rank gets the results of all rows in host memory, so that a task with thousands of outputs keeps few.
        """
        ...

    def metrics(self, results: RowResults, rows: Any) -> dict[str, float]:
        """The metrics of a whole data set, from the results of its rows and the data set (the task's own `RowSet`)."""
        ...


Keep = Callable[[Any, Batch[Any]], dict[str, Tensor]]
"""Takes from the outputs of a batch what is kept of its rows, as `Objective.row_results`."""
_Share = list[tuple[Any, dict[str, Any]]]


def results_of_all_rows(
    model: Callable[..., Any],
    rows: RowSet,
    objective: Objective,
    size: int,
    device: torch.device,
    progress: ProgressCallback | None = None,
) -> RowResults:
    """`Objective.row_results` of every row, in the order of the rows, the same on every rank.

    Each rank computes its share of the rows, and no row is computed twice. Collective.

    Args:
        model: a module in evaluation mode, or the engine around one.
        rows: the data set.
        objective: what to keep of a row.
        size: rows a forward pass.
        device: where the model is.
        progress: told how many rows this rank has done.

    Returns:
        Arrays by name, the rows first.
    """
    ranks = distributed.world_size(), distributed.rank()
    share = _results(model, rows, objective.row_results, size, device, *ranks, progress)
    return _in_order(list(chain(*distributed.gather_objects(share))))


def results_of_rows(model: Callable[..., Any], rows: RowSet, keep: Keep, size: int, device: torch.device) -> RowResults:
    """The same of rows that this rank computes alone: what ``keep`` takes of each, in their order."""
    return _in_order(_results(model, rows, keep, size, device, 1, 0, None))


@torch.no_grad()
def _results(
    model: Callable[..., Any], rows: RowSet, keep: Keep, size: int, device: torch.device, world: int, rank: int,
    progress: ProgressCallback | None,
) -> _Share:  # fmt: skip
    """The numbers and results of the rows of each batch of a rank."""
    share: _Share = []
    done = 0
    for numbers, batch in evaluation_batches(rows, size, world, rank):
        batch = batch.to(device)
        results = keep(model(*batch.inputs), batch)
        # A rank that has run out of rows goes along with the last batch again, of which it keeps nothing.
        share.append((numbers, {name: x[: len(numbers)].cpu().numpy() for name, x in results.items()}))
        done += len(numbers)
        if progress is not None:
            progress(done, len(rows))
    return share


def _in_order(share: Sequence[Any]) -> RowResults:
    """Join the batches of all ranks, which arrive as lists."""
    numbers = np.concatenate([each[0] for each in share])
    ordered = {}
    # The rows were sorted by length, and may have been dealt out to ranks: back into their own order.
    for name in share[0][1]:
        values = np.concatenate([each[1][name] for each in share])
        ordered[name] = np.empty_like(values)
        ordered[name][numbers] = values
    return ordered


def evaluate_sets(
    model: Callable[..., Any],
    sets: Mapping[str, RowSet],
    objective: Objective,
    size: int,
    device: torch.device,
    progress: ProgressCallback | None = None,
) -> dict[str, float]:
    """The metrics of every data set, their names followed by the set's suffix (the key in ``sets``). Collective.

    Arguments are those of `results_of_all_rows`.
    """
    metrics: dict[str, float] = {}
    for suffix, rows in sets.items():
        results = results_of_all_rows(model, rows, objective, size, device, progress)
        metrics |= {f"{name}{suffix}": value for name, value in objective.metrics(results, rows).items()}
    return metrics


@dataclass(frozen=True)
class EvaluationSets:
    """The data that ``capt evaluate`` measures a checkpoint on.

    Attributes:
        task: the name of the task, or of what is measured, in the result.
        sets: data sets by the suffix of their metrics, as `evaluate_sets` takes them.
        objective: of the task.
        counts: further numbers beside those of rows, by name.
    """

    task: str
    sets: Mapping[str, RowSet]
    objective: Objective
    counts: Mapping[str, int] = field(default_factory=dict)


def evaluate_checkpoint(
    trained: FineTuned[Any, Any],
    sets: EvaluationSets,
    *,
    out: Path | None = None,
    batch: int = 32,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """The metrics of a loaded checkpoint on its dev sets, on one process.

    Args:
        trained: the checkpoint; its model is moved to this process's device.
        sets: what it is measured on.
        out: a JSON file to write the result to as well.
        batch: rows a forward pass.
        progress: called with the rows done and their number, for each set.

    Returns:
        ``checkpoint``, ``task``, ``rows`` (by set: ``dev``, then a suffix), ``metrics`` and ``versions``.
    """
    device = distributed.device()
    model = trained.model.to(device)
    metrics = evaluate_sets(model, sets.sets, sets.objective, batch, device, progress)
    counts = {**sets.counts, **{f"dev{suffix}": len(rows) for suffix, rows in sets.sets.items()}}
    return evaluation_result(trained.checkpoint, sets.task, counts, metrics, out)


def evaluate_command(
    load: Callable[[Path], FineTuned[Any, Any]], read: Callable[[FineTuned[Any, Any], Path | None], EvaluationSets]
) -> Callable[..., dict[str, Any]]:
    """Return the function that ``capt evaluate`` calls for a task of texts.

    Args:
        load: loads a checkpoint of the task, or the best one of a run.
        read: reads the data sets of a checkpoint from a file or folder; from None those that its run held out.
    """

    def command(
        checkpoint: Path | FineTuned[Any, Any],
        *,
        data: Path | None = None,
        out: Path | None = None,
        batch: int = 32,
        progress: ProgressCallback | None = None,
    ) -> dict[str, Any]:
        """The metrics of a checkpoint, a run (its best one), or a model that is loaded already (`evaluate_checkpoint`).

        Raises:
            CheckpointError: there is no such checkpoint of the task.
            DataError: the data cannot be read.
        """
        trained = checkpoint if isinstance(checkpoint, FineTuned) else load(checkpoint)
        return evaluate_checkpoint(trained, read(trained, data), out=out, batch=batch, progress=progress)

    return command


def evaluation_result(
    checkpoint: Path, task: str, rows: Mapping[str, int], metrics: Mapping[str, float], out: Path | None = None
) -> dict[str, Any]:
    """Build the result of `evaluate_checkpoint` from metrics on data sets of ``rows`` rows, and write it to ``out``."""
    result = {
        "checkpoint": str(checkpoint),
        "task": task,
        "rows": dict(rows),
        "metrics": dict(metrics),
        "versions": provenance(),
    }
    if out is not None:
        write_result(out, result)
    return result


def as_text(result: dict[str, Any]) -> str:
    """The result of `evaluate_checkpoint` for people."""
    rows = ", ".join(f"{name} {count:,} rows" for name, count in result["rows"].items())
    lines = [f"checkpoint {result['checkpoint']}", "", f"{result['task']} ({rows})"]
    metrics = [f"  {name:<24}{value:>12.4f}" for name, value in result["metrics"].items()]
    return "\n".join(lines + (metrics or ["  no metric: the rows have no labels"]))

"""The objective of a fine-tuning task, evaluation over all rows on all ranks, and the result of ``capt evaluate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from capt.pretrain.engine.provenance import provenance
from capt.pretrain.engine.run_folder import write_result

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


@torch.no_grad()
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
    shares: list[tuple[Any, dict[str, Any]]] = []
    done = 0
    for numbers, batch in evaluation_batches(rows, size, distributed.world_size(), distributed.rank()):
        batch = batch.to(device)
        results = objective.row_results(model(*batch.inputs), batch)
        # A rank that has run out of rows goes along with the last batch again, of which it keeps nothing.
        shares.append((numbers, {name: x[: len(numbers)].cpu().numpy() for name, x in results.items()}))
        done += len(numbers)
        if progress is not None:
            progress(done, len(rows))
    gathered = list(chain(*distributed.gather_objects(shares)))
    numbers = np.concatenate([share[0] for share in gathered])
    ordered = {}
    # The rows were sorted by length and dealt out to the ranks: back into their own order.
    for name in gathered[0][1]:
        values = np.concatenate([share[1][name] for share in gathered])
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


def evaluate_checkpoint(
    trained: FineTuned[Any, Any],
    sets: Mapping[str, RowSet],
    objective: Objective,
    *,
    task: str,
    out: Path | None = None,
    batch: int = 32,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """The metrics of a loaded checkpoint on its dev sets, on one process.

    Args:
        trained: the checkpoint; its model is moved to this process's device.
        sets: data sets by the suffix of their metrics, as `evaluate_sets` takes them.
        objective: of the task.
        task: the task's name for the result.
        out: a JSON file to write the result to as well.
        batch: rows a forward pass.
        progress: called with the rows done and their number, for each set.

    Returns:
        ``checkpoint``, ``task``, ``rows`` (by set: ``dev``, then a suffix), ``metrics`` and ``versions``.
    """
    device = distributed.device()
    model = trained.model.to(device)
    metrics = evaluate_sets(model, sets, objective, batch, device, progress)
    counts = {f"dev{suffix}": len(rows) for suffix, rows in sets.items()}
    return evaluation_result(trained.checkpoint, task, counts, metrics, out)


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

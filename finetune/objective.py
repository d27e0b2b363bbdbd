"""What a fine-tuning task makes of its module's outputs: a loss to train on, and metrics of whole data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from finetune.batches import Batch

RowResults = Mapping[str, np.ndarray]
"""What an evaluation keeps of every row, by name; the rows are the first axis of each array."""


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
        """What to keep of each row for the metrics and predictions, rows first: logits, or the best answer alone.

        Every rank gets the results of all rows in host memory, so that a task with thousands of outputs keeps few.
        """
        ...

    def metrics(self, results: RowResults, rows: Any) -> dict[str, float]:
        """The metrics of a whole data set, from the results of its rows and the data set (the task's own `RowSet`)."""
        ...

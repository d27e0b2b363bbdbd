"""The losses of rerankers: what the candidates of a query need for each, and the function. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ListLoss:
    """A loss of the candidates of each query.

    Attributes:
        about: what it compares, for the description of ``loss.type``.
        function: its name in `capt.finetune.rerank.objective`, from `Listed` candidates to one loss a query.
        needs: what a query must have: a ``positive``, a ``negative``, a ``teacher``'s scores of its candidates. One
            without a positive or a negative is left out.
        scaled: ``loss.temperature`` divides its scores.
    """

    about: str
    function: str
    needs: frozenset[Literal["positive", "negative", "teacher"]]
    scaled: bool = False


_BOTH: frozenset[Literal["positive", "negative", "teacher"]] = frozenset({"positive", "negative"})

LOSSES = {
    "infonce": ListLoss("softmax over a positive and the negatives", "list_info_nce", _BOTH, scaled=True),
    "bce": ListLoss("binary cross-entropy of each candidate", "binary_cross_entropy", frozenset()),
    "mse": ListLoss("squared error of a teacher's scores", "squared_error", frozenset({"teacher"})),
    "margin_mse": ListLoss(
        "squared error of a teacher's margins of positive and negatives", "squared_margins", _BOTH | {"teacher"}
    ),
    "kl": ListLoss(
        "divergence from a teacher's softmax over the candidates", "divergence", frozenset({"teacher", "negative"}),
        scaled=True,
    ),
}  # fmt: skip
"""The values of ``loss.type``."""

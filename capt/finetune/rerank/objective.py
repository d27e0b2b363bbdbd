r"""Losses of a query's candidates, and the figures of their order.

``s`` are the scores of the candidates of a query, ``t`` a teacher's, ``P`` its positives and ``N`` its negatives. Each
function returns one loss a query; a query's loss does not depend on the other queries of a step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from capt.finetune.batches import Batch, TextInputs
from capt.finetune.evaluation import RowResults
from capt.finetune.rerank.config import METRICS, STORED, RerankJob
from capt.finetune.rerank.groups import CandidateList, CandidateRows
from capt.finetune.rerank.losses import LOSSES
from capt.pretrain.retrieval.metrics import query_metrics


@dataclass(frozen=True)
class Listed:
    """Candidates of ``g`` queries, a row a query, filled up to the longest list.

    Attributes:
        s: their scores, of any value where there is no candidate.
        real: where there is one.
        positive: the positives among them.
        t: a teacher's scores.
    """

    s: Float[Tensor, "g k"]
    real: Bool[Tensor, "g k"]
    positive: Bool[Tensor, "g k"]
    t: Float[Tensor, "g k"]

    @classmethod
    def of(cls, scores: Float[Tensor, " n"], candidates: CandidateList) -> Listed:
        """Lay the scores of candidates, which are in the order of their queries, in rows."""
        counts = np.diff(_cuts(candidates.groups))
        row = np.repeat(np.arange(len(counts)), counts)
        column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        place = tuple(torch.from_numpy(each).to(scores.device) for each in (row, column))

        def laid(values: Tensor) -> Tensor:
            return values.new_zeros(len(counts), int(counts.max())).index_put(place, values)

        def there(values: np.ndarray, dtype: torch.dtype) -> Tensor:
            return laid(torch.from_numpy(values).to(scores.device, dtype))

        real = laid(torch.ones_like(scores, dtype=torch.bool))
        return cls(laid(scores), real, there(candidates.positive, torch.bool), there(candidates.teacher, scores.dtype))

    @property
    def negative(self) -> Bool[Tensor, "g k"]:
        """The negatives."""
        return self.real & ~self.positive


def list_info_nce(x: Listed, temperature: float) -> Float[Tensor, " g"]:
    r"""Return :math:`-\frac{1}{|P|} \sum_{p \in P} \log \frac{e^{s_p / \tau}}{e^{s_p / \tau} + \sum_{n \in N} e^{s_n /
    \tau}}`: each positive against the negatives."""
    s = x.s / temperature
    negatives = s.masked_fill(~x.negative, -math.inf).logsumexp(1, keepdim=True)
    return _mean(torch.logaddexp(s, negatives) - s, x.positive)


def binary_cross_entropy(x: Listed, temperature: float) -> Float[Tensor, " g"]:
    r"""Return the mean of :math:`-\log \sigma(s)` over positives and :math:`-\log \sigma(-s)` over negatives."""
    losses = F.binary_cross_entropy_with_logits(x.s, x.positive.to(x.s.dtype), reduction="none")
    return _mean(losses, x.real)


def squared_error(x: Listed, temperature: float) -> Float[Tensor, " g"]:
    """Return the mean of :math:`(s - t)^2`."""
    return _mean((x.s - x.t).square(), x.real)


def squared_margins(x: Listed, temperature: float) -> Float[Tensor, " g"]:
    r"""Return the mean of :math:`((s_p - s_n) - (t_p - t_n))^2` over positives and negatives (arXiv:2010.02666)."""
    # With d = s - t the margin's error is d_p - d_n. The mean over all pairs of its square, without making the pairs:
    d = x.s - x.t
    p, n = (_mean(d, mask)[:, None] for mask in (x.positive, x.negative))
    spread = _mean((d - p).square(), x.positive) + _mean((d - n).square(), x.negative)
    return spread + (p - n)[:, 0].square()


def divergence(x: Listed, temperature: float) -> Float[Tensor, " g"]:
    r"""Return :math:`\mathrm{KL}(\mathrm{softmax}(t / \tau) \| \mathrm{softmax}(s / \tau))`."""
    log_s, log_t = (
        (each / temperature).masked_fill(~x.real, -math.inf).log_softmax(1).masked_fill(~x.real, 0.0)
        for each in (x.s, x.t)
    )
    return (log_t.exp() * (log_t - log_s)).masked_fill(~x.real, 0.0).sum(1)


def _mean(values: Float[Tensor, "g k"], mask: Bool[Tensor, "g k"]) -> Float[Tensor, " g"]:
    return values.masked_fill(~mask, 0.0).sum(1) / mask.sum(1)


class RerankObjective:
    """The loss of a job, and nDCG@10 and MRR@10 of the candidates of held-out queries (`Objective`)."""

    metric = METRICS[0]

    def __init__(self, job: RerankJob) -> None:
        self._temperature = job.loss.temperature
        self._reads_teacher = "teacher" in LOSSES[job.loss.type].needs
        self._function: Callable[..., Tensor] = globals()[LOSSES[job.loss.type].function]

    def losses(self, scores: Float[Tensor, " n"], candidates: CandidateList) -> Float[Tensor, " g"]:
        """The loss of each query; candidates of a query are one after another."""
        return self._function(Listed.of(scores, candidates), self._temperature)

    def loss(self, outputs: Float[Tensor, "n 1"], labels: CandidateList) -> Float[Tensor, ""]:
        """The mean loss of the queries of a batch."""
        return self.losses(outputs[:, 0], labels).mean()

    def row_results(self, outputs: Float[Tensor, "n 1"], batch: Batch[TextInputs]) -> dict[str, Tensor]:
        """The ``scores`` of each pair."""
        return {"scores": outputs[:, 0]}

    def metrics(self, results: RowResults, rows: CandidateRows) -> dict[str, float]:
        """The means of the figures, beside those of the scores that the rows have, and of the loss if it is defined."""
        candidates, scores = rows.candidates, results["scores"]
        figures = [_figures(candidates, scores)]
        report = dict(zip(METRICS, figures[0], strict=True))
        if rows.is_scored:
            report |= dict(zip(STORED, _figures(candidates, candidates.teacher), strict=True))
        if self._reads_teacher and np.isnan(candidates.teacher).any():
            return report
        losses = self.losses(torch.from_numpy(scores.astype(np.float64)), candidates)
        return {"loss": float(losses.mean()), **report}


def _figures(candidates: CandidateList, scores: Float[np.ndarray, " n"]) -> list[float]:
    """The means of `METRICS` over queries with a positive, of the order that ``scores`` give to the candidates of each.

    nDCG reads grades, and MRR the place of the first positive: a grade may be above 0 and no positive's.
    """
    found = []
    for part in itertools.starmap(slice, itertools.pairwise(_cuts(candidates.groups))):
        # Positives have the lower numbers, so that of equal scores a negative comes first.
        names = [f"{number:012d}" for number in range(part.stop - part.start)]
        order = sorted(zip(scores[part].tolist(), names, strict=True), reverse=True)
        if not candidates.positive[part].any():
            continue
        ranking = [name for _, name in order]
        judgements: list[dict[str, Any]] = [
            dict(zip(names, values[part].tolist(), strict=True)) for values in (candidates.gains, candidates.positive)
        ]
        found.append([query_metrics(ranking, each)[name] for name, each in zip(METRICS, judgements, strict=True)])
    return [math.fsum(each) / len(found) for each in zip(*found, strict=True)] if found else [0.0] * len(METRICS)


def _cuts(groups: Int64[np.ndarray, " n"]) -> list[int]:
    """Return the places at which the candidates of each query begin, and the end of the last."""
    return [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]

"""Metrics of representations, what is collected for them over batches and ranks, and diagnostics of a step.

The functions are exact for any number of processes. Each takes all N rows on every rank (from
``PairAccumulator.gather``), divides the N queries over the ranks, and returns the same float on all of them: every rank
must call it. They compute in float64, because the differences between texts in an anisotropic encoder are lost in
float32, and on one block of queries x keys at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from capt.pretrain.base import distributed
from capt.pretrain.base.distributed import all_reduce_max, all_reduce_sum, device, gather_ragged, rank, world_size
from capt.pretrain.base.errors import DataError

_SAMPLE = 256
"""Rows of a step over all ranks: enough for both figures, and their Gram matrix is small."""
_MAX_SIMILARITIES = 2**22  # in memory at a time: 32 MiB in float64
_TIE_TOLERANCE = 1e-9  # cosines closer than this are equal: float64 rounding of equal rows is 1e-15


def contrastive_loss(s: Float[Tensor, "n d"], s_hat: Float[Tensor, "n d"], temperature: float) -> float:
    r"""The CAPT loss (Eq. 2-4, mean form, no queue) of N pairs at one fixed temperature.

    ``(1/N) sum_i [L(x_i) + L(x^_i)]`` where ``L(x_i) = -log(e^{s_i.s^_i/tau} / (e^{s_i.s^_i/tau} +
    sum_{j != i} [e^{s_i.s_j/tau} + e^{s_i.s^_j/tau}]))``. It grows with N (its value at chance is ``2 log(2N-1)``),
    so compare it at equal N and tau only. During training the temperature moves the floor of the loss; here it does
    not.

    Raises:
        ValueError: rows without unit norm, or fewer than two pairs.
    """
    s, s_hat = _unit_rows(s), _unit_rows(s_hat)
    total = s.new_zeros(())
    for anchors, positives in ((s, s_hat), (s_hat, s)):
        for rows in _query_blocks(len(s), 2 * len(s)):
            own_view = anchors[rows] @ anchors.T / temperature
            # Anchor i of the block is row rows.start + i of all: that diagonal is the anchor itself, no negative.
            own_view.diagonal(rows.start).fill_(-torch.inf)
            other_view = anchors[rows] @ positives.T / temperature
            denominator = torch.cat((own_view, other_view), dim=1).logsumexp(dim=1)
            total += (denominator - other_view.diagonal(rows.start)).sum()
    return float(all_reduce_sum(total)) / len(s)


def retrieval_accuracy(queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"]) -> float:
    """Share of queries whose own key (same row) has the highest cosine among all N keys; chance is 1/N.

    Where k keys tie for the highest cosine, the own key counts as 1/k of a hit, so that a collapsed encoder scores
    chance and the order of the rows does not matter.

    Raises:
        ValueError: rows without unit norm, or fewer than two pairs.
    """
    return _top1(_unit_rows(queries), _unit_rows(keys))


def alignment(s: Float[Tensor, "n d"], s_hat: Float[Tensor, "n d"]) -> float:
    """``E ||s_i - s^_i||^2`` over the positive pairs (Wang and Isola 2020, alpha = 2), in [0, 4]; lower is closer.

    Raises:
        ValueError: rows without unit norm, or fewer than two pairs.
    """
    return float((_unit_rows(s) - _unit_rows(s_hat)).square().sum(dim=1).mean())


def uniformity(s: Float[Tensor, "n d"]) -> float:
    """``log E exp(-2 ||s_i - s_j||^2)`` over all pairs i != j (Wang and Isola 2020, t = 2); 0 is collapse.

    One sum over all pairs: a mean of logs per batch is biased upwards. Rows drawn uniformly from the sphere in d
    dimensions give ``-4 + 8/d`` up to O(1/d^2).

    Raises:
        ValueError: rows without unit norm, or fewer than two rows.
    """
    s = _unit_rows(s)
    total = s.new_zeros(())
    for rows in _query_blocks(len(s), len(s)):
        # ||a - b||^2 = 2 - 2 a.b: each term lies in [e^-8, 1], so the float64 sum needs no running maximum
        terms = (4 * (s[rows] @ s.T - 1)).exp_()
        total += terms.sum() - terms.diagonal(rows.start).sum()
    return float((all_reduce_sum(total) / (len(s) * (len(s) - 1))).log())


def first_direction(s: Float[Tensor, "n d"]) -> float:
    r"""Share of the rows' sum of squares that lies in their first principal direction, 1/min(n, d) to 1.

    The largest eigenvalue of :math:`S^\top S` over its trace. Rows are **not** centred: so it is 1 both where all rows
    are one point and where all lie on one line, and an even spread has about 1/d.

    Raises:
        ValueError: rows without unit norm, or fewer than two rows.
    """
    s = _unit_rows(s)
    if len(s) <= s.shape[1]:
        products = s @ s.T  # has the same eigenvalues but for zeros
    else:
        # Each rank's rows add up to a part of the d x d matrix.
        mine = s[slice(*_share(len(s)))]
        products = all_reduce_sum(mine.T @ mine)
    return float(torch.linalg.eigvalsh(products)[-1]) / len(s)


def noise_invariance(z: Float[Tensor, "n d"], z_hat: Float[Tensor, "n d"]) -> dict[str, float]:
    r"""Measure how close an encoder keeps a corrupted text to its original, comparable between any two encoders.

    ``z`` are raw representations (any scale), so an MLM-only encoder and a CAPT encoder compare without the
    projection head that only one of them has trained. With ``u = z/||z||`` and the expectation over random pairs
    taken over all i != j:

    - ``cosine_gap = E_i u_i.u^_i - E_{i != j} u_i.u^_j``: how much closer the own corruption is than another text's.
      An anisotropic encoder (all cosines near 1) has a small gap whatever it does.
    - ``centred_gap``: the same after subtracting the mean of all 2N rows, which removes the common direction: 1 when
      corruption moves nothing, 0 when it leaves no trace of the text.
    - ``drift = E_i ||z_i - z^_i||^2 / E_{i != j} ||z_i - z^_j||^2``: the distance corruption moves a text, in units of
      the distance between texts; unchanged by shifts and scale. 0 is invariant, 1 is no better than another text.
    - ``top1``: `retrieval_accuracy` on the centred rows, mean of both directions. A representation of very few
      directions (say, only the length) can be invariant; it cannot tell N texts apart.

    A constant encoder has gaps 0, drift 1 and top1 1/N.

    Raises:
        ValueError: fewer than two pairs.
    """
    z, z_hat = _as_float64(z), _as_float64(z_hat)
    mean = (z.mean(dim=0) + z_hat.mean(dim=0)) / 2
    u, u_hat = F.normalize(z, dim=1), F.normalize(z_hat, dim=1)
    c, c_hat = F.normalize(z - mean, dim=1), F.normalize(z_hat - mean, dim=1)
    own = (z - z_hat).square().sum(dim=1).mean()
    # E_{i != j} ||z_i - z^_j||^2 on centred rows, where the squares do not cancel
    spread = (z - mean).square().sum(dim=1).mean() + (z_hat - mean).square().sum(dim=1).mean()
    random = spread - 2 * _mean_product_of_random_pairs(z - mean, z_hat - mean)
    return {
        "cosine_gap": float((u * u_hat).sum(dim=1).mean() - _mean_product_of_random_pairs(u, u_hat)),
        "centred_gap": float((c * c_hat).sum(dim=1).mean() - _mean_product_of_random_pairs(c, c_hat)),
        "drift": float(own / random) if random > 0 else 1.0,
        "top1": (_top1(c, c_hat) + _top1(c_hat, c)) / 2,
    }


def _as_float64(x: Tensor) -> Tensor:
    if len(x) < 2:
        raise ValueError(f"at least two rows are needed, got {len(x)}")
    return x.detach().double()


def _unit_rows(x: Tensor) -> Tensor:
    """Float64 rows, normalised to the last digit. Raises ``ValueError`` for rows far from unit norm."""
    x = _as_float64(x)
    norms = x.norm(dim=1, keepdim=True)
    # Not `>=`: NaN must be refused, too.
    if not bool((norms - 1).abs().max() < 1e-2):
        low, high = norms.min().item(), norms.max().item()
        raise ValueError(f"rows must have unit L2 norm, got norms from {low:.4g} to {high:.4g}")
    return x.div(norms)


def _top1(queries: Tensor, keys: Tensor) -> float:
    hits = queries.new_zeros(())
    for rows in _query_blocks(len(queries), len(keys)):
        scores = queries[rows] @ keys.T
        highest = scores.amax(dim=1)
        is_hit = scores.diagonal(rows.start) >= highest - _TIE_TOLERANCE
        tied = (scores >= highest.unsqueeze(1) - _TIE_TOLERANCE).sum(dim=1)
        hits += (is_hit.double() / tied).sum()
    return float(all_reduce_sum(hits)) / len(queries)


def _mean_product_of_random_pairs(a: Tensor, b: Tensor) -> Tensor:
    """``E_{i != j} a_i.b_j`` in O(n d): the product of the sums has every pair; the pairs i = j are subtracted."""
    return (a.sum(dim=0) @ b.sum(dim=0) - (a * b).sum()) / (len(a) * (len(a) - 1))


def _query_blocks(n: int, keys: int) -> Iterator[slice]:
    """This rank's part of n query rows, in blocks that stay below ``_MAX_SIMILARITIES`` against ``keys`` keys."""
    start, stop = _share(n)
    size = max(1, _MAX_SIMILARITIES // keys)
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _share(n: int) -> tuple[int, int]:
    """First and last place (exclusive) of this rank's part of n rows."""
    return n * rank() // world_size(), n * (rank() + 1) // world_size()


class PairAccumulator:
    """The rows of both views in the validation batches of this rank; ranks may hold different numbers of rows."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def update(self, x: Float[Tensor, "b d"], x_hat: Float[Tensor, "b d"]) -> None:
        """Add a batch: row i of ``x_hat`` represents the corruption of the text of row i of ``x``."""
        self._rows.append(torch.stack((x.detach().float(), x_hat.detach().float()), dim=1))

    def gather(self) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
        """All ranks' rows of both views, on every rank (collective; N x d floats twice).

        Raises:
            DataError: there are fewer than two pairs on all ranks together.
        """
        rows = torch.cat(self._rows) if self._rows else torch.zeros(0, 2, 0, device=device())
        width = int(all_reduce_max(torch.tensor(rows.shape[2], device=rows.device)))
        pairs, _ = gather_ragged(rows if len(rows) else rows.new_zeros(0, 2, width))  # a rank may have seen no batch
        if len(pairs) < 2:
            raise DataError(f"validation needs at least two sequences to compare, got {len(pairs)}")
        return pairs[:, 0], pairs[:, 1]


class RowSample:
    """Some rows of a training step, to see how they are spread: the first of each rank, `_SAMPLE` of all ranks.

    Of more ranks than that the first ones give a row each.
    """

    def __init__(self) -> None:
        self._room = (_SAMPLE + world_size() - 1 - rank()) // world_size()
        self._rows: list[Tensor] = []

    def update(self, rows: Float[Tensor, "b d"]) -> None:
        """Add unit rows of this rank; those beyond its part of the sample are left out."""
        self._rows.append(rows.detach()[: self._room].float())
        self._room -= len(self._rows[-1])

    def compute(self) -> dict[str, float]:
        """``uniformity`` and ``first_direction`` of the rows of all ranks (collective; N x d floats).

        Rows that are not finite (fp16 overflow) do not count. Of fewer than two rows both are NaN.
        """
        rows, _ = gather_ragged(torch.cat(self._rows))
        rows = rows[rows.isfinite().all(dim=1)]
        if len(rows) < 2:
            return {"uniformity": math.nan, "first_direction": math.nan}
        return {"uniformity": uniformity(rows), "first_direction": first_direction(rows)}


class MaskedTokenAccumulator:
    """Sums of the MLM loss and of right predictions over masked tokens, so that every masked token weighs the same."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device())

    def update(self, loss_sum: Float[Tensor, ""], correct: Shaped[Tensor, ""], count: Shaped[Tensor, ""]) -> None:
        """Add the sums of a batch: the cross entropy in nats, the right predictions, the masked tokens."""
        self._sums += torch.stack((loss_sum.detach().double(), correct.double(), count.double()))

    def totals(self) -> tuple[float, float, float]:
        """The three sums over all ranks (collective). Raises ``DataError``: no token was masked on any rank."""
        loss, correct, count = all_reduce_sum(self._sums).tolist()
        if count == 0:
            raise DataError("validation saw no masked token: the corruption masks none, or the texts are too short")
        return loss, correct, count


class ContrastStats:
    """Means over this rank's anchors since the object was made; `over_ranks` gives those over all anchors.

    Pass one as ``stats`` to the loss. It costs one more pass over the logits, so pass it on the steps that are logged.
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64)

    def update(
        self,
        positive_probability: Float[Tensor, " m"],
        margin: Float[Tensor, " m"],
        effective_negatives: Float[Tensor, " m"],
    ) -> None:
        """Add a batch: per anchor, the softmax weight of its positive, by how much its cosine to the positive exceeds
        that to the nearest negative, and its `effective_number` of negatives."""
        each = (torch.ones_like(margin), positive_probability, margin > 0, margin, effective_negatives)
        # Made on the host; the first batch moves the sums to its device.
        self._sums = self._sums.to(margin.device) + torch.stack([values.double().sum() for values in each])

    def over_ranks(self, group: distributed.Group = None) -> ContrastStats:
        """The statistics of the anchors of all ranks, each anchor counting once (collective: five numbers)."""
        whole = ContrastStats()
        whole._sums = distributed.all_reduce_sum(self._sums, group)
        return whole

    @property
    def anchors(self) -> int:
        """Number of anchors so far."""
        return int(self._sums[0])

    @property
    def positive_probability(self) -> float:
        """Mean softmax weight of the positive, 0 to 1."""
        return self._mean(1)

    @property
    def top1(self) -> float:
        """Share of the anchors that retrieve their positive first among all keys of the loss, 0 to 1."""
        return self._mean(2)

    @property
    def margin(self) -> float:
        """Mean of the anchors' cosine to their positive less that to their nearest negative, -2 to 2."""
        return self._mean(3)

    @property
    def effective_negatives(self) -> float:
        """Mean over the anchors of the `effective_number` of their negatives."""
        return self._mean(4)

    def _mean(self, column: int) -> float:
        return float(self._sums[column] / self._sums[0].clamp_min(1))


def effective_number(total: Float[Tensor, " m"], squares: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    r"""Over how many negatives the softmax of each anchor is spread, Kish's effective sample size.

    .. math:: \frac{(\sum_j u_{ij})^2}{\sum_j u_{ij}^2}, \qquad u_{ij} = e^{q_i \cdot k_j / \tau}

    over all negatives of the loss, live and queued, on all ranks; where queued rows are weighted, with their weights in
    :math:`u`. It is 1 where one negative has all the weight, their number where all have the same, 0 without any.
    """
    return total.square() / squares.clamp_min(torch.finfo(squares.dtype).tiny)

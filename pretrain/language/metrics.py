"""Validation numbers of an encoder, exact whatever the number of processes.

The functions take all N rows on every rank (``PairAccumulator.gather`` brings them there), share the N queries out
over the ranks, and return the same float everywhere: every rank must call them. They work in float64, because the
differences they look for in an anisotropic encoder drown in float32, and hold a block of queries x keys at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from pretrain.base.errors import DataError
from pretrain.engine.distributed import all_gather, all_reduce_sum, device, rank, world_size

_CELLS = 2**22  # similarities held at once: 32 MiB in float64
_TIE = 1e-9  # cosines closer than this are equal: float64 rounding of equal rows is 1e-15


def contrastive_loss(s: Float[Tensor, "n d"], s_hat: Float[Tensor, "n d"], temperature: float) -> float:
    r"""The CAPT loss (Eq. 2-4, mean form, no queue) of N pairs at one fixed temperature.

    ``(1/N) sum_i [L(x_i) + L(x^_i)]`` where ``L(x_i) = -log(e^{s_i.s^_i/tau} / (e^{s_i.s^_i/tau} +
    sum_{j != i} [e^{s_i.s_j/tau} + e^{s_i.s^_j/tau}]))``. It grows with N (its value at chance is ``2 log(2N-1)``),
    so compare it at equal N and tau only. During training the temperature moves the floor of the loss; here it does
    not.

    Raises:
        ValueError: rows without unit norm, or fewer than two pairs.
    """
    s, s_hat = _unit(s), _unit(s_hat)
    total = s.new_zeros(())
    for anchors, positives in ((s, s_hat), (s_hat, s)):
        for rows in _blocks(len(s), 2 * len(s)):
            own_view = anchors[rows] @ anchors.T / temperature
            own_view.diagonal(rows.start).fill_(-torch.inf)
            other_view = anchors[rows] @ positives.T / temperature
            denominator = torch.cat((own_view, other_view), dim=1).logsumexp(dim=1)
            total += (denominator - other_view.diagonal(rows.start)).sum()
    return float(all_reduce_sum(total)) / len(s)


def retrieval_accuracy(queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"]) -> float:
    """Share of queries whose own key (same row) has the highest cosine among all N keys; chance is 1/N.

    k keys that tie for the highest share the hit (1/k each), so a collapsed encoder scores chance, and the order
    of the rows does not matter.

    Raises:
        ValueError: rows without unit norm, or fewer than two pairs.
    """
    return _top1(_unit(queries), _unit(keys))


def alignment(s: Float[Tensor, "n d"], s_hat: Float[Tensor, "n d"]) -> float:
    """``E ||s_i - s^_i||^2`` over the positive pairs (Wang and Isola 2020, alpha = 2), in [0, 4]; lower is closer.

    Raises:
        ValueError: rows without unit norm, or fewer than two pairs.
    """
    return float((_unit(s) - _unit(s_hat)).square().sum(dim=1).mean())


def uniformity(s: Float[Tensor, "n d"]) -> float:
    """``log E exp(-2 ||s_i - s_j||^2)`` over all pairs i != j (Wang and Isola 2020, t = 2); 0 is collapse.

    One sum over all pairs: a mean of logs per batch is biased upwards. Rows drawn uniformly from the sphere in d
    dimensions give ``-4 + 8/d`` up to O(1/d^2).

    Raises:
        ValueError: rows without unit norm, or fewer than two rows.
    """
    s = _unit(s)
    total = s.new_zeros(())
    for rows in _blocks(len(s), len(s)):
        # ||a - b||^2 = 2 - 2 a.b: each term lies in [e^-8, 1], so the float64 sum needs no running maximum
        terms = (4 * (s[rows] @ s.T - 1)).exp_()
        total += terms.sum() - terms.diagonal(rows.start).sum()
    return float((all_reduce_sum(total) / (len(s) * (len(s) - 1))).log())


def contrast_metrics(s: Float[Tensor, "n d"], s_hat: Float[Tensor, "n d"], temperature: float) -> dict[str, float]:
    """How well N texts and their corruptions find each other, under the names of the metrics file.

    ``loss/capt_fixed`` (`contrastive_loss`), ``retrieval/to_corrupted`` and ``retrieval/to_original``
    (`retrieval_accuracy` both ways), ``alignment``, ``uniformity`` (of the originals).

    Args:
        s: unit rows of the originals. s_hat: unit rows of their corruptions. temperature: > 0, the same for all runs.
    """
    return {
        "loss/capt_fixed": contrastive_loss(s, s_hat, temperature),
        "retrieval/to_corrupted": retrieval_accuracy(s, s_hat),
        "retrieval/to_original": retrieval_accuracy(s_hat, s),
        "alignment": alignment(s, s_hat),
        "uniformity": uniformity(s),
    }


def noise_invariance(z: Float[Tensor, "n d"], z_hat: Float[Tensor, "n d"]) -> dict[str, float]:
    r"""How close an encoder keeps a corrupted text to its original, comparable between any two encoders.

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
    z, z_hat = _double(z), _double(z_hat)
    mean = (z.mean(dim=0) + z_hat.mean(dim=0)) / 2
    u, u_hat = F.normalize(z, dim=1), F.normalize(z_hat, dim=1)
    c, c_hat = F.normalize(z - mean, dim=1), F.normalize(z_hat - mean, dim=1)
    own = (z - z_hat).square().sum(dim=1).mean()
    # E_{i != j} ||z_i - z^_j||^2 on centred rows, where the squares do not cancel
    spread = (z - mean).square().sum(dim=1).mean() + (z_hat - mean).square().sum(dim=1).mean()
    random = spread - 2 * _random_product(z - mean, z_hat - mean)
    return {
        "cosine_gap": float((u * u_hat).sum(dim=1).mean() - _random_product(u, u_hat)),
        "centred_gap": float((c * c_hat).sum(dim=1).mean() - _random_product(c, c_hat)),
        "drift": float(own / random) if random > 0 else 1.0,
        "top1": (_top1(c, c_hat) + _top1(c_hat, c)) / 2,
    }


class PairAccumulator:
    """Collects the two views' rows of this rank's validation batches; ranks may hold different numbers of rows."""

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
        shapes = all_gather(torch.tensor([rows.shape[0], rows.shape[2]], device=rows.device))
        counts, width = shapes[:, 0].tolist(), int(shapes[:, 1].max())
        if sum(counts) < 2:
            raise DataError(f"validation needs at least two sequences to compare, got {sum(counts)}")
        padded = rows.new_zeros(max(counts), 2, width)
        padded[: len(rows), :, : rows.shape[2]] = rows
        pairs = torch.cat([part[:count] for part, count in zip(all_gather(padded), counts, strict=True)])
        return pairs[:, 0], pairs[:, 1]


class MaskedTokenAccumulator:
    """Sums of the MLM loss and hits over masked tokens: ranks and batches with more of them weigh more."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device())

    def update(self, loss_sum: Float[Tensor, ""], correct: Shaped[Tensor, ""], count: Shaped[Tensor, ""]) -> None:
        """Add the sums of a batch: the cross entropy in nats, the right predictions, the masked tokens."""
        self._sums += torch.stack((loss_sum.detach().double(), correct.double(), count.double()))

    def compute(self) -> dict[str, float]:
        """``loss/mlm`` (mean nats a masked token) and ``accuracy/mlm`` over all ranks (collective).

        Raises:
            DataError: no token was masked on any rank.
        """
        loss, correct, count = all_reduce_sum(self._sums).tolist()
        if count == 0:
            raise DataError("validation saw no masked token: the corruption masks none, or the texts are too short")
        return {"loss/mlm": loss / count, "accuracy/mlm": correct / count}


def _double(x: Tensor) -> Tensor:
    if len(x) < 2:
        raise ValueError(f"at least two rows are needed, got {len(x)}")
    return x.detach().double()


def _unit(x: Tensor) -> Tensor:
    """Float64 rows, normalised to the last digit; rows that were not normalised at all are refused."""
    x = _double(x)
    norms = x.norm(dim=1, keepdim=True)
    if not bool((norms - 1).abs().max() < 1e-2):
        low, high = norms.min().item(), norms.max().item()
        raise ValueError(f"rows must have unit L2 norm, got norms from {low:.4g} to {high:.4g}")
    return x.div(norms)


def _top1(queries: Tensor, keys: Tensor) -> float:
    hits = queries.new_zeros(())
    for rows in _blocks(len(queries), len(keys)):
        scores = queries[rows] @ keys.T
        lead = scores.amax(dim=1)
        won = scores.diagonal(rows.start) >= lead - _TIE
        tied = (scores >= lead.unsqueeze(1) - _TIE).sum(dim=1)
        hits += (won.double() / tied).sum()
    return float(all_reduce_sum(hits)) / len(queries)


def _random_product(a: Tensor, b: Tensor) -> Tensor:
    """``E_{i != j} a_i.b_j`` in O(n d): the product of the sums holds every pair, the own pairs are taken off."""
    return (a.sum(dim=0) @ b.sum(dim=0) - (a * b).sum()) / (len(a) * (len(a) - 1))


def _blocks(n: int, keys: int) -> Iterator[slice]:
    """This rank's share of n query rows, cut so that a block against ``keys`` keys stays below ``_CELLS``."""
    start, stop = (n * r // world_size() for r in (rank(), rank() + 1))
    size = max(1, _CELLS // keys)
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))

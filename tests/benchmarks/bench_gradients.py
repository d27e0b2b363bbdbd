"""Is your contrastive gradient right? Ways to spread a contrastive loss over ranks, against the gradient of one.

``python -m tests.benchmarks.bench_gradients [--ranks 2 4]`` trains nothing: an encoder in float64, one batch, gloo
ranks that each encode their part, gradients averaged over the ranks as DistributedDataParallel does. For each way it
prints the cosine and the ratio of norms between that average and the gradient of the same loss over the joined batch in
one process. A right way has both at 1. A ratio of 1/W hides behind Adam until a second loss is added; a cosine below 1
is another direction.

Two of the ways are sentence-transformers' installed code. The others are written from the descriptions of their
projects: what is gathered, through which rows gradients flow, and what each rank takes for its loss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from capt.pretrain.base import distributed
from capt.pretrain.contrast import info_nce
from tests.support import run_ranks

PAIRS, IN, OUT, TAU = 32, 12, 16, 0.05

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""This rank's queries, documents and hard negatives -> its loss."""


class Encoder(nn.Sequential):
    """Two layers and the normalisation."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(IN, 32), nn.Tanh(), nn.Linear(32, OUT))
        self.double()

    def forward(self, rows: Tensor) -> Tensor:
        """Unit rows."""
        return normalize(super().forward(rows), dim=1)


def _batch() -> Tensor:
    """``(3, PAIRS, IN)``: queries, documents near them, and a hard negative each."""
    generator = torch.Generator().manual_seed(1)
    q, noise, other = torch.randn(3, PAIRS, IN, generator=generator, dtype=torch.float64)
    return torch.stack([q, q + 0.6 * noise, q + 1.2 * other])


# How rows of other ranks are seen


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return _detached(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return distributed.all_reduce_sum(gradient.contiguous()).chunk(dist.get_world_size())[dist.get_rank()]


def _with_gradient(rows: Tensor) -> Tensor:
    """All ranks' rows; gradients of all ranks flow back to their owner."""
    gathered: Tensor = _WithGradient.apply(rows)
    return gathered


def _detached(rows: Tensor) -> Tensor:
    """All ranks' rows without any gradient."""
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach())
    return torch.cat(parts)


def _own_slot(rows: Tensor) -> Tensor:
    """All ranks' rows; only the own ones carry a gradient, from this rank's loss."""
    parts = list(_detached(rows).split(len(rows)))
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def _ranking(q: Tensor, candidates: Tensor, first: int) -> Tensor:
    """Mean over the queries; the positive of query ``i`` is candidate ``first + i``."""
    return cross_entropy(q @ candidates.T / TAU, torch.arange(first, first + len(q)))


def _first() -> int:
    return dist.get_rank() * (PAIRS // dist.get_world_size())


# One way: queries against documents and hard negatives


def _ours(q: Tensor, d: Tensor, h: Tensor) -> Tensor:
    return info_nce(q, d, negatives=h, temperature=TAU)


def _sentence_transformers(gather: bool) -> Loss:
    def loss(q: Tensor, d: Tensor, h: Tensor) -> Tensor:
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

        ranking = MultipleNegativesRankingLoss(nn.Identity(), scale=1 / TAU, gather_across_devices=gather)
        return ranking.compute_loss_from_embeddings([q, d, h], torch.zeros(len(q)))

    return loss


def _flag_embedding(q: Tensor, d: Tensor, h: Tensor) -> Tensor:
    """``negatives_cross_device``: the loss of the whole batch on every rank, own rows in their slot."""
    return _ranking(_own_slot(q), torch.cat([_own_slot(d), _own_slot(h)]), 0)


def _tevatron(q: Tensor, d: Tensor, h: Tensor) -> Tensor:
    """The same times the number of ranks."""
    return dist.get_world_size() * _flag_embedding(q, d, h)


def _nemo_default(q: Tensor, d: Tensor, h: Tensor) -> Tensor:
    """No negatives within the batch: each query against its own hard negative."""
    logits = torch.stack([(q * d).sum(1), (q * h).sum(1)], 1) / TAU
    return cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64))


def _nemo_in_batch(q: Tensor, d: Tensor, h: Tensor) -> Tensor:
    """Negatives within the batch: own queries against all documents, those of other ranks detached."""
    return _ranking(q, torch.cat([_own_slot(d), _own_slot(h)]), _first())


# Both ways: CLIP's loss, without hard negatives


def _ours_both_ways(q: Tensor, d: Tensor, h: Tensor) -> Tensor:
    return info_nce(q, d, temperature=TAU, directions="symmetric")


def _open_clip(*, local_loss: bool, gather_with_grad: bool) -> Loss:
    """``ClipLoss`` with its two flags; without ``local_loss`` own rows are put back into their slot."""

    def loss(q: Tensor, d: Tensor, h: Tensor) -> Tensor:
        gather = _with_gradient if gather_with_grad else _detached if local_loss else _own_slot
        all_q, all_d = gather(q), gather(d)
        if local_loss:
            return (_ranking(q, all_d, _first()) + _ranking(d, all_q, _first())) / 2
        return (_ranking(all_q, all_d, 0) + _ranking(all_d, all_q, 0)) / 2

    return loss


@dataclass(frozen=True)
class Way:
    """A way to spread a loss over ranks."""

    name: str
    both_ways: bool
    loss: Loss


WAYS = (
    Way("capt `info_nce`", False, _ours),
    Way("sentence-transformers, `gather_across_devices=True`", False, _sentence_transformers(True)),
    Way("sentence-transformers, default", False, _sentence_transformers(False)),
    Way("Tevatron", False, _tevatron),
    Way("FlagEmbedding, `negatives_cross_device`", False, _flag_embedding),
    Way("NeMo, negatives in the batch", False, _nemo_in_batch),
    Way("NeMo, default", False, _nemo_default),
    Way('capt `info_nce`, `directions="symmetric"`', True, _ours_both_ways),
    Way("open_clip, `local_loss`, `gather_with_grad`", True, _open_clip(local_loss=True, gather_with_grad=True)),
    Way("open_clip, `gather_with_grad`", True, _open_clip(local_loss=False, gather_with_grad=True)),
    Way("open_clip, default", True, _open_clip(local_loss=False, gather_with_grad=False)),
    Way("open_clip, `local_loss`", True, _open_clip(local_loss=True, gather_with_grad=False)),
)


def _gradient(encoder: Encoder, loss: Tensor) -> Tensor:
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(encoder.parameters()))])


def _exact(both_ways: bool) -> Tensor:
    """The gradient of the loss over the joined batch, in one process and by torch's cross entropy."""
    encoder = Encoder()
    q, d, h = (encoder(rows) for rows in _batch())
    if both_ways:
        return _gradient(encoder, (_ranking(q, d, 0) + _ranking(d, q, 0)) / 2)
    return _gradient(encoder, _ranking(q, torch.cat([d, h]), 0))


def _rank_measures(names: Sequence[str]) -> dict[str, tuple[float, float]]:
    encoder, found = Encoder(), {}
    mine = slice(_first(), _first() + PAIRS // dist.get_world_size())
    for way in (way for way in WAYS if way.name in names):
        rows = [encoder(rows[mine]) for rows in _batch()]
        gradient = distributed.all_reduce_sum(_gradient(encoder, way.loss(*rows))) / dist.get_world_size()
        exact = _exact(way.both_ways)
        cosine = torch.nn.functional.cosine_similarity(gradient, exact, dim=0)
        found[way.name] = float(cosine), float(gradient.norm() / exact.norm())
    return found


def measure(ranks: int, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """By way, the cosine and the ratio of norms between its averaged gradient and the exact one."""
    found: dict[str, tuple[float, float]] = run_ranks(_rank_measures, ranks, names)[0]
    return found


def table(measured: dict[int, dict[str, tuple[float, float]]]) -> str:
    """The rows of the page, of the ways that were measured."""
    head = ["loss", "way", *(f"{name}, {ranks} ranks" for ranks in measured for name in ("cosine", "ratio"))]
    lines = [f"| {' | '.join(head)} |", f"|---|---|{'---:|' * (len(head) - 2)}"]
    for way in (way for way in WAYS if all(way.name in each for each in measured.values())):
        numbers = [f"{value:.3f}" for ranks in measured for value in measured[ranks][way.name]]
        lines.append(f"| {'both ways' if way.both_ways else 'one way'} | {way.name} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print the table, then the numbers as JSON."""
    parser = argparse.ArgumentParser(description="Ways to spread a contrastive loss over ranks, against its gradient.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    names = [way.name for way in WAYS]
    measured = {ranks: measure(ranks, names) for ranks in parser.parse_args().ranks}
    print(table(measured))
    print(json.dumps(measured))


if __name__ == "__main__":
    main()

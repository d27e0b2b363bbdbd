"""The contrastive loss, forward and backward, against the usual ways to write it.

``python -m tests.benchmarks.bench_contrast`` times 256 anchors with given positives against 16,384 frozen queue rows on
one thread in fp32 (every contender solves the same problem, which is checked), prints one JSON object and exits with 1
when a bound is missed. All contenders run in turn in one process; a ratio is the median over the turns of the ratio
within a turn, so that a busy machine shifts both sides alike.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from capt.pretrain.contrast import ShardedQueue, info_nce
from tests.unit.contrast.support import near, relative, unit
from tests.unit.contrast.test_capt import _LargestTensor

ANCHORS, QUEUE, TAU, CHUNK, TURNS = 256, 16_384, 0.05, 2048, 15

Contender = Callable[[Tensor], Tensor]


def _dense(positives: Tensor, keys: Tensor) -> Contender:
    def loss(q: Tensor) -> Tensor:
        logits = torch.cat([(q * positives).sum(1, keepdim=True), q @ keys.T], 1) / TAU
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64))

    return loss


def _checkpointed(positives: Tensor, keys: Tensor) -> Contender:
    def part(q: Tensor, rows: Tensor) -> Tensor:
        return torch.logsumexp(q @ rows.T / TAU, 1)

    def loss(q: Tensor) -> Tensor:
        positive = (q * positives).sum(1) / TAU
        parts = [checkpoint(part, q, rows, use_reentrant=False) for rows in keys.split(CHUNK)]
        return (torch.logsumexp(torch.stack([positive, *parts]), 0) - positive).mean()

    return loss


def _linear_cross_entropy(positives: Tensor, keys: Tensor) -> Contender:
    """The other samples' positives are keys as well: a linear layer has the same weights for every row."""
    weight, labels = torch.cat([positives, keys]), torch.arange(len(positives))
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda q: F.linear_cross_entropy(q / TAU, weight, labels, options=options)


def _two_products(positives: Tensor, keys: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda q: (q.detach() @ keys.T) @ keys


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _gradient(loss: Contender, anchors: Tensor) -> Tensor:
    q = anchors.detach().requires_grad_()
    loss(q).backward()
    assert q.grad is not None
    return q.grad


def measure(d: int, turns: int) -> list[dict[str, Any]]:
    """The rows for one width."""
    keys = unit(QUEUE, d, seed=0, dtype=torch.float32)
    anchors = unit(ANCHORS, d, seed=1, dtype=torch.float32)
    positives = near(anchors, 2 / d**0.5, seed=2)
    queue = ShardedQueue(QUEUE, d)
    queue.enqueue(keys)

    def ours(q: Tensor) -> Tensor:
        return info_nce(q, positives, temperature=TAU, queue=queue, in_batch="none")

    def ours_with_batch(q: Tensor) -> Tensor:
        return info_nce(q, positives, temperature=TAU, queue=queue)

    contenders = {
        "dense torch": (_dense(positives, keys), ours, 0.90),
        "checkpointed chunks": (_checkpointed(positives, keys), ours, 0.60),
        "F.linear_cross_entropy": (_linear_cross_entropy(positives, keys), ours_with_batch, 0.35),
    }
    for name, (baseline, own, _) in contenders.items():
        difference = relative(_gradient(own, anchors), _gradient(baseline, anchors))
        assert difference < 0.05, f"{name} solves another problem: gradients differ by {difference}"
    products = _two_products(positives, keys)
    runs: dict[str, Callable[[], Any]] = {
        "ours": lambda: _gradient(ours, anchors),
        "two products": lambda: products(anchors),
        **{name: lambda loss=loss: _gradient(loss, anchors) for name, (loss, _, _) in contenders.items()},
        "ours with batch": lambda: _gradient(ours_with_batch, anchors),
    }
    for run in runs.values():
        run()
    times = {name: [_seconds(run) for _ in range(1)] for name, run in runs.items()}
    for _ in range(turns):
        for name, run in runs.items():
            times[name].append(_seconds(run))

    def row(baseline: str, own: str, bound: float | None) -> dict[str, Any]:
        ratio = statistics.median(a / b for a, b in zip(times[own][1:], times[baseline][1:], strict=True))
        return {
            "name": f"d={d}: time / {baseline}",
            "value": round(ratio, 3),
            "bound": bound,
            "ok": bound is None or ratio <= bound,
            "best ms": round(1e3 * min(times[own]), 1),
            "best ms of the other": round(1e3 * min(times[baseline]), 1),
        }

    rows = [
        row(name, "ours with batch" if own is ours_with_batch else "ours", bound)
        for name, (_, own, bound) in contenders.items()
    ]
    rows.append(row("two products", "ours", None))
    with _LargestTensor() as largest:
        _gradient(ours, anchors)
    share = largest.elements / min(ANCHORS * QUEUE / 4, QUEUE * d)
    rows.append({"name": f"d={d}: largest tensor / bound", "value": round(share, 3), "bound": 1.0, "ok": share < 1.0})
    return rows


def main() -> int:
    """Measure, print, and say whether every bound is met."""
    torch.set_num_threads(1)
    rows = [row for d in (128, 1024) for row in measure(d, TURNS)]
    print(json.dumps({"rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

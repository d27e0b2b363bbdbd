"""An encoder trained with a token loss and the contrastive loss on W ranks gets the gradients of one process.

The classic bug gathers detached rows, or takes the whole loss on every rank: the engine's averaging then shrinks or
bends the contrastive gradient against that of the token loss. Both wrong ways are tried here and must fail.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.contrast import ShardedQueue, capt_loss
from tests.support import run_ranks
from tests.unit.contrast.reference import capt_loss_dense, info_nce_dense
from tests.unit.contrast.support import relative

VOCABULARY, WIDTH, LENGTH, SAMPLES, STEPS, QUEUE, TAU = 13, 8, 5, 8, 4, 21, 0.1

Contrast = Callable[[Tensor, Tensor, ShardedQueue], Tensor]


class Encoder(nn.Module):
    """Two layers, a token head and a unit sequence vector; as CAPT needs and no more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.layers = nn.Sequential(
            *(module for _ in range(2) for module in (nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.GELU()))
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embed(tokens) + self.layers(self.embed(tokens))
        return hidden @ self.embed.weight.T, F.normalize(hidden.mean(1), dim=-1)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY - 1, (SAMPLES, LENGTH), generator=generator)
    masked = torch.rand(tokens.shape, generator=generator) < 0.3
    return tokens, torch.where(masked, VOCABULARY - 1, tokens)


def _sharded(s: Tensor, s_hat: Tensor, queue: ShardedQueue) -> Tensor:
    return capt_loss(s, s_hat, queue, temperature=TAU)


def _whole_loss_on_every_rank(s: Tensor, s_hat: Tensor, queue: ShardedQueue) -> Tensor:
    """Gather, put the own rows back into their slot, take the loss of the whole batch: SimCSE's way."""
    gathered = []
    for rows in (s, s_hat):
        parts = list(distributed.all_gather(rows))
        parts[distributed.rank()] = rows
        gathered.append(torch.cat(parts))
    return capt_loss_dense(*gathered, TAU, _whole_queue(queue)) / len(gathered[0])


def _detached_keys(s: Tensor, s_hat: Tensor, queue: ShardedQueue) -> Tensor:
    """Own anchors against gathered rows that carry no gradient: right in value, wrong in direction."""
    n = len(s)
    others = torch.cat([distributed.all_gather(rows).flatten(0, 1) for rows in (s, s_hat)])
    keys = torch.cat([others, _whole_queue(queue)])
    instances = (torch.arange(n) + distributed.rank() * n).repeat(2)
    total = len(others) // 2
    key_instances = torch.cat([torch.arange(total).repeat(2), torch.full((len(keys) - 2 * total,), -1)])
    rows, partners = torch.cat([s, s_hat]), torch.cat([s_hat, s]).detach()
    return info_nce_dense(rows, partners, keys, instances[:, None] != key_instances[None, :], TAU).sum() / n


def _whole_queue(queue: ShardedQueue) -> Tensor:
    return torch.cat([torch.as_tensor(rows) for rows in distributed.gather_objects(queue.rows.numpy())])


def _train(contrast: Contrast) -> list[np.ndarray]:
    """Gradients of every parameter, averaged over the ranks, in the last of a few steps (the queue has wrapped)."""
    rank, world = distributed.rank(), distributed.world_size()
    encoder, queue = Encoder(), ShardedQueue(QUEUE, WIDTH, dtype=torch.float64)
    for step in range(STEPS):
        encoder.zero_grad()
        tokens, corrupted = (rows[rank::world] for rows in _batch(step))
        logits, views = encoder(torch.cat([tokens, corrupted]))
        s, s_hat = views.chunk(2)
        token_loss = F.cross_entropy(logits[len(tokens) :].flatten(0, 1), tokens.flatten())
        (token_loss + contrast(s, s_hat, queue)).backward()
        queue.enqueue(s, s_hat)
        for parameter in encoder.parameters():
            assert parameter.grad is not None
            if world > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            with torch.no_grad():
                parameter -= 0.05 * parameter.grad
    return [parameter.grad.numpy() for parameter in encoder.parameters() if parameter.grad is not None]


def _worst(ranks: list[list[np.ndarray]]) -> float:
    alone = _train(_sharded)
    return max(relative(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(ranks[0], alone, strict=True))


@pytest.mark.parametrize("world", [2, 4])
def test_parameter_gradients_equal_those_of_one_process(world: int) -> None:
    assert _worst(run_ranks(_train, world, _sharded)) < 1e-10


@pytest.mark.parametrize("wrong", [_whole_loss_on_every_rank, _detached_keys])
def test_the_classic_bugs_fail_the_same_check(wrong: Contrast) -> None:
    assert _worst(run_ranks(_train, 2, wrong)) > 1e-2


def test_one_process_equals_autograd_through_the_dense_oracle() -> None:
    """The reference of the tests above is thus not the code under test."""

    def dense(s: Tensor, s_hat: Tensor, queue: ShardedQueue) -> Tensor:
        return capt_loss_dense(s, s_hat, TAU, copy.deepcopy(queue.rows)) / len(s)

    for a, b in zip(_train(_sharded), _train(dense), strict=True):
        assert relative(torch.as_tensor(a), torch.as_tensor(b)) < 1e-10

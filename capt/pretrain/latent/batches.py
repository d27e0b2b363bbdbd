"""Batches of sentences of one length or of similar lengths, and the random numbers of their steps.

Sentences are cut into batches once, the same for any number of ranks; each epoch goes through them in another order.
Shorter sentences of a batch are filled up with ``<pad>``, which no objective and no representation sees. Where a batch
does not divide evenly over the ranks, a rank repeats one of its rows and gives the copy no weight. A resumed run finds
its place again from the number of sentences that it has seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.randomness import derive, generator_for
from capt.pretrain.latent.config import LatentJob
from capt.pretrain.latent.corpus import Sentences, ends_of

# Which sentences come into one batch: those of one length, or neighbours when all are ordered by length.


Rule = Literal["auto", "equal", "similar"]

_FULL_ENOUGH = 0.75
"""``auto`` takes batches of one length where they fill this share of their rows: PTB 0.97, 513 reviews 0.09."""


def chosen_rule(lengths: Int64[np.ndarray, " n"], size: int, rule: Rule) -> Literal["equal", "similar"]:
    """Return ``rule``; ``auto`` is ``equal`` where batches of one length would be three quarters full on average."""
    if rule != "auto":
        return rule
    _, counts = np.unique(lengths, return_counts=True)
    batches = int(np.ceil(counts / size).sum())
    return "equal" if len(lengths) >= _FULL_ENOUGH * size * batches else "similar"


def batches_of(
    lengths: Int64[np.ndarray, " n"], size: int, rule: Literal["equal", "similar"]
) -> list[Int64[np.ndarray, " m"]]:
    """Cut the sentences into batches of at most ``size``; returns the numbers of the sentences of each.

    ``equal``: sentences of one length, in file order, are cut into batches of ``size``, as in the released code; the
    last batch of each length may be as small as one sentence. ``similar``: all sentences, ordered by length, are cut
    into the fewest batches, whose sizes differ by one at most. So none holds a single sentence but where ``size`` is 1
    or there is only one.
    """
    by_length = np.argsort(lengths, kind="stable")
    if rule == "similar":
        return np.array_split(by_length, -(-len(lengths) // size))
    ends = np.flatnonzero(np.diff(lengths[by_length])) + 1
    groups = np.split(by_length, ends)
    return [group[first : first + size] for group in groups for first in range(0, len(group), size)]


@dataclass(frozen=True)
class LatentBatch:
    """A rank's rows of a batch.

    Attributes:
        tokens: ``<s> w1 .. wn </s>`` of each row, and ``<pad>`` up to the longest row of the whole batch.
        rows: positions of these rows in the whole batch; they choose the rows' random numbers.
        valid_rows: how many of these rows have weight; they come first.
        total: number of sentences in the whole batch.
        padding: number of ``<pad>`` in the whole batch.
    """

    tokens: Int[Tensor, "n length"]
    rows: Int[Tensor, " n"]
    valid_rows: int
    total: int
    padding: int = 0

    @property
    def scored(self) -> int:
        """Number of predicted words in the whole batch, ends of sentences included."""
        return self.total * (self.tokens.shape[1] - 1) - self.padding

    def to(self, device: torch.device) -> LatentBatch:
        """The same batch on another device."""
        return replace(self, tokens=self.tokens.to(device))


class Batches:
    """All batches of a set of sentences.

    Args:
        sentences: the whole set.
        size: number of rows of a batch over all ranks, at most.
        seed: decides the order of the batches in each epoch.
        lengths: ``batch.lengths`` of the job.

    Attributes:
        lengths: ``equal`` or ``similar``, also where ``auto`` was asked for.
    """

    def __init__(self, sentences: Sentences, size: int, seed: int, lengths: Rule) -> None:
        self._sentences, self._seed = sentences, seed
        self.lengths = chosen_rule(sentences.lengths, size, lengths)
        self._batches = batches_of(sentences.lengths, size, self.lengths)
        self._sizes = np.array([len(batch) for batch in self._batches])
        self._order: tuple[int, Int64[np.ndarray, " b"]] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def alone(self) -> int:
        """Number of batches that hold a single sentence."""
        return int((self._sizes == 1).sum())

    @property
    def mean_tokens(self) -> float:
        """Number of predicted words of an average batch."""
        return self._sentences.scored / len(self)

    def order(self, epoch: int) -> Int64[np.ndarray, " b"]:
        """The order in which an epoch goes through the batches."""
        if self._order[0] != epoch:
            self._order = (epoch, generator_for("latent/order", self._seed, epoch, 0).permutation(len(self)))
        return self._order[1]

    def locate(self, samples: int) -> tuple[int, int]:
        """The epoch, and the position within it, of the batch that comes after ``samples`` sentences."""
        epoch, done = divmod(samples, len(self._sentences))
        ends = np.cumsum(self._sizes[self.order(epoch)])
        return epoch, int(np.searchsorted(ends, done, side="right"))

    def take(self, number: int, rank: int, world: int) -> LatentBatch:
        """This rank's rows of batch ``number``."""
        batch = self._batches[number]
        per_rank = -(-len(batch) // world)
        rows = np.arange(rank, per_rank * world, world)
        valid_rows = int((rows < len(batch)).sum())
        # A rank that lacks a row takes one that it has (or any) once more, without weight.
        rows = np.where(rows < len(batch), rows, rows[0] % len(batch))
        lengths = self._sentences.lengths[batch]
        tokens = torch.from_numpy(self._sentences.rows(batch[rows], int(lengths.max())))
        padding = int(lengths.max()) * len(batch) - int(lengths.sum())
        return LatentBatch(tokens, torch.from_numpy(rows), valid_rows, len(batch), padding)

    def train(self, samples: int, rank: int, world: int) -> Iterator[LatentBatch]:
        """This rank's batches after the first ``samples`` sentences, without end."""
        epoch, place = self.locate(samples)
        while True:
            for number in self.order(epoch)[place:]:
                yield self.take(int(number), rank, world)
            epoch, place = epoch + 1, 0

    def evaluation(self, limit: int, rank: int, world: int) -> Iterator[tuple[int, LatentBatch]]:
        """Whole batches for this rank, with their numbers: about ``limit`` sentences over all ranks.

        Every n-th batch is taken, so that short and long sentences are as frequent as in the whole set.
        """
        count = min(len(self), max(1, round(limit / self._sizes.mean())))
        chosen = ((np.arange(count) + 0.5) * len(self) / count).astype(np.int64)
        for number in chosen[rank::world]:
            yield int(number), self.take(int(number), 0, 1)


# Batches of the synthetic clusters (section 4.4 of the paper, and its released toy): one-hot vectors of K classes.


def cluster_batches(job: LatentJob, step: int, rank: int, world: int) -> Iterator[LatentBatch]:
    """This rank's rows of the batch of each step from ``step`` on.

    A batch holds K classes drawn with replacement, each ``data.repeats`` times.
    """
    classes, repeats = job.data.clusters, job.data.repeats
    assert classes is not None
    total = classes * repeats
    rows = torch.arange(rank, total, world)
    while True:
        generator = torch.Generator().manual_seed(derive(job.run.seed, "clusters", step))
        tokens = torch.randint(0, classes, (classes, 1), generator=generator).expand(-1, repeats).reshape(-1, 1)
        yield LatentBatch(tokens[rank::world], rows, len(rows), total)
        step += 1


# The random numbers of one training step or one evaluation batch, the same for any number of ranks.
#
# A batch is a few dozen sentences over all ranks. Each rank draws the numbers of the whole batch (a few milliseconds)
# and uses those of its own rows, so that no number depends on how the rows are shared out.


class StepNoise:
    """Random numbers of one step; the order of the calls decides what each call returns.

    Args:
        seed: the run's seed.
        step: the step's number, or any other names that tell one use from another.
        rows: this rank's rows of the batch; None for all of them.
        total: number of rows of the whole batch.
        device: where the numbers are used. They are drawn on the CPU, so that every device gets the same ones.
    """

    def __init__(
        self, seed: int, step: tuple[int | str, ...], rows: Int[Tensor, " n"] | None, total: int, device: torch.device
    ) -> None:
        self.generator = torch.Generator().manual_seed(derive(seed, "latent", *step))
        self._seed, self._step = seed, step
        self._rows = None if rows is None or torch.equal(rows, torch.arange(total)) else rows
        self._total, self._device = total, device

    def normal(self, views: int, *shape: int) -> Tensor:
        """Standard normal numbers, ``(views * n, *shape)``, view after view."""
        return self._own_rows(torch.randn(views, self._total, *shape, generator=self.generator))

    def uniform(self, views: int, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1), ``(views * n, *shape)``, view after view."""
        return self._own_rows(torch.rand(views, self._total, *shape, generator=self.generator))

    def dropout(self, p: float, views: int, length: int, width: int) -> Float[Tensor, "length vn width"] | None:
        """Dropout of probability ``p`` (to 1/65536) on sequences as factors 0 and ``1 / (1 - p)``; None for p = 0.

        Time comes first, as the LSTM reads. Each factor is made of two random bytes: on a CPU this is ten times as fast
        as torch's Bernoulli draws, and a step needs a million of them.
        """
        if p == 0.0:
            return None
        shape = (length, views, self._total, width)
        bits = np.frombuffer(self._bytes.bytes(2 * math.prod(shape)), dtype=np.uint16)
        kept = torch.from_numpy(bits >= round(p * 65536)).view(shape)
        if self._rows is not None:
            kept = kept[:, :, self._rows]
        return kept.flatten(1, 2).to(self._device, torch.float32).mul_(1.0 / (1.0 - p))

    def normal_shared(self, number: int, width: int, rank: int, world: int) -> Float[Tensor, "m width"]:
        """This rank's part of ``number`` standard normal vectors that belong to no row of the batch."""
        return torch.randn(number, width, generator=self.generator)[rank::world].to(self._device)

    @cached_property
    def _bytes(self) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(derive(self._seed, "latent/keep", *self._step)))

    def _own_rows(self, values: Tensor) -> Tensor:
        if self._rows is not None:
            values = values[:, self._rows]
        return values.flatten(0, 1).to(self._device)


# The swap augmentation of Table 7: adjacent words of the second view change places.


def swapped(tokens: Int[Tensor, "n length"], swaps: Bool[Tensor, "n length"]) -> Int[Tensor, "n length"]:
    """Exchange the words at i and i + 1 where ``swaps[:, i]``, from left to right; a word moves at most once.

    ``<s>``, ``</s>`` and what follows it stay. The released code has no such augmentation; this follows section 4.7 of
    the paper.
    """
    out = tokens.clone()
    moved = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    ends = ends_of(tokens)
    # Position 0 is <s>; no word changes places with </s>.
    for i in range(1, tokens.shape[1] - 2):
        now = swaps[:, i] & ~moved & (i + 1 < ends)
        left, right = out[:, i], out[:, i + 1]
        out[:, i], out[:, i + 1] = torch.where(now, right, left), torch.where(now, left, right)
        moved = now
    return out


class SampledBatch(NamedTuple):
    """The rows of this rank, repeated once per view (V views of n rows, view after view), and their random numbers.

    Attributes:
        encoder_tokens: what the encoder reads; the second view may have swapped words.
        decoder_tokens: what the decoder predicts.
        views: V, 1 or 2.
        valid: False for a row that only fills up the rank's share and has no weight.
        valid_rows: number of valid rows in each view; they come first.
        total: number of valid rows in one view over all ranks.
        scored: number of predicted words in the whole batch, one view, ends of sentences included.
        eps: noise of the posterior.
        encoder_dropout: dropout factors on the encoder's word vectors.
        decoder_dropout: dropout factors on the decoder's word vectors and before its softmax.
        priors: draws of the prior for each update of the critics, ``(updates, V n, d)``.
        ids: one number per contrast pair, equal for equal sentences.
        negatives: draws of the prior that serve as negatives of the contrast.
        noise: the generator behind all of these, for a step that continues to draw (SaVAE).
    """

    encoder_tokens: Int[Tensor, "vn length"]
    decoder_tokens: Int[Tensor, "vn length"]
    views: int
    valid: Bool[Tensor, " vn"]
    valid_rows: int
    total: int
    scored: int
    eps: Float[Tensor, "vn e"]
    encoder_dropout: Tensor | None
    decoder_dropout: tuple[Tensor | None, Tensor | None]
    priors: Tensor | None
    ids: Tensor | None
    negatives: Tensor | None
    noise: StepNoise

    @property
    def loss_scale(self) -> float:
        """Turns a sum over this rank's rows into a mean over the batch, once the engine has averaged over the ranks."""
        return distributed.world_size() / self.total


def sample_batch(job: LatentJob, batch: LatentBatch, noise: StepNoise) -> SampledBatch:
    """Repeat a batch once per view and draw its random numbers, in an order that must not change (it fixes them)."""
    views, model, contrast = job.objective.views, job.model, job.contrast
    length = batch.tokens.shape[1]
    # Views lie one below the other: row v * n + i is view v of sentence i.
    decoder_tokens = batch.tokens.repeat(views, 1)
    encoder_tokens = decoder_tokens
    if job.objective.swap:  # the second view is read with words swapped; both are decoded as they are
        swaps = noise.uniform(1, length) < job.objective.swap
        encoder_tokens = torch.cat([batch.tokens, swapped(batch.tokens, swaps)])
    # Columns of noise: of z itself, one that nobody reads, or of the sampler of an implicit posterior.
    width = {"gaussian": model.latent, "point": 1, "none": 1}.get(model.posterior, model.noise)
    eps = noise.normal(views, width)
    encoder_dropout = noise.dropout(model.encoder_dropout, views, length, model.embedding)
    # The decoder predicts each token from those before it: it reads one token less than the encoder.
    decoder_dropout = (
        noise.dropout(model.dropout, views, length - 1, model.embedding),
        noise.dropout(model.dropout, views, length - 1, model.hidden),
    )
    # Rows that only fill up this rank's share come last and have no weight.
    valid = (torch.arange(len(batch.tokens), device=batch.tokens.device) < batch.valid_rows).repeat(views)
    priors = ids = negatives = None
    # Each update of the critics has draws of the prior of its own.
    if job.has_critics:
        priors = noise.normal(job.critic.updates * views, model.latent).view(job.critic.updates, len(valid), -1)
    # Equal sentences are no negatives of each other; their ids tell which are equal.
    if contrast.weight > 0 and contrast.mask_duplicates:
        ids = _sentence_ids(batch, mean_pair=contrast.mean_pair and distributed.rank() == 0)
    # This number for each anchor of all ranks, each rank drawing its part of them.
    if contrast.weight > 0 and contrast.prior_negatives:
        number = contrast.prior_negatives * (batch.total + int(contrast.mean_pair))
        negatives = noise.normal_shared(number, model.latent, distributed.rank(), distributed.world_size())
    return SampledBatch(
        encoder_tokens, decoder_tokens, views, valid, batch.valid_rows, batch.total, batch.scored, eps,
        encoder_dropout, decoder_dropout, priors, ids, negatives, noise,
    )  # fmt: skip


def _sentence_ids(batch: LatentBatch, *, mean_pair: bool) -> Int[Tensor, " m"]:
    """A linear hash modulo 2^64 of each valid sentence, whatever ``<pad>`` (0) follows it; the pair of the batch's
    means, where it is here, has -1.
    """
    tokens = batch.tokens[: batch.valid_rows]
    ids = (tokens * _hash_factors(tokens.shape[1]).to(tokens.device)).sum(1)
    return torch.cat([ids.new_full((1,), -1), ids]) if mean_pair else ids


@cache
def _hash_factors(length: int) -> Int[Tensor, " length"]:
    """Random factors, of which a shorter sentence has the first ones."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(0)).integers(1 << 62, size=length))

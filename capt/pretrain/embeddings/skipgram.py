r"""Skip-gram with negative sampling from fixed noise, without autograd: three batched matrix products an update.

The loss of a centre :math:`x_i` with neighbours :math:`y_j` and noise words :math:`n_k` that its block shares is

.. math::
    \sum_j -\log\sigma(x_i \cdot y_j) - \frac{K c_i}{m} \sum_{k=1}^{m} \log\sigma(-x_i \cdot n_k)

with :math:`c_i` neighbours, ``negatives.number`` :math:`= K` and ``negatives.shared`` :math:`= m`: in expectation K
noise words for each pair, as in word2vec. Consecutive centres share their noise, which makes matrix products of it (Ji
et al. 2016, arXiv:1604.04661). A block's neighbours are the words of the block and ``window`` words at each side, so
its positive scores are a band of a small matrix product, too. All gradients of an update are taken at the same tables
and summed, in the same order for any number of threads.

Word2vec moves after every pair, so a frequent word follows its first pairs immediately. A sum over many pairs at the
same place overshoots, and then grows without bound. So a row whose step is long is shortened: the curvature of the loss
along row :math:`x_i` is at most :math:`h_i = \frac14 \sum_j w_{ij} |y_j|^2` over its pairs (:math:`w` is 1, or the
noise's weight), and where :math:`\eta h_i` exceeds `LONGEST`, the row's step is multiplied by `LONGEST`
:math:`/\,\eta h_i`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.embeddings.initial import InitialVectors
from capt.pretrain.embeddings.positives import Segments
from capt.pretrain.embeddings.tables import LONGEST, EmbeddingTables
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import StepMetrics

# The seam of the task: how an update moves the tables. Plain skip-gram is one rule, a generator another.


@runtime_checkable
class UpdateRule(Protocol):
    """Interface of an update rule; all methods are called by all ranks alike."""

    status: str
    """Text of the progress line after the figures, such as that the generator has collapsed; mostly empty."""

    def modules(self, initial: InitialVectors | None) -> Mapping[str, nn.Module]:
        """The modules beside ``discriminator``, initialised from the seed, or from the vectors to begin with."""
        ...

    def optimizers(self) -> Mapping[str, ModuleOptimizer]:
        """The optimizers of modules that are not updated as the section ``optimizer`` says."""
        ...

    def batches(self, read: Callable[[int], Segments], step: int) -> Iterator[Any]:
        """Yield the batches from update ``step`` (0-based) on; ``read`` returns this rank's segments of an update."""
        ...

    def update(self, engines: Mapping[str, Engine], batch: Any, step: int, *, measure: bool) -> StepMetrics | None:
        """Do update ``step`` on what :meth:`batches` has yielded for it; with ``measure`` return its metrics.

        The loss is summed over pairs and ranks for the gradient. The mean over ranks of a metric is its global value;
        ``loss`` is in nats for each pair.
        """
        ...


@dataclass(frozen=True)
class Band:
    """The words of each block's matrix product and the weights of its scores.

    Attributes:
        centres: words of the blocks.
        columns: of each block the words around it, then its noise.
        neighbour: 1 where a column is a neighbour of a centre, over the columns of words.
        noise_weight: weight of each noise word for a centre.
    """

    centres: Int64[Tensor, "b c"]
    columns: Int64[Tensor, "b w_plus_m"]
    neighbour: Float[Tensor, "b c w"]
    noise_weight: Float[Tensor, "b c"]

    @classmethod
    def of(cls, segments: Segments, window: int, number: int, device: torch.device) -> Band:
        """The band of an update's segments."""
        blocks, size, width = len(segments.noise), segments.block, segments.block + 2 * window
        shape = (blocks, size)
        # Each block with ``window`` words on both sides; beyond the text is sentence -2, which equals no centre's.
        around, sentences = (
            np.lib.stride_tricks.sliding_window_view(np.pad(values, window, constant_values=outside), width)[::size]
            for values, outside in ((segments.words, 0), (segments.sentence, -2))
        ) if blocks else (np.zeros((0, width), np.int64),) * 2  # fmt: skip
        columns = torch.from_numpy(np.concatenate([around, segments.noise], axis=1)).to(device)
        sentence = torch.from_numpy(segments.sentence.reshape(shape)).to(device)
        reach = torch.from_numpy(segments.reach.reshape(shape)).to(device)
        near = torch.from_numpy(np.ascontiguousarray(sentences)).to(device)
        place = torch.arange(width, device=device) - window
        distance = (place[None, :] - torch.arange(size, device=device)[:, None]).abs()
        distance.masked_fill_(distance == 0, width)  # a word is not a neighbour of itself
        found = (sentence[:, :, None] == near[:, None, :]) & (distance <= reach[:, :, None])
        neighbour = found.float()
        weight = neighbour.sum(2) * (number / segments.noise.shape[1])
        return cls(torch.from_numpy(segments.words.reshape(shape)).to(device), columns, neighbour, weight)


@dataclass(frozen=True)
class Loss:
    """The loss of this rank's pairs: its sum in nats, and how many pairs there are."""

    total: Float[Tensor, ""]
    pairs: Float[Tensor, ""]


class SkipGram:
    """The rule (`UpdateRule`) of plain skip-gram; memory for its matrices is kept from update to update.

    Args:
        window: largest distance of two neighbours.
        number: negatives of each pair.
    """

    status = ""

    def __init__(self, window: int, number: int) -> None:
        self._window, self._number = window, number
        self._kept: dict[str, Tensor] = {}

    def modules(self, initial: InitialVectors | None) -> Mapping[str, nn.Module]:
        """There is no module beside the tables."""
        return {}

    def optimizers(self) -> Mapping[str, ModuleOptimizer]:
        """The tables are updated by the section ``optimizer``, which is plain SGD."""
        return {}

    def batches(self, read: Callable[[int], Segments], step: int) -> Iterator[Segments]:
        """The segments of each update."""
        return (read(number) for number in itertools.count(step))

    def update(
        self, engines: Mapping[str, Engine], segments: Segments, step: int, *, measure: bool
    ) -> StepMetrics | None:
        """Do one update of the discriminator; with ``measure`` return the loss in nats a pair, if there is any."""
        engine = engines["discriminator"]
        assert isinstance(engine.module, EmbeddingTables)
        loss = self.move(engine.module, segments, engine.learning_rate(), measure=measure)
        if loss is None:
            return None
        pairs = distributed.all_reduce_sum(loss.pairs) / distributed.world_size()
        return {"loss": loss.total / pairs} if pairs else {}

    def move(
        self, tables: EmbeddingTables, segments: Segments, learning_rate: float, *, measure: bool = False
    ) -> Loss | None:
        """Move the tables against the summed gradient of all ranks' pairs; with ``measure`` return the loss before.

        Collective. SGD: nothing else is kept.
        """
        band = Band.of(segments, self._window, self._number, tables.input.device)
        x = tables.exchange.borrow(tables.input.data, band.centres.flatten())
        y = tables.exchange.borrow(tables.context.data, band.columns.flatten())
        dim = tables.input.shape[1]
        centres = self._select("x", x.rows, x.place).view(*band.centres.shape, dim)
        columns = self._select("y", y.rows, y.place).view(*band.columns.shape, dim)
        scores = self._product("s", centres, columns.transpose(1, 2))
        # Before the slope, which takes the memory of the scores.
        loss = _loss(scores, band) if measure else None
        slope = _slope(scores, band)
        bend_x, bend_y = _curvatures(centres, columns, band)
        # Centres and columns are copies: the gradient of the second table does not see the step of the first.
        for name, table, borrowed, left, right, bend in (
            ("dx", tables.input, x, slope, columns, bend_x),
            ("dy", tables.context, y, slope.transpose(1, 2), centres, bend_y),
        ):
            gradient = self._product(name, left, right).flatten(0, 1)
            rows, (values, bends) = tables.exchange.give_back(borrowed, gradient, bend.flatten()[:, None])
            self._shorten(name, table, rows, values, learning_rate * bends[:, 0])
            table.data.index_add_(0, rows, values, alpha=-learning_rate)
        return loss

    def _shorten(self, name: str, table: Tensor, rows: Tensor, values: Tensor, lengths: Tensor) -> None:
        """Scale down the gradients of rows whose step would be longer than `LONGEST`."""
        total = self._kept.get(f"{name}/length")
        if total is None:
            total = self._kept[f"{name}/length"] = lengths.new_zeros(len(table))
        # A row may occur several times: its whole step counts.
        total.index_add_(0, rows, lengths)
        length = total[rows]
        long = torch.nonzero(length > LONGEST)[:, 0]
        if len(long):
            values[long] *= (LONGEST / length[long])[:, None]
        # Zeroed where it was used: the table is kept for the next update.
        total[rows] = 0

    def _memory(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Memory that is written before it is read; to ask the system for it each time costs as much as its use."""
        size = int(np.prod(shape))
        kept = self._kept.get(name)
        if kept is None or len(kept) < size:
            kept = self._kept[name] = like.new_empty(size + size // 8)
        return kept[:size].view(shape)

    def _select(self, name: str, rows: Tensor, place: Tensor) -> Tensor:
        out = self._memory(name, rows, len(place), rows.shape[1])
        return torch.index_select(rows, 0, place, out=out)

    def _product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        return torch.bmm(left, right, out=self._memory(name, left, len(left), left.shape[1], right.shape[2]))


def _curvatures(
    centres: Float[Tensor, "b c d"], columns: Float[Tensor, "b w_plus_m d"], band: Band
) -> tuple[Float[Tensor, "b c"], Float[Tensor, "b w_plus_m"]]:
    """The curvature along each centre and each column, at most: a quarter of the weighted squares of the others."""
    width = band.neighbour.shape[2]
    x = torch.linalg.vector_norm(centres, dim=2).square_()
    y = torch.linalg.vector_norm(columns, dim=2).square_()
    noise = y[:, width:].sum(1, keepdim=True)
    along_x = (band.neighbour @ y[:, :width, None])[:, :, 0] + band.noise_weight * noise
    along_words = (band.neighbour.transpose(1, 2) @ x[:, :, None])[:, :, 0]
    along_noise = (band.noise_weight * x).sum(1, keepdim=True).expand(-1, y.shape[1] - width)
    return along_x / 4, torch.cat([along_words, along_noise], dim=1) / 4


def _slope(scores: Float[Tensor, "b c w_plus_m"], band: Band) -> Float[Tensor, "b c w_plus_m"]:
    """The derivative of the loss by each score, in the memory of the scores."""
    width = band.neighbour.shape[2]
    slope = scores.sigmoid_()
    slope[:, :, :width].sub_(1).mul_(band.neighbour)
    slope[:, :, width:].mul_(band.noise_weight[:, :, None])
    return slope


def _loss(scores: Float[Tensor, "b c w_plus_m"], band: Band) -> Loss:
    width = band.neighbour.shape[2]
    positive = (torch.nn.functional.softplus(-scores[:, :, :width]) * band.neighbour).sum(dtype=torch.float64)
    negative = (torch.nn.functional.softplus(scores[:, :, width:]).sum(2, dtype=torch.float64) * band.noise_weight).sum(
        dtype=torch.float64
    )
    return Loss(positive + negative, band.neighbour.sum(dtype=torch.float64))

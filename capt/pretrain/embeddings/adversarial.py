"""An update against an adaptive sampler: first the discriminator, and at the end of a window the generator.

With fixed noise alone it is the step of the jobs that plain skip-gram's closed form does not cover: self-adversarial
weights, NCE, the margin objective, and optimizers other than SGD. Under SGD long steps are shortened as there.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.embeddings.config import EmbeddingJob
from capt.pretrain.embeddings.generator import Draws, Window, WindowedBatch, windowed
from capt.pretrain.embeddings.initial import InitialVectors, build_tables
from capt.pretrain.embeddings.objectives import mixture_log_density
from capt.pretrain.embeddings.policy import (
    Played,
    Scores,
    curvatures,
    discriminator_loss,
    is_neighbour,
    judge,
    metrics_of,
    noise_share,
    reweighted,
    update_generator,
)
from capt.pretrain.embeddings.positives import Segments
from capt.pretrain.embeddings.skipgram import Band
from capt.pretrain.embeddings.tables import EmbeddingTables
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import StepMetrics

logger = logging.getLogger(__name__)

_COLLAPSE = 0.05
"""Share of distinct words among the draws of a generator below which it has collapsed."""


class Adversarial:
    """The rule (`UpdateRule`) of every job that is not plain skip-gram.

    Args:
        job: the job.
        index: the row of each word.
        noise: probability of each word in the fixed noise.
    """

    def __init__(self, job: EmbeddingJob, index: Mapping[str, int], noise: Float64[np.ndarray, " v"]) -> None:
        self._job, self._index = job, index
        self._log_noise = torch.from_numpy(noise).log().float()
        self._share = noise_share(job)
        self._shortens = job.optimizer.type == "sgd"
        self.status = ""

    def modules(self, initial: InitialVectors | None) -> Mapping[str, nn.Module]:
        """``generator``, where there is one: tables of the same shape, random, or from ``model.init`` as well."""
        if not self._job.has_generator:
            return {}
        return {"generator": build_tables(self._job, self._index, initial, "generator", random_context=True)}

    def optimizers(self) -> Mapping[str, ModuleOptimizer]:
        """The generator has a constant learning rate of its own."""
        if not self._job.has_generator:
            return {}
        section = self._job.generator
        changed = {"type": section.type, "lr": section.lr, "clip": 0.0}
        return {"generator": ModuleOptimizer(self._job.optimizer.model_copy(update=changed), schedule=False)}

    def batches(self, read: Callable[[int], Segments], step: int) -> Iterator[WindowedBatch | Segments]:
        """The updates from ``step`` on; with a generator each knows its window."""
        if not self._job.has_generator:
            return (read(number) for number in itertools.count(step))
        section, seed = self._job.generator, self._job.run.seed
        last = self._job.schedule.max_steps
        return windowed(
            read, step, last, section.every, lambda parts: Window(parts, seed, section.samples, section.precision)
        )

    def update(
        self, engines: Mapping[str, Engine], batch: WindowedBatch | Segments, step: int, *, measure: bool
    ) -> StepMetrics | None:
        """Move the discriminator, and with the last update of a window the generator."""
        job, engine, tables = self._job, engines["discriminator"], _tables(engines["discriminator"])
        segments = batch.segments if isinstance(batch, WindowedBatch) else batch
        band = Band.of(segments, job.data.window, job.negatives.number, tables.input.device)
        self._log_noise = self._log_noise.to(tables.input.device)
        draws = (
            batch.window.draws(_tables(engines["generator"]), batch.number)
            if isinstance(batch, WindowedBatch)
            else None
        )
        # Scores of the true neighbours, the noise of the segment, and the words that the generator drew.
        masked = self._masked(band, draws)
        x, y, drawn = _rows(tables, band, draws, train_input=step >= job.model.freeze_input)
        # Columns are the words around a block, then its noise.
        width = band.neighbour.shape[2]
        scores = x @ y.mT
        negative = scores[:, :, width:]
        if drawn is not None:
            negative = torch.cat([negative, (drawn @ x[..., None])[..., 0]], dim=2)
        # The generator learns once a window; where the update is logged it is judged as well.
        judged = measure or (isinstance(batch, WindowedBatch) and batch.is_last)
        log_generator = self._log_generator(engines, band, draws, judged=judged)
        log_density = self._log_density(band, draws, log_generator)
        known = Scores(scores[:, :, :width], negative)
        weights = reweighted(job, known, self._weights(band, draws, masked))
        loss = discriminator_loss(job, known, weights, log_density)
        metrics: dict[str, float] = {}
        if judged and isinstance(batch, WindowedBatch) and draws is not None and log_generator is not None:
            played = Played(
                band, draws, negative.detach(), masked, log_density, self._log_density_of_greedy(draws), log_generator,
                self._log_noise[_noise(band)],
            )  # fmt: skip
            outcome = judge(job, tables, played)
            metrics = metrics_of(played, outcome, len(self._log_noise)) if measure else {}
            if batch.is_last:
                update_generator(job, engines["generator"], played, outcome)
        # The discriminator moves last, so that the generator is paid by the scores that it was drawn against.
        loss.backward()
        along_x, *others = curvatures(x, y, drawn, weights) if self._shortens else (None, None, None)
        # Input rows that are frozen were not collected: they have no curvature here.
        tables.apply_gradients(engine, [along_x if x.requires_grad else None, *others])
        return {**self._report(loss.detach(), band, metrics), "grad_norm": engine.gradient_norm()} if measure else None

    def _report(self, loss: Tensor, band: Band, metrics: dict[str, float]) -> StepMetrics:
        """The metrics of an update, without a loss of no pair; a collapsed generator is named as the status."""
        pairs = distributed.all_reduce_sum(band.neighbour.sum()) / distributed.world_size()
        if metrics:
            entropy, distinct = metrics["generator_entropy"], metrics["distinct_rate"]
            collapsed = distinct < _COLLAPSE or entropy < math.log(2)
            status = f"GENERATOR COLLAPSED (entropy {entropy:.2f}, distinct {distinct:.3f})" if collapsed else ""
            if collapsed and not self.status:
                logger.warning(
                    "the generator has collapsed: %.2f nats of entropy, and %.3f of its draws are distinct; "
                    "raise generator.entropy or lower generator.lr", entropy, distinct,
                )  # fmt: skip
            self.status = status
        return {"loss": loss / pairs, **metrics} if pairs else {**metrics}

    def _masked(self, band: Band, draws: Draws | None) -> Bool[Tensor, "n m"] | None:
        if draws is None or not self._job.generator.mask_false_negatives:
            return None
        return is_neighbour(draws.words, _nearby(band))

    def _weights(self, band: Band, draws: Draws | None, masked: Tensor | None) -> Scores:
        """1 for positives; of negatives, how many draws of the mixture each represents."""
        noise = band.noise_weight[:, :, None] * self._share
        parts = [noise.expand(-1, -1, _noise(band).shape[1])]
        if draws is not None:
            m = draws.words.shape[1]
            pairs = band.neighbour.sum(2, keepdim=True)
            own = (pairs * ((1 - self._share) * self._job.negatives.number / m)).expand(-1, -1, m)
            parts.append(own if masked is None else own.masked_fill(masked.view(own.shape), 0.0))
        return Scores(band.neighbour, torch.cat(parts, dim=2))

    def _log_generator(
        self, engines: Mapping[str, Engine], band: Band, draws: Draws | None, *, judged: bool
    ) -> Scores | None:
        """The generator's log-probabilities: of all words for NCE and importance, else of the draws if it is judged."""
        everywhere = self._job.objective.type == "nce" or (judged and self._job.generator.importance)
        if draws is None or not (judged or everywhere):
            return None
        tables, width = _tables(engines["generator"]), band.neighbour.shape[2]
        with torch.no_grad():
            x, y, own = _rows(tables, band, draws, columns=everywhere)
            assert own is not None
            normaliser = draws.log_normaliser.view(*band.centres.shape, 1)
            of_draws = (own @ x[..., None])[..., 0] - normaliser
            if not everywhere:
                return Scores(of_draws[:, :, :0], of_draws)
            scores = x @ y.mT - normaliser
            return Scores(scores[:, :, :width], torch.cat([scores[:, :, width:], of_draws], dim=2))

    def _log_density(self, band: Band, draws: Draws | None, log_generator: Scores | None) -> Scores | None:
        """Log-density of the negatives' distribution at every word that is scored, for NCE."""
        if self._job.objective.type != "nce":
            return None
        width = band.neighbour.shape[2]
        noise = self._log_noise[band.columns][:, None]
        positive, negative = noise[..., :width], noise[..., width:].expand(-1, band.centres.shape[1], -1)
        if log_generator is None or draws is None:
            return Scores(positive, negative)
        drawn = self._log_noise[draws.words].unflatten(0, band.centres.shape)
        return Scores(
            mixture_log_density(positive, log_generator.positive, self._share),
            mixture_log_density(torch.cat([negative, drawn], dim=2), log_generator.negative, self._share),
        )

    def _log_density_of_greedy(self, draws: Draws) -> Float[Tensor, " n"] | None:
        if self._job.objective.type != "nce":
            return None
        return mixture_log_density(self._log_noise[draws.greedy], draws.log_greedy, self._share)


def _tables(engine: Engine) -> EmbeddingTables:
    assert isinstance(engine.module, EmbeddingTables)
    return engine.module


def _noise(band: Band) -> Int64[Tensor, "b k"]:
    return band.columns[:, band.neighbour.shape[2] :]


def _nearby(band: Band) -> Int64[Tensor, "n w"]:
    """The words that each centre may be paired with, -1 elsewhere."""
    words = band.columns[:, None, : band.neighbour.shape[2]].expand_as(band.neighbour)
    return words.masked_fill(band.neighbour == 0, -1).flatten(0, 1)


def _rows(
    tables: EmbeddingTables,
    band: Band,
    draws: Draws | None,
    *,
    train_input: bool = True,
    columns: bool = True,
) -> tuple[Float[Tensor, "b c d"], Float[Tensor, "b k d"], Float[Tensor, "b c m d"] | None]:
    """Rows of the centres, of the columns (none where they are not asked for) and of the draws of each centre."""
    shape = band.centres.shape
    with torch.set_grad_enabled(train_input and torch.is_grad_enabled()):
        x = tables.rows("input", band.centres.flatten()).unflatten(0, shape)
    asked = band.columns if columns else band.columns[:, :0]
    y = tables.rows("context", asked.flatten()).view(*asked.shape, x.shape[-1])
    if draws is None:
        return x, y, None
    own = tables.rows("context", draws.words.flatten())
    return x, y, own.view(*shape, draws.words.shape[1], x.shape[-1])

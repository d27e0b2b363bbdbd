"""An update against an adaptive sampler: first the discriminator, and at the end of a window the generator.

With fixed noise alone it is the step of the jobs that plain skip-gram's closed form does not cover: self-adversarial
weights, NCE, the margin objective, and optimizers other than SGD.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from pretrain.embeddings.config import EmbeddingJob
from pretrain.embeddings.data.positives import Segments
from pretrain.embeddings.objectives.classification import mixture_log_density
from pretrain.embeddings.sampler.false_negatives import is_neighbour
from pretrain.embeddings.sampler.window import Draws, WindowedBatch
from pretrain.embeddings.tables import EmbeddingTables
from pretrain.embeddings.training.contrast import Scores, discriminator_loss, noise_share
from pretrain.embeddings.training.policy import Played, update_generator
from pretrain.embeddings.training.skipgram import Band, Loss
from pretrain.engine.engines.base import Engine
from pretrain.engine.task import StepMetrics


@dataclass(frozen=True)
class Step:
    """What an update has measured: the discriminator's loss, and the generator's metrics where it was updated."""

    loss: Loss
    generator: StepMetrics


class Adversary:
    """The update of any job of the task.

    Args:
        job: the job.
        noise: probability of each word in the fixed noise.
    """

    def __init__(self, job: EmbeddingJob, noise: Float64[Tensor, " v"]) -> None:
        self._job = job
        self._log_noise = noise.log().float()
        self._share = noise_share(job)

    def update(
        self,
        discriminator: Engine,
        generator: Engine | None,
        batch: WindowedBatch | Segments,
        *,
        train_input: bool = True,
    ) -> Step:
        """Move the tables once. All ranks call this together.

        Args:
            discriminator: the engine of the embeddings.
            generator: that of the generator, where there is one; the batch is then a windowed one.
            batch: the positives and the noise of this rank.
            train_input: false keeps the embeddings and moves their contexts alone.
        """
        job, tables = self._job, _tables(discriminator)
        segments = batch.segments if isinstance(batch, WindowedBatch) else batch
        band = Band.of(segments, job.data.window, job.negatives.number, tables.input.device)
        draws = None
        if generator is not None:
            assert isinstance(batch, WindowedBatch)
            draws = batch.window.draws(_tables(generator), batch.number)
        weights = self._weights(band, draws)
        x, y, generated = _rows(tables, band, draws, train_input=train_input)
        width = band.neighbour.shape[2]
        scores = x @ y.mT
        negative = scores[:, :, width:]
        if generated is not None:
            negative = torch.cat([negative, (generated @ x[..., None])[..., 0]], dim=2)
        known = Scores(scores[:, :, :width], negative)
        log_generator = self._log_generator(generator, band, draws)
        log_density = self._log_density(band, draws, log_generator)
        loss = discriminator_loss(job, known, weights, log_density)
        loss.backward()
        tables.apply_gradients(discriminator)
        metrics: StepMetrics = {}
        if generator is not None and draws is not None and isinstance(batch, WindowedBatch) and batch.is_last:
            played = Played(
                band, draws, known.negative.detach(), weights, log_density, log_generator, self._log_noise[_noise(band)]
            )
            metrics = update_generator(job, generator, tables, played)
        return Step(Loss(loss.detach(), band.neighbour.sum()), metrics)

    def _weights(self, band: Band, draws: Draws | None) -> Scores:
        """1 for positives; of negatives, how many draws of the mixture each stands for."""
        noise = band.noise_weight[:, :, None] * self._share
        parts = [noise.expand(-1, -1, _noise(band).shape[1])]
        if draws is not None:
            m = draws.words.shape[1]
            pairs = band.neighbour.sum(2, keepdim=True)
            own = (pairs * ((1 - self._share) * self._job.negatives.number / m)).expand(-1, -1, m)
            if self._job.generator.mask_false_negatives:
                own = own.masked_fill(is_neighbour(draws.words, _nearby(band)).view(own.shape), 0.0)
            parts.append(own)
        return Scores(band.neighbour, torch.cat(parts, dim=2))

    def _log_generator(self, engine: Engine | None, band: Band, draws: Draws | None) -> Scores | None:
        """Log-probabilities of the generator, where the density or the importance of words is asked for."""
        if engine is None or draws is None:
            return None
        needed = self._job.objective.type == "nce" or self._job.generator.importance
        tables, width = _tables(engine), band.neighbour.shape[2]
        with torch.no_grad():
            x, y, own = _rows(tables, band, draws, columns=needed)
            assert own is not None
            normaliser = draws.log_normaliser.view(*band.centres.shape, 1)
            of_draws = (own @ x[..., None])[..., 0] - normaliser
            if not needed:
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
        drawn = self._log_noise[draws.words].view(*band.centres.shape, -1)
        return Scores(
            mixture_log_density(positive, log_generator.positive, self._share),
            mixture_log_density(torch.cat([negative, drawn], dim=2), log_generator.negative, self._share),
        )


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

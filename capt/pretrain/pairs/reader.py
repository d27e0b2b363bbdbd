"""The rows of all sources of a job: read, checked, with what a teacher says of their texts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError, DataError, counted
from capt.pretrain.base.verification import Verifier
from capt.pretrain.data.mixture import size_factors
from capt.pretrain.pairs.checks import check_known_positives, check_sizes, check_source_rows
from capt.pretrain.pairs.config import PairJob
from capt.pretrain.pairs.data_config import PairSource
from capt.pretrain.pairs.losses import NO_LOSS
from capt.pretrain.pairs.prepare import HELD_OUT, PreparedSource, prepare_source
from capt.pretrain.pairs.sources import SourceRows
from capt.pretrain.pairs.teacher import with_vectors
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowsReader:
    """Reads the rows that a job trains on, and those that it holds out. All ranks of the verifier do so together.

    Attributes:
        job: the job.
        tokenizer: of the encoder.
        max_positions: of the encoder.
        verifier: of the files and of the store of rows.
        teacher: has vectors of all texts; None: none is asked for.
    """

    job: PairJob
    tokenizer: TextTokenizer
    max_positions: int
    verifier: Verifier
    teacher: Any = None

    def train(self) -> tuple[list[SourceRows], list[SourceRows]]:
        """Read each source: the rows that are trained on, and those that a fraction of it holds out.

        Raises:
            DataError: rows that cannot be read, or that the job cannot train on; on all ranks.
            ConfigError: likewise.
        """
        data = self.job.data
        asked = self.fraction
        train, held_out = [], []
        for source in data.each():
            # A file that is missing on one rank is an error on all, not a hang.
            with self.verifier.ranks.synchronize_errors():
                files = source.paths()
            prepared = self._prepared(source, files, None if asked == "auto" else asked)
            if prepared.held_out is not None:
                held_out.append(_measured(prepared.held_out))
            if prepared.train is None:
                raise DataError(
                    f"source {source.name}: data.validation_fraction {asked} holds out all of its pairs; lower it"
                )
            check_source_rows(self.job, prepared.train, prepared.record)
            train.append(self._long_enough(prepared.train))
        train = self._weighted(train)
        check_sizes(self.job, train)
        check_known_positives(self.job, train)
        return train, held_out

    def validation(self) -> list[SourceRows]:
        """Read the held-out files. Raises as `train`."""
        data = self.job.data
        if not data.validation_files:
            return []
        # They are compared by the first source's prompts and lengths, whatever loss it trains with.
        first = next(data.each())
        whole = {
            "loss": NO_LOSS if first.loss == NO_LOSS else "auto",
            "negatives_below": None,
            "stored_negatives": None,
        }
        source = first.model_copy(update={**HELD_OUT, **whole})
        with self.verifier.ranks.synchronize_errors():
            files = data.held_out_paths()
        pairs = self._prepared(source, files, 0.0, "validation").train
        return [] if pairs is None else [_measured(pairs)]

    @property
    def fraction(self) -> float | Literal["auto"]:
        """The share of each source that is held out; 0 where there are files of held-out pairs."""
        return 0.0 if self.job.data.validation_files else self.job.data.validation_fraction

    def _prepared(
        self, source: PairSource, files: Sequence[Path], fraction: float | None, what: str = ""
    ) -> PreparedSource:
        hashes = self.teacher is not None
        prepared = prepare_source(
            source, files, fraction, self.tokenizer, self.max_positions, self.verifier, what, hashes=hashes
        )
        train, held_out = with_vectors([prepared.train, prepared.held_out], files, self.teacher, self.verifier)
        return PreparedSource(train, held_out, prepared.record)

    def _weighted(self, sources: list[SourceRows]) -> list[SourceRows]:
        """The sources with weights that count their rows, by ``data.temperature``."""
        temperature = self.job.data.temperature
        if temperature is None:
            return sources
        weighted = []
        for pairs, factor in zip(sources, size_factors([*map(len, sources)], temperature), strict=True):
            source = pairs.source.model_copy(update={"weight": pairs.source.weight * factor})
            weighted.append(replace(pairs, source=source))
        return weighted

    def _long_enough(self, pairs: SourceRows) -> SourceRows:
        """The rows of a source of spans that are long enough; all rows of other sources."""
        source, spans = pairs.source, pairs.source.spans
        if pairs.view.draw is None:
            return pairs
        if source.prompts.query or source.prompts.document:
            raise ConfigError(
                f"source {source.name}: spans of a text have no prompt before them: leave data.prompts out, or set "
                "data.view=dropout"
            )
        kept = pairs.long_enough()
        if not len(kept) and spans.short == "skip":
            raise DataError(
                f"source {source.name}: no text is long enough: {spans.need} (data.spans): lower them, set "
                "data.spans.short=whole, or data.view=dropout"
            )
        short = len(pairs) - len(kept)
        if not len(kept) and not (self.job.model.dropout or self.job.model.attention_dropout):
            raise ConfigError(
                f"source {source.name}: no text is long enough for two spans, and model.dropout is 0, so that both "
                "views of all texts are the same: set model.dropout above 0, or lower data.spans.least"
            )
        if short and distributed.rank() == 0:
            fate = "are left out" if spans.short == "skip" else "are whole in both views, which dropout tells apart"
            logger.log(
                logging.INFO if len(kept) else logging.WARNING,
                "source %s: %s of fewer than %d tokens %s (spans.short=%s)",
                source.name, counted(short, "text"), spans.shortest, fate, spans.short,
            )  # fmt: skip
        return kept if spans.short == "skip" else pairs


def log_epochs(job: PairJob, sources: Sequence[SourceRows]) -> None:
    """Log how often the job reads each source: many epochs of few pairs are learnt by heart."""
    if distributed.rank() == 0:
        steps, total = job.schedule.max_steps, sum(pairs.source.weight for pairs in sources)
        samples = job.batch_sizes.samples_before(steps)
        for pairs in sources:
            epochs = samples * pairs.source.weight / total / len(pairs)
            logger.info("source %s: %.1f epochs in %s", pairs.source.name, epochs, counted(steps, "step"))


def _measured(pairs: SourceRows) -> SourceRows:
    """Return held-out rows without texts that are too short for two spans, each of which would be found by itself."""
    skips = pairs.view.draw is not None and pairs.source.spans.short == "skip"
    return pairs.long_enough() if skips else pairs

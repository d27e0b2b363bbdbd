"""The ``capt_pairs`` task: queries and documents through one encoder, one contrast over the whole step."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, quoted
from capt.pretrain.base.overlap import report_overlap, shared
from capt.pretrain.base.randomness import derive
from capt.pretrain.base.records import Count
from capt.pretrain.config.schema import Job
from capt.pretrain.contrastive.collapse import Figures
from capt.pretrain.contrastive.task import Assemble, ContrastState, ContrastTask, Scales
from capt.pretrain.contrastive.views import Views
from capt.pretrain.data.sampler import MixedSampler, Sampler
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import Progress, Rows, SampleOrder, StepMetrics
from capt.pretrain.language.backbone import Backbone, load_backbone
from capt.pretrain.pairs.batches import Assembler, PairBatch
from capt.pretrain.pairs.config import PairJob, PairSource, Pooling
from capt.pretrain.pairs.forms import read_pairs
from capt.pretrain.pairs.loss import PairTerm
from capt.pretrain.pairs.module import PairModule, PairOutput
from capt.pretrain.pairs.restore import pooling_of_init
from capt.pretrain.pairs.sources import SourceRows, encode_source, split_pairs
from capt.pretrain.pairs.validation import Pool, pool_of, validate

logger = logging.getLogger(__name__)


class _State(ContrastState):
    """State of a job of pairs in a checkpoint."""

    pairs: Annotated[str, Field(max_length=1000)] | None = None
    batch: Count = 0


class PairTask(ContrastTask[PairBatch]):
    """A pretrained encoder under InfoNCE of queries against documents, hard negatives among them."""

    job: PairJob
    State = _State
    words = "set of pairs"
    noise = ()
    contrast_loss = "loss/pairs"

    def __init__(self, job: Job, run_dir: Path) -> None:
        assert isinstance(job, PairJob)
        super().__init__(job)
        torch.manual_seed(derive(job.run.seed, "init"))
        section = job.model
        self._backbone: Backbone = load_backbone(
            section.init,
            dropout=section.dropout,
            attention_dropout=section.attention_dropout,
            allow_missing=section.allow_missing,
        )
        pooling: Pooling = pooling_of_init(section.init) if section.pooling == "auto" else section.pooling
        update = {"encoder": self._backbone.hf_config, "pooling": pooling}
        self.job = job.model_copy(update={"model": section.model_copy(update=update)})
        self.tokenizer, self._pooling = self._backbone.tokenizer, pooling
        self.sources, self.pool = self._read()
        self._tokenizer_folder = run_dir / "tokenizer"
        self._width = section.projection or self._backbone.encoder.hidden_size

    def _read(self) -> tuple[list[SourceRows], Pool | None]:
        """The training pairs of each source, and the held-out ones."""
        data = self.job.data
        fraction = 0.0 if data.validation_files else data.validation_fraction
        train, held_out = [], []
        for source in data.each():
            files = source.paths()
            options: dict[str, Any] = {"form": source.form, "corpus": source.corpus, "columns": source.columns}
            mine, others = split_pairs(read_pairs(files, **options), fraction)
            if others and not mine:
                raise DataError(
                    f"source {source.name}: data.validation_fraction {fraction:g} holds out all {len(others):,} pairs; "
                    "lower it"
                )
            train.append(self._encoded(source, mine))
            if len(train[-1]) < self.job.batch.global_:
                raise DataError(
                    f"source {source.name}: {len(train[-1]):,} pairs do not fill a step, in which a pair comes once: "
                    f"set batch.global to {len(train[-1]):,} or fewer"
                )
            if len(np.unique(train[-1].documents.keys)) < 2:
                raise DataError(f"source {source.name}: all documents are one text: there is nothing to tell apart")
            if others:
                held_out.append(
                    self._encoded(source.model_copy(update={**_HELD_OUT, "name": f"{source.name}, held out"}), others)
                )
        if data.validation_files:
            source = next(data.each()).model_copy(update={**_HELD_OUT, "name": "validation"})
            options = {"form": source.form, "corpus": source.corpus, "columns": source.columns}
            held_out.append(self._encoded(source, read_pairs(data.held_out_paths(), **options)))
        if not held_out:
            return train, None
        pool = pool_of(held_out, self.job.validate_.samples)
        queries = (key for rows in train for key in rows.queries.keys.tolist())
        documents = (key for rows in train for key in rows.documents.keys.tolist())
        counts = {
            "query": shared(queries, pool.query_keys.tolist()),
            "document": shared(documents, pool.document_keys.tolist()),
        }
        if distributed.rank() == 0:  # all ranks read the same pairs
            report_overlap(counts, train="training text", validation="held-out text")
        return train, pool

    def _encoded(self, source: PairSource, pairs: Any) -> SourceRows:
        rows = encode_source(source, pairs, self.tokenizer, self._backbone.encoder.max_positions)
        section = self.job.model
        alone = (rows.positives.counts == 1) & (rows.documents.keys[rows.positives.values[rows.positives.starts[:-1]]]
                 == rows.queries.keys[rows.query])  # fmt: skip
        if bool(alone.all()) and not (section.dropout or section.attention_dropout):
            raise ConfigError(
                f"source {source.name}: every text is its own positive, and model.dropout is 0, so that both views are "
                "the same: set model.dropout above 0"
            )
        return rows

    @property
    def samples(self) -> int:
        """Rows of all sources."""
        return sum(map(len, self.sources))

    @property
    def width(self) -> int:
        """Columns of the vectors."""
        return self._width

    @property
    def fingerprint(self) -> str:
        """The digest of the tokenizer."""
        return self.tokenizer.fingerprint

    def digests(self) -> Mapping[str, tuple[str, str]]:
        """The pairs' of all sources as the encoder reads them, and name and share of each, which decide their order."""
        return {"pairs": ("pairs", self._digest)}

    @cached_property
    def _digest(self) -> str:
        total = sum(rows.source.weight for rows in self.sources)
        parts = [f"{rows.source.name} {rows.source.weight / total} {rows.digest()}" for rows in self.sources]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def build_module(self) -> PairModule:
        """The pretrained encoder under its pooling."""
        return PairModule(self.job, self._backbone.encoder, self._pooling)

    def build_term(self) -> PairTerm:
        """The contrast of queries and documents."""
        return PairTerm(self.job.contrast, self.width, self.job.batch.global_)

    def _sampler(self) -> Sampler | MixedSampler:
        if len(self.sources) == 1:
            return Sampler(self.samples, self.job.run.seed)
        weights = tuple(rows.source.weight for rows in self.sources)
        return MixedSampler(tuple(map(len, self.sources)), weights, self.job.batch.global_, self.job.run.seed)

    def step_assembler(self, batch: int, parts: int, world: int, rank: int) -> Callable[[int, int], list[PairBatch]]:
        """What makes the ``parts`` micro-batches of ``rank`` of the step that begins at a sample."""
        cached = self.job.contrast.is_cached(parts)
        assembler = Assembler(
            self.sources, self._sampler(), batch=batch, parts=parts, world=world, rank=rank, seed=self.job.run.seed,
            bucketing=self.job.data.bucketing and cached,
        )  # fmt: skip
        return lambda start, step: assembler(start)

    def assembler(self, split: str) -> Assemble[PairBatch]:
        """Not used: the steps of pairs are assembled whole (`step_assembler`)."""
        raise AssertionError("pairs are assembled by the step")

    def sample_order(self) -> SampleOrder:
        """The order of `Sampler`, or of `MixedSampler` where there are several sources."""
        order = super().sample_order()
        sampler = self._sampler()
        if isinstance(sampler, Sampler):
            return order
        return replace(order, sizes=sampler.sizes, weights=sampler.weights, block=sampler.block)

    def rows(self, batch: PairBatch) -> Rows:
        """The rows of the pairs, and a digest of the texts of each."""
        return Rows(batch.ids.numpy(), [batch.contents.numpy()])

    def tokens(self, batch: list[PairBatch]) -> int:
        """Tokens of a step over all ranks, padding not counted."""
        return batch[0].step_tokens

    def scales(self, batch: list[PairBatch], device: torch.device) -> Scales:
        """There is no loss beside the contrast."""
        return {}

    def losses(
        self, engine: Engine, batch: PairBatch, scales: Scales, step: int
    ) -> tuple[Views | None, Tensor, dict[str, Tensor]]:
        """What is contrasted of a micro-batch; it has no other loss."""
        views = self.represent(engine, batch, step)
        return views, views.s.new_zeros(()), {}

    def represent(self, engine: Engine, batch: PairBatch, step: int) -> Views:
        """Unit rows of the queries, of their positives, and of the hard negatives."""
        queries, documents = batch.texts(self._backbone.encoder.pad_id, engine.device)
        output: PairOutput = engine([queries, documents], step=step)
        s, rows = output.rows
        n = len(s)
        source = self.sources[batch.source].source

        def there(ids: Tensor) -> Tensor:
            return ids.to(engine.device, non_blocking=True)

        return Views(
            s, rows[:n], there(batch.keys), source.temperature or output.temperature,
            negatives=rows[n:] if source.negatives else None,
            negative_ids=there(batch.negative_keys),
            owners=there(batch.owners),
            own_alone=not source.in_batch,
        )  # fmt: skip

    def validate(self, engines: Mapping[str, Engine], progress: Progress) -> StepMetrics:
        """Loss and retrieval over the held-out pairs."""
        if self.pool is None:
            return {}
        section, engine = self.job.validate_, engines["model"]
        micro = self.job.micro_batch(distributed.world_size())
        pad_id = self._backbone.encoder.pad_id
        report = validate(engine, self.pool, section.temperature, min(micro, 256), pad_id)
        self.collapse.look("validation", progress.step, Figures(
            (report["recall/to_document"] + report["recall/to_query"]) / 2,
            report["uniformity"],
            report["first_direction"],
        ))  # fmt: skip
        return {**report}

    def validation_fault(self) -> str:
        """Why the held-out pairs do not suffice for `validate`."""
        if self.pool is None:
            return "there are no held-out pairs" if self.job.checkpoint.best is not None else ""
        if len(self.pool) < 2:
            return (
                f"it compares pairs with each other, and has {len(self.pool)}; raise data.validation_fraction, or set "
                "data.validation_files"
            )
        return ""

    def flops_per_step(self) -> float:
        """Forward and backward FLOP of a global batch, of the sources in proportion to their weights."""
        weights = [rows.source.weight for rows in self.sources]
        per_pair = [self._flops_per_pair(rows) for rows in self.sources]
        mean = sum(w * f for w, f in zip(weights, per_pair, strict=True)) / sum(weights)
        return 3.0 * self.job.batch.global_ * mean

    def _flops_per_pair(self, rows: SourceRows) -> float:
        encoder = self._backbone.encoder
        documents = float(rows.documents.lengths.mean())
        negatives = min(rows.source.negatives or 0, float(rows.negatives.counts.mean()))
        return encoder.flops(float(rows.queries.lengths.mean())) + (1 + negatives) * encoder.flops(documents)

    def save_state(self, folder: Path) -> dict[str, Any]:
        """What every task with a contrast keeps, and the batch, by which sources take turns."""
        return {**super().save_state(folder), "batch": self.job.batch.global_}

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Reload what was saved; refuse another batch where sources take turns by it.

        Raises:
            CheckpointError: as `ContrastTask.load_state`, or the batch has changed.
        """
        super().load_state(folder, state)
        batch = state.get("batch")
        if len(self.sources) > 1 and batch != self.job.batch.global_:
            raise CheckpointError(
                f"{folder}: trained with batch.global {batch}, this job has {self.job.batch.global_}: sources take "
                f"turns by whole batches; set batch.global={batch}"
            )

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """Commands that export the encoder and search with it."""
        return [
            f"capt convert {quoted(run_dir)} OUT --to sentence-transformers",
            "capt neighbors OUT --text FILE QUERY (search in a file)",
        ]

    def export_files(self) -> Mapping[str, Path]:
        """Every checkpoint holds a copy of the tokenizer."""
        self.tokenizer.save(self._tokenizer_folder)
        return {"tokenizer": self._tokenizer_folder}


_HELD_OUT = {"negatives": 0, "in_batch": True}

TASK = PairTask

"""The ``capt_pairs`` task: queries and documents through one encoder, one contrast over the whole step."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, DataError, counted, quoted
from capt.pretrain.base.overlap import Shared, report_overlap
from capt.pretrain.base.randomness import derive
from capt.pretrain.base.records import Count
from capt.pretrain.base.verification import Verifier, all_ranks, digest_of
from capt.pretrain.config.schema import Job
from capt.pretrain.contrastive.collapse import Figures
from capt.pretrain.contrastive.task import Assemble, ContrastState, ContrastTask, Scales, masked_scale
from capt.pretrain.contrastive.term import options_of
from capt.pretrain.contrastive.views import Views
from capt.pretrain.data.corruption import IGNORE, CorruptionVocabulary, Corruptor
from capt.pretrain.data.sampler import BlockMixtureSampler, Sampler
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import Progress, Role, Rows, SampleOrder, StepMetrics, is_logged
from capt.pretrain.language.load import Backbone, load_backbone
from capt.pretrain.pairs.batches import PairAssembler, PairBatch
from capt.pretrain.pairs.checks import require_hard_negatives
from capt.pretrain.pairs.config import PairJob, Pooling
from capt.pretrain.pairs.draws import Noise
from capt.pretrain.pairs.known import Compared
from capt.pretrain.pairs.load import (
    SourceReading,
    left_behind,
    pooling_of_init,
    reading,
    with_own_length,
    with_random_weights,
)
from capt.pretrain.pairs.loss import PairTerm
from capt.pretrain.pairs.losses import NO_LOSS
from capt.pretrain.pairs.module import PairModule, PairOutput
from capt.pretrain.pairs.reader import RowsReader, log_epochs
from capt.pretrain.pairs.representations import module_of, similarity_of
from capt.pretrain.pairs.sources import SourceRows
from capt.pretrain.pairs.teacher import vectors_of_texts, with_teacher
from capt.pretrain.pairs.texts import MaskedTexts, encoded_by_length, padded
from capt.pretrain.pairs.validation import Pools, in_any, log_reached, pools_of, validate
from capt.pretrain.pairs.views import PairViews, batch_views

logger = logging.getLogger(__name__)


class _State(ContrastState):
    """State of a job of pairs in a checkpoint."""

    pairs: Annotated[str, Field(max_length=1000)] | None = None
    batch: Count = 0
    teacher: Annotated[str, Field(max_length=64)] | None = None


class PairTask(ContrastTask[PairBatch]):
    """A pretrained encoder under InfoNCE of queries against documents, hard negatives among them."""

    job: PairJob
    State = _State
    data_name = "set of pairs"
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
        if section.random:
            self._backbone = with_random_weights(self._backbone, section, job.run.seed)
        pooling: Pooling = pooling_of_init(section.init) if section.pooling == "auto" else section.pooling
        for remark in left_behind(section.init, job.data):
            logger.warning("%s", remark)
        # A checkpoint then says by itself what encoder and pooling it has, without model.init.
        update = {"encoder": self._backbone.hf_config, "pooling": pooling}
        self.job = job.model_copy(update={"model": section.model_copy(update=update)})
        self.job = with_own_length(self.job, self._backbone.encoder.max_positions)
        self.tokenizer, self._pooling = self._backbone.tokenizer, pooling
        self.similarity = similarity_of(self.job)
        verifier = Verifier(job.data.cache, all_ranks())
        self.job, self.teacher = with_teacher(self.job, self._backbone.encoder, verifier)
        reader = RowsReader(
            self.job, self.tokenizer, self._backbone.encoder.max_positions, verifier, self.teacher
        )  # fmt: skip
        self.sources, held_out = self._read(reader)
        self.pools = self._pools(held_out)
        self._tokenizer_folder = run_dir / "tokenizer"
        self._width: int = self.job.contrast.columns(module_of(self.job).width_of(self.job, self._backbone.encoder))

    def _read(self, reader: RowsReader) -> tuple[list[SourceRows], list[SourceRows]]:
        """The training pairs of each source, which decide the number of steps, and the held-out ones."""
        train, held_out = reader.train()
        schedule = self.job.schedule.in_steps(sum(map(len, train)), self.job.batch.global_)
        self.job = self.job.model_copy(update={"schedule": schedule})
        log_epochs(self.job, train)
        held_out = [pairs for pairs in (*held_out, *reader.validation()) if len(pairs)]
        if not held_out and reader.fraction and distributed.rank() == 0:
            logger.warning(
                "validation is off: data.validation_fraction %s of %s comes to no pair; raise it, or set "
                "data.validation_files (data.validation_fraction=0 says that none is wanted)",
                reader.fraction, counted(sum(map(len, train)), "pair"),
            )  # fmt: skip
        return train, held_out

    def _pools(self, held_out: list[SourceRows]) -> Pools:
        """Build the pools of validation, and report which of their texts are trained on too."""
        pools = pools_of(held_out, self.job.validate_.samples, self.teacher)
        # Once: every rank has the same texts, and the comparison reads all keys.
        if distributed.rank() == 0 and (there := pools.keys()):
            counts = {}
            for what, texts in (("query", "queries"), ("document", "documents")):
                mine = np.concatenate(there[what])
                trained = [getattr(pairs, texts).keys for pairs in self.sources]
                counts[what] = Shared(int(in_any(mine, trained).sum()), len(mine))
            report_overlap(counts, train="training text", validation="held-out text")
        return pools

    @property
    def samples(self) -> int:
        """Rows of all sources."""
        return sum(map(len, self.sources))

    @property
    def pretext(self) -> str:
        """The view of rows of one text, where there are no others and they are vectors, by which it is measured."""
        if self.similarity is not None:
            return ""
        views = {pairs.source.view for pairs in self.sources if pairs.is_one_column}
        alone = all(pairs.is_one_column and pairs.loss.contrasts for pairs in self.sources)
        return f"data.view {', '.join(sorted(views))}" if alone else ""

    @property
    def views_differ(self) -> bool:
        """True where no source has views that differ by dropout."""
        return all(pairs.view.differs for pairs in self.sources)

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self._width

    @property
    def fingerprint(self) -> str:
        """The digest of the tokenizer."""
        return self.tokenizer.fingerprint

    def digests(self) -> Mapping[str, tuple[str, str]]:
        """The pairs' of all sources as the encoder reads them, and name and share of each, which decide their order."""
        teacher = {} if self.teacher is None else {"teacher": ("teacher's vectors", self.teacher.digest)}
        return {"pairs": ("pairs", self._digest), **teacher}

    @cached_property
    def _digest(self) -> str:
        total = sum(pairs.source.weight for pairs in self.sources)
        parts = [
            f"{pairs.source.name} {pairs.source.weight / total} {pairs.digest}"
            + (" random" if pairs.source.draw == "random" else "")
            for pairs in self.sources
        ]
        mixed = " mixed" if self.job.data.batches == "mixed" and len(parts) > 1 else ""
        return hashlib.sha256(("".join(parts) + mixed).encode()).hexdigest()

    def build_module(self) -> PairModule:
        """The pretrained encoder under its representation."""
        module: PairModule = module_of(self.job)(self.job, self._backbone.encoder, self._pooling)
        return module

    def require_negatives(self) -> None:
        """Refuse steps of one pair without hard negatives, where a loss compares pairs with each other."""
        if self.fewest_contrasted < 2:
            require_hard_negatives(self.sources, self.lonely_batch, queue=self.job.contrast.queue > 0)

    def build_term(self) -> PairTerm:
        """The contrast of queries and documents."""
        job = self.job
        return PairTerm(job.contrast, self.width, job.batch.global_, job.distillation, self.similarity)

    def _sampler(self) -> Sampler | BlockMixtureSampler:
        if len(self.sources) == 1:
            return Sampler(self.samples, self.job.run.seed)
        weights = tuple(pairs.source.weight for pairs in self.sources)
        sizes, mixed = tuple(map(len, self.sources)), self.job.data.batches == "mixed"
        return BlockMixtureSampler(sizes, weights, self.job.batch.global_, self.job.run.seed, mixed)

    def step_assembler(self, batch: int, parts: int, world: int, rank: int) -> Callable[[int, int], list[PairBatch]]:
        """Return an assembler of ``rank``'s micro-batches: ``parts``, or the number by ``batch.micro_tokens``."""
        # Micro-batches of different lengths leave the loss as it is only where the contrast is over the whole step.
        budget = self.job.batch.micro_tokens
        cached = budget is not None or self.job.contrast.is_cached(parts)
        assembler = PairAssembler(
            self.sources, self._sampler(), batch=batch, parts=parts, world=world, rank=rank, seed=self.job.run.seed,
            bucketing=self.job.data.bucketing and cached, budget=budget, noise=self._noise(),
            masks=self.job.mlm.weight > 0, compared=self._compared(cached), teacher=self.teacher,
        )  # fmt: skip
        rate_at, steps = self.job.corruption.rate_at, self.job.schedule.max_steps
        return lambda start, step: assembler(start, rate_at(step / steps))

    def _compared(self, cached: bool) -> Compared:
        """Say what a step's queries are compared with; with ``cached`` all micro-batches have one contrast."""
        section = self.job.contrast
        return Compared(
            whole=cached,
            in_batch=section.in_batch,
            own_hard=not options_of(section).sees_all_hard_negatives,
            queue=section.queue > 0,
            masks=section.mask_duplicates,
        )

    def _noise(self) -> Noise | None:
        """Return the noise that corrupts texts, where a loss or a second view asks for it."""
        if not self.job.mlm.weight and not any(pairs.view.corrupts for pairs in self.sources):
            return None
        tokenizer = self.tokenizer
        vocabulary = CorruptionVocabulary(tokenizer.vocab_size, tokenizer.special.mask, tuple(tokenizer.special_ids))
        make = functools.partial(Corruptor, self.job.corruption, vocabulary)
        return Noise(make, tokenizer.special.pad, self.job.run.seed)

    def assembler(self, split: str) -> Assemble[PairBatch]:
        """Not used: the steps of pairs are assembled whole (`step_assembler`)."""
        raise AssertionError("pairs are assembled by the step")

    def sample_order(self) -> SampleOrder:
        """The order of `Sampler`, or of `BlockMixtureSampler` where there are several sources."""
        order = super().sample_order()
        drawn = [pairs.source for pairs in self.sources if pairs.view.draw is not None]
        if drawn:
            spans = {source.name: [source.view, source.spans.model_dump(mode="json")] for source in drawn}
            order = replace(order, noise=digest_of({"spans": spans}))
        sampler = self._sampler()
        # A single source needs nothing beyond the size and the seed.
        if isinstance(sampler, Sampler):
            return order
        return replace(order, sizes=sampler.sizes, weights=sampler.weights, block=sampler.block, mixed=sampler.mixed)

    def rows(self, batch: PairBatch) -> Rows:
        """The rows of the pairs, and a digest of the texts of each."""
        return Rows(batch.ids.numpy(), [batch.contents.numpy()])

    def tokens(self, batch: list[PairBatch], sequences: int) -> int:
        """Tokens of a step over all ranks, padding not counted."""
        return batch[0].step_tokens

    def scales(self, batch: list[PairBatch], device: torch.device) -> Scales:
        """Masked language modelling is the sum over masked tokens divided by their number in the whole step."""
        if not self.job.mlm.weight:
            return {}
        masked_here = sum(int((part.labels != IGNORE).sum()) for part in batch)
        return {"mlm": masked_scale(masked_here, len(batch), device)}

    def losses(
        self, engine: Engine, batch: PairBatch, scales: Scales, step: int
    ) -> tuple[Views | None, Tensor, dict[str, Tensor]]:
        """Return a micro-batch's views to contrast, its masked-language loss times ``mlm.weight``, and its metrics."""
        masked = batch.masked_texts(self._backbone.encoder.pad_id, engine.device)
        rows, taught, output = self._forward(engine, batch, step, masked)
        views = self._views(batch, rows, taught, output.temperature)
        if output.masked is None:
            return views, views.s.new_zeros(()), {}
        mlm = output.masked.loss_sum * scales["mlm"].to(output.masked.loss_sum.dtype)
        metrics = {"loss/mlm": mlm, "accuracy/mlm": output.masked.correct * scales["mlm"]}
        return views, self.job.mlm.weight * mlm, metrics

    def represent(self, engine: Engine, batch: PairBatch, step: int) -> Views:
        """The rows of the queries, of their positives, and of the hard negatives."""
        rows, taught, output = self._forward(engine, batch, step, None)
        return self._views(batch, rows, taught, output.temperature)

    def _forward(
        self, engine: Engine, batch: PairBatch, step: int, masked: MaskedTexts | None
    ) -> tuple[Tensor, Tensor | None, PairOutput]:
        """The rows of the queries and of the documents, those for a teacher, and what else the module computes."""
        by_length = encoded_by_length(engine.device, self.job.engine.zero_stage)
        texts = batch.texts(self._backbone.encoder.pad_id, engine.device, by_length=by_length)
        output: PairOutput = engine(texts.groups, step=step, masked=masked, for_loss=True)
        pointwise = output.taught is not None and (self.job.distillation.cosine or self.job.distillation.mse)
        return texts.in_order(output.rows), texts.in_order(output.taught or ()) if pointwise else None, output

    def _views(
        self, batch: PairBatch, rows: Tensor, taught: Tensor | None, temperature: float | Tensor
    ) -> PairViews:  # fmt: skip
        return batch_views(batch, rows, taught, temperature, self.sources, self.job.distillation)

    def step(self, engines: Mapping[str, Engine], batch: list[PairBatch], progress: Progress) -> StepMetrics:
        """Do one optimizer step; see `ContrastTask.step`. Every loss is reported by itself, without its weight.

        Raises:
            DataError: no query of the step has a negative, on all ranks.
        """
        self._check_candidates(batch[0], progress.step + 1)
        shown, found = is_logged(self.job, progress.step + 1), batch[0].candidates
        report = super().step(engines, batch, progress)
        assert isinstance(self.contrast, PairTerm)
        if shown and found.documents:
            report["contrast/left_out"] = found.left_out / found.documents
        # `take_losses` reports the contrast too, beside the losses of the other parts.
        return {
            name: value for name, value in report.items() if name != self.contrast_loss
        } | self.contrast.take_losses()

    def _check_candidates(self, batch: PairBatch, step: int) -> None:
        """Refuse a step in which no query has a negative; say once that some have none."""
        found, rows, section = batch.candidates, sum(batch.step_rows), self.job.contrast
        # The queue has nothing before the first step, and is not read before its own.
        if not found.alone or (section.queue and step > max(1, section.queue_start)):
            return
        if found.alone == rows and not section.queue:
            negatives = any(pairs.source.negatives for pairs in self.sources)
            raise DataError(
                f"step {step}: none of its {counted(rows, 'query')} has a negative, for there is no other document in "
                f"the step but known positives of each: raise batch.global ({rows}), "
                f"{'give every row a hard negative' if negatives else 'set data.negatives above 0'}, or set "
                "contrast.queue"
            )
        if not self._said_alone and distributed.rank() == 0:
            logger.warning(
                "step %d: %d of %s have no negative, for there is no other document in the step but known positives of "
                "theirs: they teach nothing (said once; contrast/left_out has the share of each step)",
                step, found.alone, counted(found.queries, "query"),
            )  # fmt: skip
        self._said_alone = True

    def validate(self, engines: Mapping[str, Engine], progress: Progress) -> StepMetrics:
        """Loss and retrieval over the held-out pairs, and the rank correlation of scored ones."""
        if not self.pools:
            return {}
        section, engine = self.job.validate_, engines["model"]
        micro = self.job.micro_batch(distributed.world_size())
        pad_id = self._backbone.encoder.pad_id
        widths = self.job.contrast.matryoshka
        report = validate(
            engine, self.pools, section.temperature, min(micro, 256), pad_id, widths, self.similarity
        )  # fmt: skip
        if "uniformity" in report:
            self.collapse.look("validation", progress.step, Figures(
                (report["recall/to_document"] + report["recall/to_query"]) / 2,
                report["uniformity"],
                report["first_direction"],
            ))  # fmt: skip
        if all(pairs.loss_name == NO_LOSS for pairs in self.sources):
            report.pop("loss/pairs", None)  # nothing trains it
        log_reached(report, progress.step)
        return {**report}

    def text_ids(self, texts: Sequence[str], role: Role) -> list[list[int]]:
        """The ids of each text, with the prompts and lengths of the source with the largest weight."""
        read, tokenizer = self._reading, self.tokenizer
        if role == "query":
            return tokenizer.encode_framed([read.prompts.query + text for text in texts], read.query_length)
        prompt = read.prompts.document if role == "document" else ""
        return tokenizer.encode_framed([prompt + text for text in texts], read.document_length)

    @cached_property
    def _reading(self) -> SourceReading:
        return reading(self.job, self.tokenizer, self._backbone.encoder.max_positions)

    def teacher_rows(self, texts: Sequence[str], role: Role) -> Float[np.ndarray, "n e"] | None:
        """The teacher's vectors of texts that are searched; None without a teacher, or where a text has none."""
        return None if self.teacher is None else vectors_of_texts(self.teacher, texts, role)

    def text_vectors(self, engines: Mapping[str, Engine], ids: Sequence[Sequence[int]]) -> Tensor:
        """The rows of a batch of texts."""
        engine = engines["model"]
        texts = padded([np.array(row) for row in ids], self._backbone.encoder.pad_id, engine.device)
        # Step 0: the rows do not depend on the temperature.
        output: PairOutput = engine([texts], step=0)
        return output.rows[0]

    def validation_fault(self) -> str:
        """Return the reason why the held-out pairs do not suffice for `validate`."""
        if not self.pools:
            return "there are no held-out pairs" if self.job.checkpoint.best is not None else ""
        pools = self.pools.each()
        if (fewest := min(len(pool) for pool in pools if pool is not None)) < 2:
            return (
                f"it compares pairs with each other, and has {fewest}; raise data.validation_fraction, or set "
                "data.validation_files"
            )
        return ""

    def flops_per_step(self) -> float:
        """Forward and backward FLOP of a global batch, of the sources in proportion to their weights."""
        weights = [pairs.source.weight for pairs in self.sources]
        per_pair = [self._flops_per_pair(pairs) for pairs in self.sources]
        mean = sum(w * f for w, f in zip(weights, per_pair, strict=True)) / sum(weights)
        # 3: a backward pass costs two forward passes.
        return 3.0 * self.job.batch.global_ * mean

    def _flops_per_pair(self, pairs: SourceRows) -> float:
        encoder = self._backbone.encoder
        query, document, negatives = pairs.flops_shape
        once = encoder.flops(query) + (0 if pairs.is_alone else (1 + negatives) * encoder.flops(document))
        if not self.job.mlm.weight:
            return once
        # One column is one text: it is masked once.
        both = [query] if pairs.is_one_column else [query, document]
        masked = [document] if pairs.view.corrupts else both
        # The dense layer and the vocabulary, at masked tokens alone; a multiplication and an addition each.
        head = 2.0 * encoder.hidden_size * (encoder.hidden_size + encoder.vocab_size) * self.job.corruption.highest_rate
        return once + sum(encoder.flops(length) + length * head for length in masked)

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Return the state of every task with a contrast, and the batch, by which sources take turns."""
        return {**super().save_state(folder), "batch": self.job.batch.global_}

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Reload what was saved; refuse another batch where sources take turns by it.

        Raises:
            CheckpointError: as `ContrastTask.load_state`, or the batch has changed.
        """
        super().load_state(folder, state)
        batch = state.get("batch")
        # A single source has the same order for any batch.
        if len(self.sources) > 1 and batch != self.job.batch.global_:
            raise CheckpointError(
                f"{folder}: trained with batch.global {batch}, this job has {self.job.batch.global_}: sources take "
                f"turns by whole batches; set batch.global={batch}"
            )

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """Commands that measure the encoder, export it, and search with it."""
        return [
            f"capt evaluate {quoted(run_dir)} --retrieval FOLDER (BEIR or NanoBEIR, or a file of pairs)",
            f"capt convert {quoted(run_dir)} OUT --to sentence-transformers",
            "capt neighbors OUT --text FILE QUERY (search in a file)",
        ]

    def export_files(self) -> Mapping[str, Path]:
        """Every checkpoint holds a copy of the tokenizer."""
        self.tokenizer.save(self._tokenizer_folder)
        return {"tokenizer": self._tokenizer_folder}


TASK = PairTask

"""The ``capt_pairs`` task: queries and documents through one encoder, one contrast over the whole step."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, counted, quoted
from capt.pretrain.base.files import write_text
from capt.pretrain.base.overlap import Shared, report_overlap, text_hash
from capt.pretrain.base.randomness import derive
from capt.pretrain.base.records import Count
from capt.pretrain.base.verification import Verifier, all_ranks, digest_of
from capt.pretrain.config.schema import Job
from capt.pretrain.contrastive.collapse import Figures
from capt.pretrain.contrastive.task import Assemble, ContrastState, ContrastTask, Scales, masked_scale
from capt.pretrain.contrastive.term import options_of
from capt.pretrain.contrastive.views import Views
from capt.pretrain.data.corruption import IGNORE, CorruptionVocabulary, Corruptor
from capt.pretrain.data.mixture import size_factors
from capt.pretrain.data.sampler import BlockMixtureSampler, Sampler
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import Progress, Role, Rows, SampleOrder, StepMetrics, is_logged
from capt.pretrain.language.load import Backbone, load_backbone
from capt.pretrain.models.foreign.encoder import build_encoder
from capt.pretrain.pairs.batches import MaskedTexts, Noise, PairAssembler, PairBatch, padded
from capt.pretrain.pairs.config import PairJob, Pooling, of_teacher
from capt.pretrain.pairs.forms import Pair
from capt.pretrain.pairs.known import Compared, left_out
from capt.pretrain.pairs.load import SourceReading, left_behind, pooling_of_init, reading, with_own_length
from capt.pretrain.pairs.loss import PairTerm, PairViews, parts_of
from capt.pretrain.pairs.losses import NO_LOSS
from capt.pretrain.pairs.module import PairModule, PairOutput
from capt.pretrain.pairs.representations import check_loss, module_of, similarity_of
from capt.pretrain.pairs.sources import EncodedTexts, Side, SourceRows
from capt.pretrain.pairs.store import HELD_OUT, RowsRecord, pairs_of, prepare_source
from capt.pretrain.pairs.validation import Pools, in_any, pools_of, validate
from capt.pretrain.registry import teacher_vectors

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
            self._backbone = self._random(self._backbone)
        pooling: Pooling = pooling_of_init(section.init) if section.pooling == "auto" else section.pooling
        for remark in left_behind(section.init, job.data):
            logger.warning("%s", remark)
        # A checkpoint then says by itself what encoder and pooling it has, without model.init.
        update = {"encoder": self._backbone.hf_config, "pooling": pooling}
        self.job = job.model_copy(update={"model": section.model_copy(update=update)})
        self.job = with_own_length(self.job, self._backbone.encoder.max_positions)
        self.tokenizer, self._pooling = self._backbone.tokenizer, pooling
        self.similarity = similarity_of(self.job)
        self._verifier = Verifier(job.data.cache, all_ranks())
        self.teacher = self._teacher()
        self.sources, held_out = self._read()
        self.pools = self._pools(held_out)
        self._several = len({pairs.source.temperature for pairs in self.sources}) > 1
        self._tokenizer_folder = run_dir / "tokenizer"
        self._width: int = self.job.contrast.columns(module_of(self.job).width_of(self.job, self._backbone.encoder))

    def _random(self, init: Backbone) -> Backbone:
        """Fresh weights, drawn by the seed, in the place of those of ``model.init``."""
        section = self.job.model
        if distributed.rank() == 0:
            logger.warning(
                "model.random: training begins with random weights; of distillation from such a start (65M parameters, "
                "5M texts) a cosine of 0.77 to the teacher and 0.09 nDCG@10 on NFCorpus are known: capt shrink TEACHER "
                "STUDENT --layers 0,2,4 makes a nearer start"
            )
        torch.manual_seed(derive(self.job.run.seed, "init"))
        encoder = build_encoder(
            init.hf_config, dropout=section.dropout, attention_dropout=section.attention_dropout,
            source=str(section.init),
        )  # fmt: skip
        return replace(init, encoder=encoder)

    def _teacher(self) -> Any:
        """Open the teacher's vectors, and fill in what they say of it and a projection into the export."""
        section, width = self.job.distillation, module_of(self.job).width_of(self.job, self._backbone.encoder)
        if section.vectors is None:
            return None
        teacher = teacher_vectors(section, self._verifier)
        facts = teacher.facts()
        if section.teacher is not None and section.teacher["dimension"] != teacher.dimension:
            raise CheckpointError(
                f"distillation.vectors: {teacher.dimension} dimensions, where the job began with "
                f"{section.teacher['dimension']}: name the vectors that it began with"
            )
        update: dict[str, Any] = {"distillation": section.model_copy(update={"teacher": facts})}
        if section.projection == "export" and width != teacher.dimension:
            if self.job.model.projection is not None:
                raise ConfigError(
                    f"distillation.projection=export makes vectors of the teacher's {teacher.dimension} columns: leave "
                    f"model.projection={width} out"
                )
            update["model"] = self.job.model.model_copy(update={"projection": teacher.dimension})
        self.job = self.job.model_copy(update=update)
        width = module_of(self.job).width_of(self.job, self._backbone.encoder)
        if self.job.distillation.projected_width(width) is not None and self.job.contrast.matryoshka:
            raise ConfigError(
                f"contrast.matryoshka cuts vectors of {width} columns, and a map to the teacher's {teacher.dimension} "
                "is left behind: set distillation.projection=export, or train with distillation.listwise alone"
            )
        return teacher

    def _taught(self, splits: Sequence[SourceRows | None], files: Sequence[Path]) -> list[SourceRows | None]:
        """The rows of ``files`` with the places of their texts' vectors.

        Raises:
            DataError: a text has no vector, or one that is damaged or says nothing.
        """
        if self.teacher is None:
            return list(splits)
        with self._verifier.ranks.synchronize_errors():
            found = [None if pairs is None else self._placed(pairs) for pairs in splits]
            there = [pairs for pairs in found if pairs is not None]
            self._require_vectors(there, files)
            for pairs, side, texts in _sides(there):
                assert texts.vectors is not None
                # The ranks look at the vectors together.
                mine = texts.vectors[distributed.rank() :: distributed.world_size()]
                self.teacher.check(mine, pairs.role_of(side))
        return found

    def _placed(self, pairs: SourceRows) -> SourceRows:
        if pairs.is_alone:  # no query: it has the prompt and the length of a document, as the teacher's vector has
            pairs = replace(pairs, queries=pairs.documents, query=pairs.positives.values)
        sides = {}
        for _, side, texts in _sides([pairs]):
            assert texts.hashes is not None, "the rows were written with them"
            sides[side] = replace(texts, vectors=self.teacher.find(texts.hashes, pairs.role_of(side)))
        return replace(pairs, queries=sides["query"], documents=sides["document"])

    def _require_vectors(self, splits: Sequence[SourceRows], files: Sequence[Path]) -> None:
        """Refuse texts without vectors: write them into a file, and name the command that encodes it."""
        for role in ("document", "query"):
            # Of one kind of vectors both sides are counted together.
            mine = [
                texts for pairs, side, texts in _sides(splits)
                if self.teacher.side(pairs.role_of(side)) is self.teacher.side(role)
            ]  # fmt: skip
            missing, total = set(), set()
            for texts in mine:
                assert texts.hashes is not None
                assert texts.vectors is not None
                total |= _hashes(texts.hashes)
                missing |= _hashes(texts.hashes[texts.vectors < 0])
            if not missing:
                continue
            name = digest_of(sorted(each.hex() for each in missing))
            path = self.job.data.cache / "without_vectors" / f"{name}.jsonl"
            if distributed.rank() == 0:
                _write_texts(path, missing, pairs_of(splits[0].source, files))
            raise DataError(
                f"source {splits[0].source.name}: {len(missing):,} of {counted(len(total), 'text')} have no vector in "
                f"{self.teacher.side(role).folder}; add them: {self.teacher.command(path, role)}"
            )

    def _read(self) -> tuple[list[SourceRows], list[SourceRows]]:
        """The training pairs of each source, and the held-out ones."""
        data = self.job.data
        asked = 0.0 if data.validation_files else data.validation_fraction
        fraction = None if asked == "auto" else asked
        verifier, hashes = self._verifier, self.teacher is not None
        encoder = (self.tokenizer, self._backbone.encoder.max_positions)
        train, held_out = [], []
        for source in data.each():
            # A file that is missing on one rank is an error on all, not a hang.
            with verifier.ranks.synchronize_errors():
                files = source.paths()
            prepared = prepare_source(source, files, fraction, *encoder, verifier, hashes=hashes)
            rows, others = self._taught([prepared.train, prepared.held_out], files)
            if others is not None:
                held_out.append(_measured(others))
            if rows is None:
                raise DataError(
                    f"source {source.name}: data.validation_fraction {asked} holds out all of its pairs; lower it"
                )
            self._check(rows, prepared.record)
            train.append(self._spanned(rows))
        train = self._weighted(train)
        self._check_sizes(train)
        self._check_negatives(train)
        schedule = self.job.schedule.in_steps(sum(map(len, train)), self.job.batch.global_)
        self.job = self.job.model_copy(update={"schedule": schedule})
        self._tell_epochs(train)
        # Held-out files are compared by the first source's prompts and lengths, whatever loss it trains with.
        if data.validation_files:
            first = next(data.each())
            whole = {
                "loss": NO_LOSS if first.loss == NO_LOSS else "auto",
                "negatives_below": None,
                "stored_negatives": None,
            }
            source = first.model_copy(update={**HELD_OUT, **whole})
            with verifier.ranks.synchronize_errors():
                files = data.held_out_paths()
            pairs = prepare_source(source, files, 0.0, *encoder, verifier, "validation", hashes=hashes).train
            (pairs,) = self._taught([pairs], files)
            held_out += [] if pairs is None else [_measured(pairs)]
        held_out = [pairs for pairs in held_out if len(pairs)]
        if not held_out and asked and distributed.rank() == 0:
            logger.warning(
                "validation is off: data.validation_fraction %s of %s comes to no pair; raise it, or set "
                "data.validation_files (data.validation_fraction=0 says that none is wanted)",
                asked, counted(sum(map(len, train)), "pair"),
            )  # fmt: skip
        return train, held_out

    def _weighted(self, sources: list[SourceRows]) -> list[SourceRows]:
        """The sources with weights that count their rows, by ``data.temperature``."""
        temperature = self.job.data.temperature
        if temperature is None:
            return sources
        found = []
        for pairs, factor in zip(sources, size_factors([*map(len, sources)], temperature), strict=True):
            source = pairs.source.model_copy(update={"weight": pairs.source.weight * factor})
            found.append(replace(pairs, source=source))
        return found

    def _check(self, pairs: SourceRows, record: RowsRecord) -> None:
        """Refuse a source that the losses of the job cannot train on; warn of negatives that it does not use."""
        source, section = pairs.source, self.job.model
        check_loss(section.representation, pairs.loss_name)
        if record.unused and distributed.rank() == 0:
            logger.warning(
                "source %s: %s of the rows are not used; data.negatives is 0, and says how many a query takes a step",
                source.name, counted(record.unused, "hard negative"),
            )  # fmt: skip
        # Before the first step: a row over the budget may come after hours.
        most = pairs.most_tokens
        if (budget := self.job.batch.micro_tokens) is not None and most > budget:
            raise DataError(
                f"source {source.name}: a row may have {most:,} tokens, and batch.micro_tokens is {budget:,}: set "
                f"batch.micro_tokens={most} or more, or allow shorter texts (data.sequence_length) or fewer negatives"
            )
        # Without dropout the two views of one text are the same vector, and teach nothing about it.
        whole = not pairs.view.corrupts and pairs.view.draw is None
        alike = whole and not (section.dropout or section.attention_dropout)
        if alike and pairs.loss.contrasts and pairs.scores is None and pairs.is_one_column:
            raise ConfigError(
                f"source {source.name}: every text is its own positive, and model.dropout is 0, so that both views are "
                "the same: set model.dropout above 0, or data.view=corrupted"
            )
        of_loss = "teacher" in pairs.loss.needs
        if record.unscored and (self.job.distillation.weight or of_loss):
            asks = f"the loss {pairs.loss_name}" if of_loss else "distillation.weight"
            remedy = "divide the source" if of_loss else "set distillation.weight=0, or divide the source"
            raise DataError(
                f"{record.unscored}: pos_scores or neg_scores are missing, which other rows of source {source.name} "
                f"have: {asks} needs both in every row of a source, or in none; {remedy}"
            )
        if "teacher" in pairs.loss.needs and not pairs.has_teacher:
            raise DataError(
                f"source {source.name}: the loss {pairs.loss_name} needs a teacher's scores (pos_scores, neg_scores); "
                "capt mine --cross-encoder writes them"
            )
        if not pairs.loss.contrasts:
            return
        if bool((pairs.documents.keys == pairs.documents.keys[0]).all()):
            raise DataError(f"source {source.name}: all documents are one text: there is nothing to tell apart")

    def _spanned(self, pairs: SourceRows) -> SourceRows:
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

    def _check_sizes(self, sources: Sequence[SourceRows]) -> None:
        """Refuse a source that has fewer pairs than a step takes from it."""
        batch, mixed = self.job.batch.global_, self.job.data.batches == "mixed"
        total = sum(pairs.source.weight for pairs in sources)
        for pairs in sources:
            # A mixed step has of a source its share, to one sample.
            most = min(batch, math.ceil(batch * pairs.source.weight / total) + 1) if mixed else batch
            if len(pairs) < most:
                fewer = "lower its weight, or batch.global" if mixed else f"set batch.global to {len(pairs):,} or fewer"
                raise DataError(
                    f"source {pairs.source.name}: {len(pairs):,} pairs do not fill {'its part of ' if mixed else ''}a "
                    f"step, in which a pair comes once: {fewer}"
                )
        if self.job.distillation.weight and not any(pairs.has_teacher for pairs in sources):
            raise DataError(
                "distillation.weight: no source has a teacher's scores (pos_scores, neg_scores); capt mine "
                "--cross-encoder writes them, or set distillation.weight=0"
            )

    def _check_negatives(self, sources: Sequence[SourceRows]) -> None:
        """Refuse pairs of which no query has a negative; say how many documents are known positives of a query."""
        section = self.job.contrast
        # Documents of other sources may be negatives too, in a mixed step or by way of the queue.
        sees_others = len(sources) > 1 and (self.job.data.batches == "mixed" or section.queue > 0)
        for pairs in sources:
            if not pairs.loss.contrasts or not pairs.source.in_batch or not section.mask_duplicates:
                continue
            if sum(map(len, sources)) > _MOST_COMPARED:
                continue
            found = left_out(pairs.keys, [each.known for each in sources])
            if found.alone == len(pairs) and not sees_others and not pairs.source.negatives:
                raise DataError(
                    f"source {pairs.source.name}: every document of its {len(pairs):,} pairs is a known positive of "
                    "every query, so that no query has a negative and the loss is 0: give it pairs of different "
                    "queries and documents, or hard negatives (data.negatives)"
                )
            if distributed.rank() == 0 and found.share:
                level = logging.WARNING if found.share >= _MUCH or found.alone else logging.INFO
                logger.log(level, "source %s: %s", pairs.source.name, found.text)

    def _tell_epochs(self, sources: Sequence[SourceRows]) -> None:
        """Log how often the job reads each source: many epochs of few pairs are learnt by heart."""
        if distributed.rank() == 0:
            steps, total = self.job.schedule.max_steps, sum(pairs.source.weight for pairs in sources)
            samples = self.job.batch_sizes.samples_before(steps)
            for pairs in sources:
                epochs = samples * pairs.source.weight / total / len(pairs)
                logger.info("source %s: %.1f epochs in %s", pairs.source.name, epochs, counted(steps, "step"))

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
        if self.fewest_contrasted > 1:
            return
        remedy = "set batch.global to 2 or more with contrast.cached=auto and contrast.in_batch=global"
        for pairs in self.sources:
            if pairs.loss.contrasts and self.job.contrast.queue:
                continue  # its queries are compared with the queue
            if pairs.loss.compares and not pairs.source.negatives:
                raise ConfigError(
                    f"source {pairs.source.name}: {self.lonely_batch} compares a query with no other pair and has no "
                    f"negative, so that the loss is 0 and nothing is learned: {remedy}, data.negatives above 0, or "
                    "contrast.queue"
                )
            without = int((np.diff(pairs.negatives.starts) == 0).sum())
            if pairs.loss.compares and without:
                raise ConfigError(
                    f"source {pairs.source.name}: {self.lonely_batch} compares a query with no other pair, and "
                    f"{counted(without, 'row')} of {len(pairs):,} have no hard negative, so that their loss is 0: "
                    f"{remedy}, or contrast.queue, or leave them out"
                )

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
        views = self._views(batch, rows, taught, output.temperature, engine.device)
        if output.masked is None:
            return views, views.s.new_zeros(()), {}
        mlm = output.masked.loss_sum * scales["mlm"].to(output.masked.loss_sum.dtype)
        metrics = {"loss/mlm": mlm, "accuracy/mlm": output.masked.correct * scales["mlm"]}
        return views, self.job.mlm.weight * mlm, metrics

    def represent(self, engine: Engine, batch: PairBatch, step: int) -> Views:
        """The rows of the queries, of their positives, and of the hard negatives."""
        rows, taught, output = self._forward(engine, batch, step, None)
        return self._views(batch, rows, taught, output.temperature, engine.device)

    def _forward(
        self, engine: Engine, batch: PairBatch, step: int, masked: MaskedTexts | None
    ) -> tuple[Tensor, Tensor | None, PairOutput]:
        """The rows of the queries and of the documents, those for a teacher, and what else the module computes."""
        # More passes of fewer tokens pay on a CPU. Under ZeRO 3 all ranks gather the weights in each pass, so that
        # all must have the same number of them.
        by_length = engine.device.type == "cpu" and self.job.engine.zero_stage < 3
        texts = batch.texts(self._backbone.encoder.pad_id, engine.device, by_length=by_length)
        output: PairOutput = engine(texts.groups, step=step, masked=masked, for_loss=True)
        pointwise = output.taught is not None and (self.job.distillation.cosine or self.job.distillation.mse)
        return texts.in_order(output.rows), texts.in_order(output.taught or ()) if pointwise else None, output

    def _views(
        self, batch: PairBatch, rows: Tensor, taught_rows: Tensor | None, temperature: float | Tensor,
        device: torch.device,
    ) -> PairViews:  # fmt: skip
        n = len(batch.ids)
        # A text alone is encoded once, and nothing compares it with another view.
        s, documents = rows[:n], rows if batch.is_alone else rows[n:]
        section = self.job.distillation
        parts = parts_of(self.sources, batch.step_rows)
        used = [pairs for pairs, number in zip(self.sources, batch.step_rows, strict=True) if number]
        several = len(parts) > 1

        def there(values: Tensor) -> Tensor:
            return values.to(device, non_blocking=True)

        # One temperature, or with several sources in a batch the one of the source of each row.
        temperatures = None
        if len(used) > 1 and self._several:
            assert not isinstance(temperature, Tensor), "the job refuses a learned one beside those of sources"
            of_sources = [pairs.source.temperature or temperature for pairs in self.sources]
            temperatures = there(torch.tensor(of_sources)[batch.sources])
        scored = any(pairs.scores is not None for pairs in used)
        asked = self.job.distillation.weight > 0 or any("teacher" in pairs.loss.needs for pairs in used)
        taught = asked and any(pairs.has_teacher for pairs in used)
        return PairViews(
            s, documents[:n], there(batch.keys), temperature,
            negatives=documents[n:] if any(pairs.source.negatives for pairs in used) else None,
            negative_ids=there(batch.negative_keys),
            owners=there(batch.owners),
            parts=parts,
            sources=there(batch.sources) if several else None,
            temperatures=temperatures,
            scores=there(batch.scores) if scored else None,
            teacher=there(batch.teacher) if taught else None,
            negative_teacher=there(batch.negative_teacher) if taught else None,
            query_ids=there(batch.query_keys) if len(batch.known) else None,
            known=there(batch.known) if len(batch.known) else None,
            texts=rows if section.listwise else None,
            taught=taught_rows,
            teacher_vectors=None if section.vectors is None else there(batch.teacher_vectors),
        )  # fmt: skip

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
        self._tell_reached(report, progress.step)
        return {**report}

    def _tell_reached(self, report: Mapping[str, float], step: int) -> None:
        """Log how near the teacher is."""
        if "teacher/cosine" not in report or distributed.rank():
            return
        recall = ""
        if "teacher/reached" in report:
            own = report[of_teacher("recall/to_document")]
            recall = (
                f"; recall@1 {report['recall/to_document']:.3f} to documents, the teacher's {own:.3f}: "
                f"{report['teacher/reached']:.1%} of the teacher is reached"
            )
        logger.info(
            "step %d: cosine to the teacher %.4f, 5th percentile %.4f%s",
            step, report["teacher/cosine"], report["teacher/cosine_p5"], recall,
        )  # fmt: skip

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
        if self.teacher is None:
            return None
        store = self.teacher.side(role)
        places = store.find(map(text_hash, texts))
        if (missing := int((places < 0).sum())) and distributed.rank() == 0:
            logger.warning(
                "validate.retrieval: %s of %s (%s) have no vector in %s, so that the teacher's own figures are left "
                "out; add them: %s",
                f"{missing:,}", counted(len(texts), "text"), role, store.folder,
                self.teacher.command(Path("FOLDER"), role),
            )  # fmt: skip
        return None if missing else store.at(places)

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


_MOST_COMPARED = 1 << 20
"""Rows of all sources up to which it is counted before the first step what is left out: a second."""

_MUCH = 0.1
"""Share of the documents of a step from which on it is a warning that they are left out."""


TASK = PairTask


def _sides(rows: Sequence[SourceRows]) -> Iterator[tuple[SourceRows, Side, EncodedTexts]]:
    for pairs in rows:
        yield pairs, "query", pairs.queries
        yield pairs, "document", pairs.documents


def _hashes(values: np.ndarray) -> set[bytes]:
    raw = values.tobytes()
    return {raw[at : at + 16] for at in range(0, len(raw), 32)}


def _write_texts(path: Path, wanted: set[bytes], pairs: Iterable[tuple[str, Pair]]) -> None:
    """Write those of the texts of ``pairs`` that have one of the hashes ``wanted``, each once."""
    found: dict[bytes, str] = {}
    for _, pair in pairs:
        for text in (pair.query, *pair.positives, *pair.negatives):
            if (name := text_hash(text)) in wanted:
                found[name] = text
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in found.values()))


def _measured(pairs: SourceRows) -> SourceRows:
    """Return held-out rows without texts that are too short for two spans, each of which would be found by itself."""
    skips = pairs.view.draw is not None and pairs.source.spans.short == "skip"
    return pairs.long_enough() if skips else pairs

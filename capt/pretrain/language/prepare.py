"""Tokenizer and packed data of a job: as configured, from the cache, or made on the first run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, counted
from capt.pretrain.base.overlap import report_overlap, shared
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.base.verification import ALONE, Ranks, Verifier
from capt.pretrain.bottleneck.folder import StoredHeads, read_heads
from capt.pretrain.config.schema import Job
from capt.pretrain.data.config import PARAGRAPHS, DataConfig
from capt.pretrain.data.corruption import CorruptionVocabulary, Corruptor
from capt.pretrain.data.mixture_dataset import MixtureDataset, mixture_of, source_shares
from capt.pretrain.data.passages import PassageDataset
from capt.pretrain.data.prepare import open_corpus, tokenizer_corpus, verifier_of
from capt.pretrain.data.prepare import prepare as prepare_shards
from capt.pretrain.data.shards import PackedDataset, ShardSet
from capt.pretrain.data.sources import named
from capt.pretrain.engine.run_folder import kept_in_run
from capt.pretrain.language.batches import LanguageAssembler, ViewPlan, Windows
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.language.inputs import with_sizes_of_init
from capt.pretrain.models.architecture import EncoderConfig
from capt.pretrain.models.hf_config import TOKENIZER_FILES, local_folder
from capt.pretrain.models.hf_model import HFModel, read_hf
from capt.pretrain.models.sentence_folder import encoder_folder
from capt.pretrain.models.tokenizer import trained_tokenizer
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_MOST_DOCUMENTS = 200_000
"""Documents of training that are compared with those of validation: some seconds."""
_FAR = 8
"""Times its longest span that a passage has whose crops seldom meet: one pair in four."""


@dataclass(frozen=True)
class PreparedLanguage:
    """The inputs of a job: tokenizer, windows of both splits, corruptor, and the completed configuration."""

    tokenizer: TextTokenizer
    tokenizer_folder: Path
    train: Windows
    validation: Mapping[str, PackedDataset | PassageDataset]
    """The held-out windows of each source that has any; a job without a mixture has one, without a name."""
    corruptor: Corruptor
    model_config: EncoderConfig
    source: HFModel | None
    """The pretrained model that ``model.init`` names."""
    heads: StoredHeads | None
    """The heads of a bottleneck that ``model.init`` has."""
    job: LanguageJob
    """The job with the sizes that ``model.init`` decides filled in."""


def vocabulary_of(tokenizer: TextTokenizer) -> CorruptionVocabulary:
    """Return the parts of a tokenizer that the corruptions need."""
    return CorruptionVocabulary(tokenizer.vocab_size, tokenizer.special.mask, tuple(tokenizer.special_ids))


def _configured_tokenizer(job: LanguageJob) -> Path | None:
    if job.tokenizer.path is not None:
        return local_folder(job.tokenizer.path, TOKENIZER_FILES)
    return None if job.model.init is None else encoder_folder(local_folder(job.model.init))


def tokenizer_folder(
    job: LanguageJob, progress: ProgressCallback | None = None, verifier: Verifier | None = None
) -> Path:
    """The folder of the job's tokenizer: ``tokenizer.path``, that of ``model.init``, or one trained on ``data.*``.

    A trained one is cached by content. All ranks of ``verifier`` call this: one trains, the others wait.
    """
    section = job.tokenizer
    configured = _configured_tokenizer(job)
    if configured is not None:
        return configured
    verifier = verifier or verifier_of(job.data)
    # A trained tokenizer depends on the bytes of the text and on how they are read.
    contents = []
    for name, data in job.data.parts():
        with named(name):
            corpus = open_corpus(data, "train", progress, verifier)
        assert corpus is not None, "every job has training text"
        contents.append({
            "text": [(part["format"], part["sha256"]) for part in corpus.contents()],
            "columns": [data.text_column, data.document_start, data.validation_fraction],
        })  # fmt: skip
    content = {"mixture": contents} if job.data.mixture else contents[0]
    return trained_tokenizer(
        section, content, lambda: tokenizer_corpus(job.data, progress), job.data.cache,
        longest=job.model.max_positions, ranks=verifier.ranks,
    )  # fmt: skip


def tokenizer_of_run(job: LanguageJob, run_dir: Path, ranks: Ranks = ALONE) -> Path | None:
    """The tokenizer that a run which has a checkpoint trained on its text, in the run's own folder; None without one.

    It stays that of the run whatever becomes of the text (``data.allow_change``) and of the cache. The run keeps a
    copy, since checkpoints are pruned. All ``ranks`` call this.
    """
    if job.tokenizer.path is not None or job.model.init is not None:
        return None

    def trained_alike(before: Job) -> bool:
        return isinstance(before, LanguageJob) and before.tokenizer == job.tokenizer and before.model.init is None

    return kept_in_run(run_dir, "tokenizer", trained_alike, ranks)


def prepare(
    job: LanguageJob, progress: ProgressCallback | None = None, ranks: Ranks = ALONE, run_dir: Path | None = None
) -> PreparedLanguage:
    """Everything a rank needs before it can build the model. All ``ranks`` call this; what fails on one fails on all.

    A run in ``run_dir`` that has begun continues with the tokenizer that it has trained.

    Raises:
        DataError: unusable text, damaged shards, shards of another tokenizer.
        ConfigError: a model configuration that does not fit the tokenizer.
    """
    verifier = verifier_of(job.data, ranks)
    with ranks.synchronize_errors():
        _configured_tokenizer(job)  # a hub that one node cannot reach
    folder = None if run_dir is None else tokenizer_of_run(job, run_dir, ranks)
    folder = folder or tokenizer_folder(job, progress, verifier)
    length = job.data.sequence_length
    source = heads = None
    with ranks.synchronize_errors():
        tokenizer = load_tokenizer(folder)
        if job.model.init is not None:
            source = read_hf(job.model.init)
            heads = _heads_of(encoder_folder(local_folder(job.model.init)), job)
            if heads is not None and not source.has_mlm:  # an encoder alone, whose decoder kept it
                source = replace(source, state={**source.state, **heads.mlm})
            model = with_sizes_of_init(job.model, length, source.config, source.tokenizer, tokenizer)
            if fault := job.documents_fault(model):
                raise ConfigError(fault)
            job = job.model_copy(update={"model": model})
            logger.info(
                "%s: %d layers x %d, %d heads, %d ids, %d positions", job.model.init,
                model.layers, model.hidden, model.heads, model.vocab_rows, model.max_positions,
            )  # fmt: skip
        config = job.model.for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    if source is None and (unused := config.unused_positions()) is not None:
        logger.warning(unused)
    train, validation = prepare_windows(job, tokenizer, progress, verifier)
    return PreparedLanguage(
        tokenizer=tokenizer,
        tokenizer_folder=folder,
        train=train,
        validation=validation,
        corruptor=Corruptor(job.corruption, vocabulary_of(tokenizer), length),
        model_config=config,
        source=source,
        heads=heads,
        job=job,
    )


def _heads_of(folder: Path, job: LanguageJob) -> StoredHeads | None:
    """Read the heads of a bottleneck beside an encoder; damaged ones end a job only if it would continue them."""
    try:
        return read_heads(folder)
    except CheckpointError as error:
        if job.bottleneck.on:
            raise
        logger.warning("%s; bottleneck.head is none, and the heads are left out", error)
        return None


def prepare_windows(
    job: LanguageJob, tokenizer: TextTokenizer, progress: ProgressCallback | None = None,
    verifier: Verifier | None = None,
) -> tuple[Windows, dict[str, PackedDataset | PassageDataset]]:  # fmt: skip
    """The windows to train on, and the held-out ones by source; passages where ``data.view`` draws spans.

    All ranks of ``verifier`` call this.

    Raises:
        DataError: unusable text, damaged shards, shards of another tokenizer; a source that fills no window.
        ConfigError: the epochs of ``data.mixture`` do not suffice for the training.
    """
    verifier = verifier or verifier_of(job.data)
    ranks, length, by_shard = verifier.ranks, job.data.sequence_length, job.data.shards_at_once is not None
    train: dict[str, Any] = {}
    validation: dict[str, PackedDataset | PassageDataset] = {}

    def cut(shards: ShardSet, split: str) -> PackedDataset | PassageDataset:
        if job.data.views.draw is None:
            return PackedDataset(shards, length, by_shard=by_shard)
        passages = _passages(shards, job.data, by_shard=by_shard)
        if ranks.rank == 0:
            _describe_passages(passages, job.data, split if not name else f"{split} text of {name}")
        return passages

    for name, data in job.data.parts():
        with named(name):
            shards = prepare_shards(data, tokenizer, "train", progress, verifier)
            assert shards is not None, "every job has training text"
            if data.passage == "paragraph" and shards.manifest.options.get("document_start") != PARAGRAPHS:
                raise DataError(
                    f"data.shards {data.shards}: its documents are not the paragraphs of the text (data.passage): "
                    "prepare it anew with data.view=crop data.passage=paragraph, or leave data.passage out"
                )
            held_out = prepare_shards(data, tokenizer, "validation", progress, verifier)
        train[name] = cut(shards, "training")
        if held_out is not None and len(found := cut(held_out, "validation")):
            validation[name] = found
        if not len(train[name]):
            where = f"data.mixture, source {name}" if name else "data"
            raise DataError(
                f"{where}: no passage is long enough: {job.data.spans.need} (data.spans): lower them, set "
                "data.spans.short=whole, or give longer documents (data.document_start)"
            )
        if name and job.data.views.draw is None and shards.tokens < length - 2:
            raise DataError(
                f"data.mixture, source {name}: {shards.tokens} tokens fill no window of data.sequence_length {length}; "
                "add text to it, or leave it out"
            )
    # Everything is open: now what all sources need together can be compared with the cache.
    with ranks.synchronize_errors():
        _require_room([*train.values(), *validation.values()], job.data.shards_at_once)
        if validation and ranks.rank == 0:
            _report_overlap([part.shards for part in train.values()], [part.shards for part in validation.values()])
    if not job.data.mixture:
        return train[""], validation
    order = mixture_of(
        job.data.mixture, [len(part) for part in train.values()], job.data.temperature, job.batch_sizes,
        job.schedule.max_steps, job.run.seed, [part.block for part in train.values()], job.data.shards_at_once,
    )  # fmt: skip
    for each in source_shares(order, job.batch_sizes.samples_before(job.schedule.max_steps)):
        logger.info("data.mixture: %s", each)
    return MixtureDataset(train, order), validation


def first_views(job: LanguageJob, tokenizer: TextTokenizer, train: Windows, count: int) -> list[tuple[str, str]]:
    """Both views of the first samples of a training as text, masks and noise included."""
    pad, length = tokenizer.special.pad, job.data.sequence_length
    assembler = LanguageAssembler(
        train, Corruptor(job.corruption, vocabulary_of(tokenizer), length), seed=job.run.seed,
        stream="corruption/train", shuffle=True, pad_id=pad, cross_document_attention=True,
        at_once=job.data.shards_at_once, plan=ViewPlan.of(job, "train"),
    )  # fmt: skip
    batch = assembler(np.arange(min(count, len(train))), job.corruption.rate_at(0.0))

    def text(row: Tensor) -> str:
        return tokenizer.decode(row[row != pad].tolist(), skip_special=False)

    return [(text(first), text(second)) for first, second in zip(batch.tokens, batch.corrupted, strict=True)]


def _passages(shards: ShardSet, data: DataConfig, *, by_shard: bool) -> PassageDataset:
    return PassageDataset(
        shards, longest=data.passage if isinstance(data.passage, int) else None, shortest=data.spans.shortest,
        keep_short=data.spans.short != "skip", apart=data.apart, by_shard=by_shard,
    )  # fmt: skip


def _describe_passages(passages: PassageDataset, data: DataConfig, what: str) -> None:
    if passages.short:
        fate = "are left out" if data.spans.short == "skip" else "are whole, beside their corruptions"
        level = logging.WARNING if 2 * passages.short > len(passages) else logging.INFO
        logger.log(
            level, "%s: %s of fewer than %d tokens %s (data.spans.short=%s); %s in all", what,
            counted(passages.short, "passage"), data.spans.shortest, fate, data.spans.short,
            counted(len(passages), "passage"),
        )  # fmt: skip
    mean = passages.shards.tokens / max(1, len(passages))
    if data.view == "crop" and mean > _FAR * data.sequence_length:
        logger.warning(
            "%s: passages have %s tokens in the mean, of which two crops are %d at most: they seldom meet, and such a "
            "text is not found by them; data.passage=%d draws both from near places",
            what, f"{mean:,.0f}", data.sequence_length - 2, 2 * data.sequence_length,
        )  # fmt: skip


def _require_room(parts: Sequence[Any], at_once: int | None) -> None:
    """Raise ``ConfigError`` where what all parts in a store need at a time does not fit into the cache."""
    needed = 0
    for part in parts:
        if part.shards.cache is not None:
            shards = None if at_once is None else part.shards_of_group(at_once)
            needed += part.shards.cache.require_room(shards, beside=needed)


def _report_overlap(train: Sequence[ShardSet], validation: Sequence[ShardSet]) -> None:
    """Say how many documents are in both; of a large corpus, the first documents of training are looked at."""
    # Starts have one number more than there are documents: the end of the last one.
    of_all = sum(len(part.starts) - 1 for part in train)
    looked_at = min(of_all, _MOST_DOCUMENTS * len(train))
    counts = shared(
        chain.from_iterable(_documents(part, min(len(part.starts) - 1, _MOST_DOCUMENTS)) for part in train),
        chain.from_iterable(_documents(part, len(part.starts) - 1) for part in validation),
    )
    what = "training text" if looked_at == of_all else f"the first {looked_at:,} of training text"
    report_overlap({"document": counts}, train=what, validation="validation text")


def _documents(shards: ShardSet, count: int) -> Iterator[bytes]:
    """A digest of each document, without the separator at its end."""
    eos = shards.manifest.tokenizer.eos
    for begin, end in pairwise(shards.starts[: count + 1].tolist()):
        tokens = shards.read(begin, end)
        yield sha256((tokens[:-1] if len(tokens) and tokens[-1] == eos else tokens).tobytes()).digest()

"""Tokenizer and packed data of a job: as configured, from the cache, or made on the first run."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from pretrain.base.errors import ConfigError
from pretrain.base.locks import cache_lock
from pretrain.base.progress import ProgressCallback
from pretrain.base.verification import ALONE, Ranks, Verifier
from pretrain.data.corruption import CorruptionVocabulary, Corruptor
from pretrain.data.packing import PackedDataset
from pretrain.data.prepare import open_corpus, tokenizer_corpus, verifier_of
from pretrain.data.prepare import prepare as prepare_shards
from pretrain.language.config import LanguageJob
from pretrain.models.config import RobertaConfig
from pretrain.models.hf_model import HFModel, read_hf
from pretrain.models.hub import TOKENIZER_FILES, local_folder
from tokenizer.encode import TextTokenizer, load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """The inputs of a job: tokenizer, windows of both splits, corruptor, and the completed configuration."""

    tokenizer: TextTokenizer
    tokenizer_folder: Path
    train: PackedDataset
    validation: PackedDataset | None
    corruptor: Corruptor
    model_config: RobertaConfig
    source: HFModel | None
    """The pretrained model that ``model.init`` names."""
    job: LanguageJob
    """The job with the sizes that ``model.init`` decides filled in."""


def vocabulary_of(tokenizer: TextTokenizer) -> CorruptionVocabulary:
    """What the corruptions need to know of a tokenizer."""
    return CorruptionVocabulary(tokenizer.vocab_size, tokenizer.special.mask, tuple(tokenizer.special_ids))


def _configured_tokenizer(job: LanguageJob) -> Path | None:
    if job.tokenizer.path is not None:
        return local_folder(job.tokenizer.path, TOKENIZER_FILES)
    return None if job.model.init is None else local_folder(job.model.init)


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
    corpus = open_corpus(job.data, "train", progress, verifier)
    assert corpus is not None, "every job has training text"
    recipe = {
        "text": [(part["format"], part["sha256"]) for part in corpus.contents()],
        "columns": [job.data.text_column, job.data.document_start, job.data.validation_fraction],
        **section.model_dump(mode="json", exclude={"path"}),
    }
    name = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:32]
    folder = job.data.cache / "tokenizers" / name
    with verifier.ranks.synchronize_errors():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with cache_lock(folder.with_suffix(".lock")):
            if not folder.exists():
                _train(job, folder, progress)
    return folder


def tokenizer_of_run(job: LanguageJob, run_dir: Path, ranks: Ranks = ALONE) -> Path | None:
    """The tokenizer that a run which has a checkpoint trained on its text, in the run's own folder; None without one.

    It stays that of the run whatever becomes of the text (``data.allow_change``) and of the cache. The run keeps a
    copy, since checkpoints are pruned. All ``ranks`` call this.
    """
    from pretrain.engine.checkpoint import checkpoints_of, read_job  # DeepSpeed, which preparing alone does without

    with ranks.synchronize_errors():
        newest = [None, *checkpoints_of(run_dir)][-1]
        if newest is None or job.tokenizer.path is not None or job.model.init is not None:
            return None
        before = read_job(newest)
        if not isinstance(before, LanguageJob) or before.tokenizer != job.tokenizer or before.model.init is not None:
            return None
        folder = run_dir / "tokenizer"
        if ranks.rank == 0 and not folder.is_dir():
            partial = run_dir / ".tokenizer"
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(newest / "tokenizer", partial, copy_function=shutil.copyfile)
            partial.rename(folder)
    return folder


def _train(job: LanguageJob, folder: Path, progress: ProgressCallback | None) -> None:
    from tokenizer.train import train

    section = job.tokenizer
    logger.info("no tokenizer.path: one is trained on the text, and kept in %s", folder)
    train(
        tokenizer_corpus(job.data, progress),
        folder,
        vocab_size=section.vocab_size,
        type=section.type,
        byte_fallback=section.byte_fallback,
        model_max_length=job.model.max_positions,
        max_sentences=section.max_sentences,
    )


def prepare(
    job: LanguageJob, progress: ProgressCallback | None = None, ranks: Ranks = ALONE, run_dir: Path | None = None
) -> Prepared:
    """Everything a rank needs before it can build the model. All ``ranks`` call this; what fails on one fails on all.

    A run in ``run_dir`` that has begun goes on with the tokenizer that it has trained.

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
    source = None
    with ranks.synchronize_errors():
        tokenizer = load_tokenizer(folder)
        if job.model.init is not None:
            source = read_hf(job.model.init)
            job = _with_sizes_of_init(job, source, tokenizer)
        config = job.model.for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    train = prepare_shards(job.data, tokenizer, "train", progress, verifier)
    assert train is not None, "every job has training text"
    held_out = prepare_shards(job.data, tokenizer, "validation", progress, verifier)
    return Prepared(
        tokenizer=tokenizer,
        tokenizer_folder=folder,
        train=PackedDataset(train, length),
        validation=None if held_out is None else PackedDataset(held_out, length),
        corruptor=Corruptor(job.corruption, vocabulary_of(tokenizer), length),
        model_config=config,
        source=source,
        job=job,
    )


def _with_sizes_of_init(job: LanguageJob, source: HFModel, tokenizer: TextTokenizer) -> LanguageJob:
    name = job.model.init
    if tokenizer.backend.get_vocab() != source.tokenizer.backend.get_vocab():
        raise ConfigError(f"tokenizer.path: not the vocabulary of model.init {name}; leave tokenizer.path out")
    model = job.model.with_sizes_of(source.config, str(name))
    if job.data.sequence_length > model.max_positions:
        raise ConfigError(
            f"data.sequence_length {job.data.sequence_length} is longer than the position table of {name}: "
            f"at most {model.max_positions}"
        )
    logger.info(
        "%s: %d layers x %d, %d heads, %d ids, %d positions",
        name, model.layers, model.hidden, model.heads, model.vocab_rows, model.max_positions,
    )  # fmt: skip
    return job.model_copy(update={"model": model})

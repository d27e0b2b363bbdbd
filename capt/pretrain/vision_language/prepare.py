"""Prepare the inputs of a job: store, tokenizer, answer table and encoded pairs.

Arrays of sentences are in the cache under the digest of their content; one process of a host makes them and all map
them: nine million sentences are not Python objects in any rank that trains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from capt.pretrain.base.errors import ConfigError, DataError, counted, shown
from capt.pretrain.base.locks import make_once
from capt.pretrain.base.overlap import Shared, report_overlap, shared
from capt.pretrain.base.verification import ALONE, Ranks, Verifier, digest_of
from capt.pretrain.config.schema import Job
from capt.pretrain.data.mixture import MixtureSampler
from capt.pretrain.data.mixture_dataset import mixture_of, source_shares
from capt.pretrain.engine.run_folder import kept_in_run
from capt.pretrain.models.hf_config import TOKENIZER_FILES, local_folder
from capt.pretrain.models.lxmert.config import PRESETS, LxmertConfig
from capt.pretrain.models.tokenizer import trained_tokenizer
from capt.pretrain.regions.manifest import StoreManifest
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.config import SentenceTokenizer, VisionLanguageJob
from capt.pretrain.vision_language.data.answers import (
    AnswerTable,
    build_table,
    convert_ans,
    coverage,
    load_table,
    log_coverage,
)
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.load import ANSWERS, Start, named_answers, read_start, require_features
from capt.pretrain.vision_language.pairs import EncodedPairs, ExampleSplit, located, write_pairs
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

logger = logging.getLogger(__name__)
_TOGETHER = 1 << 15
"""Sentences that are encoded in one batch."""
_VERSION = 1
"""Version of the encoded pairs: counts up when the same sentences would give other arrays."""


@dataclass(frozen=True)
class PreparedVisionLanguage:
    """The inputs of a job, and the job with what the data decide filled in."""

    tokenizer: TextTokenizer
    tokenizer_folder: Path
    store: RegionStore
    train: EncodedPairs
    validation: EncodedPairs | None
    answers: AnswerTable | None
    text: str
    """Digest of the training files."""
    start: Start | None
    """The pretrained model that ``model.init`` names."""
    job: VisionLanguageJob
    order: MixtureSampler | None = None
    """The order of the pairs of ``data.mixture``."""


def prepare(job: VisionLanguageJob, ranks: Ranks = ALONE, run_dir: Path | None = None) -> PreparedVisionLanguage:
    """Prepare the inputs that a rank needs before it builds the model.

    All ``ranks`` call this, and a failure on one is raised on all. A run in ``run_dir`` that has begun continues with
    the tokenizer and the answer table that it has made.

    Raises:
        DataError: files or the store cannot be used, or pictures are not in the store.
        ConfigError: the job does not fit its data.
        CheckpointError: ``model.init`` cannot be read.
    """
    verifier = Verifier(job.data.cache, ranks)
    with ranks.synchronize_errors():
        data = located(job.data)
        regions, validation = data.require_files(), data.named("validation")
    store = RegionStore.open(regions, verifier, cache=data.cache)
    train = ExampleSplit(data.named("train"), "data.train", verifier)
    held_out = ExampleSplit(validation, "data.validation", verifier) if any(validation) else None
    # What training starts from, and whether its regions and answers are those of the store.
    with ranks.synchronize_errors():
        start = None if job.model.init is None else read_start(job.model.init)
        if start is not None:
            require_features(store, start.features, str(start.source))
            if job.objectives.answers:
                start = start.named(named_answers(start, job.model.init_answers))
    folder = _tokenizer_folder(job, start, train, ranks, run_dir)
    answers_file = _answers_file(job, data.answers, train, verifier, run_dir) if job.objectives.answers else None
    # With tokenizer, answers and store known the job is complete, and the sentences are encoded for it.
    with ranks.synchronize_errors():
        tokenizer = load_tokenizer(folder)
        answers = None if answers_file is None else load_table(answers_file)
        job = completed(job, store.manifest, tokenizer, answers, None if start is None else start.config)
        splits = [
            encoded_pairs(split, job, store, tokenizer, answers) for split in (train, held_out) if split is not None
        ]
        _check_mismatches(job, splits[0])
        if held_out is not None:
            _report_overlap(*splits)
    # The sentences are encoded: their Python objects are not needed in training.
    train.forget()
    order, mixture = None, job.data.mixture
    if mixture:
        steps = job.schedule.max_steps
        order = mixture_of(mixture, splits[0].parts, job.data.temperature, job.batch_sizes, steps, job.run.seed)
        for each in source_shares(order, job.batch_sizes.samples_before(steps)):
            logger.info("data.mixture: %s", each)
    return PreparedVisionLanguage(
        tokenizer=tokenizer,
        tokenizer_folder=folder,
        store=store,
        train=splits[0],
        validation=splits[1] if held_out is not None else None,
        answers=answers,
        text=train.key,
        start=start,
        job=job,
        order=order,
    )


def _tokenizer_folder(
    job: VisionLanguageJob, start: Start | None, train: ExampleSplit, ranks: Ranks, run_dir: Path | None
) -> Path:
    """``tokenizer.path``, that of ``model.init``, that of the run, or one trained on the sentences."""

    def trained_alike(before: Job) -> bool:
        return isinstance(before, VisionLanguageJob) and before.tokenizer == job.tokenizer and before.model.init is None

    with ranks.synchronize_errors():
        if job.tokenizer.path is not None:
            return local_folder(job.tokenizer.path, TOKENIZER_FILES)
        if start is not None:
            if start.tokenizer_folder is None:
                raise ConfigError(f"tokenizer.path is missing: model.init {job.model.init} has no tokenizer")
            return start.tokenizer_folder
    # Outside of the block, which must not hold collectives: both calls agree between the ranks themselves.
    kept = None if run_dir is None else kept_in_run(run_dir, "tokenizer", trained_alike, ranks)
    return kept or train_tokenizer(
        job.tokenizer, train.key, train.texts, job.data.cache, job.model.max_positions, ranks
    )


def train_tokenizer(
    section: SentenceTokenizer,
    key: str,
    sentences: Callable[[], Iterable[str]],
    cache: Path,
    positions: int,
    ranks: Ranks = ALONE,
) -> Path:
    """Train a tokenizer on the sentences that ``key`` represents, or find it in the cache.

    All ``ranks`` call this with the same sentences: one trains, the others wait.

    Args:
        section: of the job.
        key: digest of the sentences.
        sentences: in an order that is the same for every run; a sentence that occurs twice counts twice.
        cache: where trained tokenizers are kept, in ``tokenizers``.
        positions: the longest sentence of the model in tokens.
        ranks: the processes of the job.

    Raises:
        ConfigError: ``vocab_size`` is too small for the characters of the sentences.
        DataError: it is too large for them, or there is no text in them.
    """
    # SentencePiece folds case in the rules whose names end in _cf.
    if section.lower_case and not section.normalization.endswith("_cf"):
        section = section.model_copy(update={"normalization": f"{section.normalization}_cf"})
    named = {"sentences": key, "positions": positions}
    return trained_tokenizer(section, named, sentences, cache, longest=positions, ranks=ranks)


def _answers_file(
    job: VisionLanguageJob, given: Path | None, train: ExampleSplit, verifier: Verifier, run_dir: Path | None
) -> Path:
    """``data.answers``, the table of the run, or one built from the training data."""

    def built_alike(before: Job) -> bool:
        if not isinstance(before, VisionLanguageJob) or not before.objectives.answers:
            return False
        return (before.data.answers, before.data.minimum_answers) == (job.data.answers, job.data.minimum_answers)

    if given is not None:
        return given
    kept = None if run_dir is None else kept_in_run(run_dir, ANSWERS, built_alike, verifier.ranks)
    if kept is not None:
        return kept
    minimum = job.data.minimum_answers
    path = job.data.cache / "answers" / f"{digest_of([train.content, minimum])}.json"

    def make() -> None:
        table = build_table(train.examples, minimum)
        logger.info("answers: %s that occur with %d questions or more", f"{len(table):,}", minimum)
        table.save(path)

    with verifier.ranks.synchronize_errors():
        make_once(path.with_suffix(".lock"), path.exists, make)
    return path


def encoded_pairs(
    split: ExampleSplit,
    job: VisionLanguageJob,
    store: RegionStore,
    tokenizer: TextTokenizer,
    answers: AnswerTable | None,
) -> EncodedPairs:
    """The encoded pairs of a split, from the cache or made now, by one process of the host."""
    length, table = job.data.sequence_length, [] if answers is None else list(answers.answers)
    skip = job.data.missing_pictures == "skip"
    content = [_VERSION, split.content, store.manifest.key, tokenizer.fingerprint, length, table]
    # A job that skips nothing has the key of a version without this choice.
    key = digest_of([*content, *(["without missing pictures"] if skip else [])])
    folder = job.data.cache / "pairs" / key
    make_once(
        folder.with_suffix(".lock"),
        folder.exists,  # it appears whole
        lambda: _encode(split, folder, length, store, tokenizer, answers, skip=skip),
    )
    pairs = EncodedPairs(folder)
    pairs.require_within(pictures=len(store), ids=tokenizer.vocab_size, answers=len(table))
    if pairs.record.cut:
        logger.warning("%s: %s were cut to %d tokens", split.what, counted(pairs.record.cut, "sentence"), length)
    if pairs.record.missing:
        logger.warning(
            "%s: %s LEFT OUT, whose pictures are not in the store: %s (%s lists them)", split.what,
            counted(pairs.record.missing, "sentence"), first_shown(pairs.record.missing_pictures),
            folder / "pairs.json",
        )  # fmt: skip
    return pairs


def _encode(
    split: ExampleSplit,
    folder: Path,
    length: int,
    store: RegionStore,
    tokenizer: TextTokenizer,
    table: AnswerTable | None,
    *,
    skip: bool,
) -> None:
    parts: list[list[Example]] = split.parts
    missing: list[str] = []
    if skip:
        # A source without sentences stays an empty part, so that every source keeps its place.
        kept = [with_pictures(part, store, split.what) for part in parts if part]
        found = iter([part for part, _ in kept])
        parts = [next(found) if part else [] for part in parts]
        missing = [name for _, names in kept for name in names]
    examples = [example for part in parts for example in part]
    logger.info("%s: encoding %s into %s", split.what, counted(len(examples), "sentence"), folder)
    if table is not None:
        log_coverage(split.what, coverage(examples, table, convert_ans), table)
    scored = [
        {} if table is None or example.answers is None else class_scores(table, example.answers) for example in examples
    ]
    write_pairs(
        folder,
        sentences=_encoded(tokenizer, examples),
        pictures=store.rows([example.pictures[0] for example in examples], split.what),
        answers=scored,
        # Two of the tokens are special: the first and the last.
        longest=length - 2,
        missing=missing,
        parts=[len(part) for part in parts],
    )


def with_pictures(examples: Sequence[Example], store: RegionStore, what: str) -> tuple[list[Example], list[str]]:
    """The examples whose pictures are all in the store, and a missing picture of each other one.

    Raises:
        DataError: there is no such example.
    """
    there = iter(store.find([name for example in examples for name in example.pictures]).tolist())
    kept, missing = [], []
    for example in examples:
        absent = [name for name in example.pictures if next(there) < 0]
        if absent:
            missing.append(absent[0])
        else:
            kept.append(example)
    if not kept:
        store.rows(missing, what)  # says what is wrong
    return kept, missing


def first_shown(names: Sequence[str]) -> str:
    """The first names of many."""
    return ", ".join(map(shown, names[:3])) + (", ..." if len(names) > 3 else "")


def _encoded(tokenizer: TextTokenizer, examples: Sequence[Example]) -> Iterator[Int32[np.ndarray, " _"]]:
    """The tokens of each sentence; of nine million sentences they are never all separate arrays at the same time."""
    for start in range(0, len(examples), _TOGETHER):
        yield from tokenizer.encode_batch([example.text for example in examples[start : start + _TOGETHER]])


def class_scores(table: AnswerTable, answers: Mapping[str, float]) -> dict[int, float]:
    """The score of each class: an answer is looked up unchanged, or else as `convert_ans` writes it."""
    return table.scores(answers, lambda text: text if text in table.index else convert_ans(text))


def _report_overlap(train: EncodedPairs, validation: EncodedPairs) -> None:
    """Say how many pairs and pictures are in both; only sentences about pictures that are in both are compared."""

    def pairs(of: EncodedPairs) -> Iterator[tuple[int, bytes]]:
        for number in np.flatnonzero(np.isin(of.pictures, common)).tolist():
            yield int(of.pictures[number]), of.words(number).tobytes()

    held_out = np.unique(validation.pictures)
    common = np.intersect1d(np.unique(train.pictures), held_out)
    both = shared(pairs(train), pairs(validation))._replace(total=len(validation))
    report_overlap({"pair": both, "picture": Shared(len(common), len(held_out))})


def _check_mismatches(job: VisionLanguageJob, pairs: EncodedPairs) -> None:
    """Raise ``DataError`` where no sentence of another picture exists."""
    if job.objectives.mismatched and (pairs.pictures == pairs.pictures[0]).all():
        raise DataError(
            "data.train: all sentences are about one picture, so that no mismatched pair can be made: add sentences of "
            "other pictures, or set objectives.mismatched=0"
        )


# Fill in what the data decide: sizes of the model, and losses that are off because the store has no labels.


_OF_INIT = (*PRESETS["base"], "vocab_size", "max_positions", "layer_norm_eps", "feature_size")
"""Fields that a pretrained model decides."""


def completed(
    job: VisionLanguageJob,
    store: StoreManifest,
    tokenizer: TextTokenizer,
    answers: AnswerTable | None,
    init: LxmertConfig | None,
) -> VisionLanguageJob:
    """The job as it runs: with all sizes of its model, and without losses that the store has no labels for.

    Args:
        job: as given. One that has been through this stays as it is, so that a resumed run has the same model.
        store: of the pictures.
        tokenizer: of the sentences.
        answers: the answer table of a job with ``objectives.answers``.
        init: sizes of the model that ``model.init`` names.

    Raises:
        ConfigError: the job asks for a loss without labels, or a size that it sets does not fit the data.
        DataError: the features have another size than those that ``model.init`` was trained on.
    """
    job = _without_absent_labels(job, store)
    model = job.model if init is None else _with_sizes_of(job.model, init)
    # Tables may have more rows than the data need; padding, features and answers must be exactly theirs.
    sizes: dict[str, Any] = {
        "vocab_size": _at_least(model.vocab_size, tokenizer.vocab_size, "vocab_size", "ids of the tokenizer"),
        "pad_id": _exactly(model.pad_id, tokenizer.special.pad, "pad_id", "padding id of the tokenizer"),
        "feature_size": _exactly(model.feature_size, store.feature_size, "feature_size", "feature size of the store"),
        "answers": 0 if answers is None else _exactly(
            model.answers or None, len(answers), "answers", "number of answers of the table"
        ),
    }  # fmt: skip
    for kind, weight, classes in _labels(job, store):
        name = f"{kind}_classes"
        sizes[name] = _at_least(getattr(model, name) or None, classes, name, "classes of the store") if weight else 0
    model = model.model_copy(update=sizes)
    if job.data.sequence_length > model.max_positions:
        raise ConfigError(
            f"data.sequence_length {job.data.sequence_length} is longer than the position table of {model.init}: "
            f"at most {model.max_positions}"
        )
    return job.model_copy(update={"model": model})


def _labels(job: VisionLanguageJob, store: StoreManifest) -> list[tuple[str, float, int]]:
    """Kind of label, weight of its loss, classes in the store."""
    return [
        ("object", job.objectives.objects, store.object_classes),
        ("attribute", job.objectives.attributes, store.attribute_classes),
    ]


def _without_absent_labels(job: VisionLanguageJob, store: StoreManifest) -> VisionLanguageJob:
    off = {}
    for kind, weight, classes in _labels(job, store):
        key = f"{kind}s"
        if not weight or classes:
            continue
        # A loss that the job asks for by name is an error; one that is on by default is turned off.
        if key in job.objectives.model_fields_set:
            raise ConfigError(
                f"objectives.{key} is {weight:g}, but the region store has no {kind} labels: set objectives.{key}=0, "
                "or import regions with labels"
            )
        logger.info("the region store has no %s labels: the loss of %s is off", kind, key)
        off[key] = 0.0
    objectives = job.objectives.model_copy(update=off)
    if not any(objectives.weights().values()) and not job.contrast.weight:
        raise ConfigError("the region store has no labels, and no other loss has a weight: nothing would be learnt")
    return job.model_copy(update={"objectives": objectives})


def _with_sizes_of(model: LxmertConfig, init: LxmertConfig) -> LxmertConfig:
    sizes = {name: getattr(init, name) for name in _OF_INIT}
    heads = {name: getattr(init, name) for name in ("object_classes", "attribute_classes") if getattr(init, name)}
    return model.model_copy(update={**sizes, **heads, "size": "custom"})


def _exactly(given: int | None, found: int, name: str, what: str) -> int:
    if given not in (None, found):
        error = DataError if name == "feature_size" else ConfigError
        raise error(f"model.{name} is {given}, but the {what} is {found}: leave model.{name} out, or use other data")
    return found


def _at_least(given: int | None, found: int, name: str, what: str) -> int:
    if given is not None and given < found:
        raise ConfigError(f"model.{name} {given} is smaller than the {found} {what}: leave it unset or raise it")
    return given or found

"""Shard sets from the ``data.*`` section: built on the first run, reused after that while text and options stay."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.base.process import usable_cores
from capt.pretrain.base.stores import exists
from capt.pretrain.base.verification import ALONE, Ranks, Verifier
from capt.pretrain.data.bulk import NO_VALIDATION, prepare_plan
from capt.pretrain.data.config import DataConfig
from capt.pretrain.data.corpus import Corpus, CorpusPart
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.data.filters import DocumentFilters
from capt.pretrain.data.formats import TextFile
from capt.pretrain.data.paths import held_out_files, resolve_files
from capt.pretrain.data.shard_writer import ShardOptions, write_shards
from capt.pretrain.data.shards import MANIFEST, ShardSet, Tokenizer
from capt.pretrain.data.sources import Split, source_of
from capt.pretrain.data.units import PreparationPlan, key_of, unit_bytes_of, units_of

log = logging.getLogger(__name__)


def open_corpus(
    data: DataConfig, split: Split, progress: ProgressCallback | None = None, verifier: Verifier | None = None
) -> Corpus | None:
    """The text of a split; None where a job has no validation text.

    Validation text is ``validation_files``, else the hub's ``validation_split``, else ``validation_fraction`` of the
    training text, which is then left out of the training split. Raises ``DataError`` for files that are missing, of an
    unknown kind, or used for both splits. ``verifier`` (see ``verifier_of``) hashes the text; all its ranks call this.
    """
    verifier = verifier or verifier_of(data)
    with verifier.ranks.synchronize_errors():
        return _open_corpus(data, split, progress, verifier)


def _open_corpus(
    data: DataConfig, split: Split, progress: ProgressCallback | None, verifier: Verifier
) -> Corpus | None:
    named = data.validation_files or data.validation_split
    if split == "validation" and data.validation_files:
        train = resolve_files(data.files, "data.files", verifier.ranks)
        held_out = held_out_files(data.validation_files, train, verifier.ranks)
        return FileCorpus(held_out, data.text_column, data.document_start, verifier, missing=data.missing)
    corpus = source_of(data).open(data, split, verifier, progress)
    # Validation text of its own: nothing is held out of the training text.
    if named or data.validation_fraction == 0:
        return corpus if split == "train" or named else None
    part = CorpusPart(corpus, data.validation_fraction, held_out=split == "validation")
    # Look at the first passage: a short text may leave the held-out side empty.
    if split == "validation" and next(iter(part), None) is None:
        if verifier.ranks.rank == 0:
            log.warning(NO_VALIDATION, data.validation_fraction)
        return None
    return part


def verifier_of(data: DataConfig, ranks: Ranks = ALONE) -> Verifier:
    """The verifier that hashes the files of a job and remembers the hashes in ``data.cache``."""
    return Verifier(data.cache, ranks, again=data.verify == "always")


def prepare(
    data: DataConfig,
    tokenizer: Tokenizer,
    split: Split,
    progress: ProgressCallback | None = None,
    verifier: Verifier | None = None,
) -> ShardSet | None:
    """The shard set of a split: that of ``data.shards``, or one in ``data.cache`` that is built if need be.

    The cache goes by content (``cache_key``), so any change of text, tokenizer or options leads to another folder.
    All ranks of ``verifier`` call this: one builds while the others wait. None where a job has no validation text.

    Raises ``DataError`` for text that cannot be used, damaged shards, or shards of another tokenizer.
    """
    verifier = verifier or verifier_of(data)
    if data.shards is None:
        return _prepare(data, tokenizer, split, progress, None, verifier)
    if isinstance(data.shards, str):
        return _open_in_store(data, data.shards, tokenizer, split, verifier)
    folder = data.shards / split
    # Any: a rank that does not see the folder ends with an error, not without validation.
    if split == "validation" and not any(verifier.ranks.gather(folder.is_dir())):
        return None
    shards = ShardSet.open(folder, verifier, verify=data.verify != "never")
    shards.check_tokenizer(tokenizer)
    return shards


def _open_in_store(
    data: DataConfig, place: str, tokenizer: Tokenizer, split: Split, verifier: Verifier
) -> ShardSet | None:
    url = f"{place.rstrip('/')}/{split}"
    if split == "validation":
        found = False
        # Found by one rank: a store that changes just now must not divide them.
        with verifier.ranks.synchronize_errors():
            found = verifier.ranks.rank == 0 and exists(f"{url}/{MANIFEST}")
        if not verifier.ranks.broadcast(found):
            return None
    shards = ShardSet.open_url(
        url, data.cache, data.cache_bytes, verifier.ranks, at_once=data.shards_at_once, check=data.verify != "never"
    )
    shards.check_tokenizer(tokenizer)
    return shards


def prepare_folder(
    data: DataConfig,
    tokenizer: Tokenizer,
    out: Path,
    progress: ProgressCallback | None = None,
    *,
    filters: DocumentFilters | None = None,
    license: str | None = None,
    unit_bytes: int | None = None,
    store: str | None = None,
) -> dict[Split, ShardSet]:
    """Write the shard sets of a job to ``out/train`` and, where there is validation text, ``out/validation``.

    Any number of processes and hosts may call this with the same folder. What is finished when one is killed is kept.
    ``filters`` are applied to the training text before validation text is held out of it; validation text of its own
    stays as it is. ``license`` is written into the data card. Files are cut every ``unit_bytes`` (`unit_bytes_of`).
    With ``store``, the address of a folder in a store, shard sets and card go there, and ``out`` holds the work alone.

    Shard sets that are there already are kept if they are the same; raises ``DataError`` if they are others, or if
    ``out`` is no folder.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; name a new folder for the shards")
    verifier = verifier_of(data)
    plans = _plans(data, tokenizer, out, filters or DocumentFilters(), license, unit_bytes, store)
    if plans is not None:
        sets: dict[Split, ShardSet] = {}
        for plan in plans:
            sets |= prepare_plan(plan, data.workers or usable_cores(), verifier, progress)
        return sets
    splits: tuple[Split, ...] = ("train", "validation")
    written = {split: _prepare(data, tokenizer, split, progress, out / split, verifier) for split in splits}
    return {split: shards for split, shards in written.items() if shards is not None}


def _plans(
    data: DataConfig,
    tokenizer: Tokenizer,
    out: Path,
    filters: DocumentFilters,
    license: str | None,
    unit_bytes: int | None,
    store: str | None,
) -> list[PreparationPlan] | None:
    """The plans of the training text, and of validation text of its own; None for text that is not in files, for a
    folder and without filters: it is read by one process in any case."""
    files = _files_of(data, "train")
    if files is None and not filters.names and store is None:
        return None
    own = bool(data.validation_files or data.validation_split)
    # Two splits of one text, or validation text of its own, or none.
    splits: tuple[Split, ...] = ("train",) if own or data.validation_fraction == 0 else ("train", "validation")

    def plan(files: Sequence[TextFile] | None, splits: tuple[Split, ...], filters: DocumentFilters) -> PreparationPlan:
        size = unit_bytes or unit_bytes_of(files or ())
        return PreparationPlan(
            data,
            tokenizer,
            out,
            tuple(units_of(files, data.document_start, size)) if files is not None else (),
            splits,
            {split: _options(data, split if len(splits) == 2 else None, filters) for split in splits},
            filters,
            license,
            size,
            store=store,
        )

    found = [plan(files, splits, filters)]
    if own:
        found.append(plan(_files_of(data, "validation"), ("validation",), DocumentFilters()))
    return found


def _files_of(data: DataConfig, split: Split) -> list[TextFile] | None:
    """The files of a split of which units can be made; None where its text is in no such files."""
    if split == "validation" and data.validation_files:
        train = resolve_files(data.files, "data.files") if data.files else []
        return held_out_files(data.validation_files, train)
    if data.source == "files":
        if not data.files:
            raise DataError("data.files is empty: there is no text to prepare")
        return resolve_files(data.files, "data.files")
    if data.source == "hub" and data.name is not None:
        from capt.pretrain.data.hub import split_files  # datasets takes a second to import

        return split_files(
            data.name, data.subset, (data.validation_split if split == "validation" else None) or data.split
        )
    return None


def _options(data: DataConfig, held_out_from: Split | None, filters: DocumentFilters | None = None) -> ShardOptions:
    options: ShardOptions = {
        "text_column": data.text_column,
        "document_start": data.document_start,
        "held_out": data.validation_fraction if held_out_from is not None else None,
        "split": held_out_from,
    }
    if data.missing == "refuse":  # shards of the default are those of releases without this key
        options["missing"] = data.missing
    if filters is not None and filters.names:
        options["steps"] = json.dumps({name: filters.model_dump(mode="json")[name] for name in filters.names})
    return options


def tokenizer_corpus(data: DataConfig, progress: ProgressCallback | None = None) -> Iterator[str]:
    """The lines of the training text, for training a tokenizer on what the model will read."""
    for _, part in data.parts():
        corpus = open_corpus(part, "train", progress)
        if corpus is None:
            raise AssertionError("every job has training text")
        for passage in corpus:
            yield from (line for line in passage.text.split("\n") if line and not line.isspace())


def cache_key(corpus: Corpus, tokenizer: Tokenizer, options: ShardOptions) -> str:
    """A name for what a shard set is made from (`key_of`)."""
    return key_of(corpus.contents(), tokenizer, options)


def _prepare(
    data: DataConfig,
    tokenizer: Tokenizer,
    split: Split,
    progress: ProgressCallback | None,
    folder: Path | None,
    verifier: Verifier,
) -> ShardSet | None:
    corpus = open_corpus(data, split, progress, verifier)
    if corpus is None:
        return None
    options = _options(data, split if isinstance(corpus, CorpusPart) else None)
    key = cache_key(corpus, tokenizer, options)
    return write_shards(
        corpus,
        tokenizer,
        folder or data.cache / "shards" / key,
        key=key,
        options=options,
        workers=data.workers or usable_cores(),
        verifier=verifier,
        verify=data.verify != "never",
        progress=progress,
    )

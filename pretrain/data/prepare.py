"""Shard sets from the ``data.*`` section: built on the first run, reused after that while text and options stay."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from capt.pretrain.base.parallel import ProgressCallback, usable_cores
from capt.pretrain.base.stores import exists
from capt.pretrain.base.verification import ALONE, Ranks, Verifier
from capt.pretrain.data.config import DataConfig
from capt.pretrain.data.corpus import Corpus, Part
from capt.pretrain.data.files import FileCorpus, held_out_files, resolve_files
from capt.pretrain.data.shard_writer import Options, write_shards
from capt.pretrain.data.shards import MANIFEST, ShardSet, Tokenizer
from capt.pretrain.data.sources import Split, source_of

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
    if named or data.validation_fraction == 0:
        return corpus if split == "train" or named else None
    part = Part(corpus, data.validation_fraction, held_out=split == "validation")
    if split == "validation" and next(iter(part), None) is None:
        if verifier.ranks.rank == 0:
            log.warning(
                "validation is off: the text is too short to hold out %s of it, by whole documents (in .txt a blank "
                "line ends one) or pieces of long ones; set data.validation_files, or a larger "
                "data.validation_fraction",
                data.validation_fraction,
            )
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
        with verifier.ranks.synchronize_errors():
            found = verifier.ranks.rank == 0 and exists(f"{url}/{MANIFEST}")
        if not verifier.ranks.gather(found)[0]:
            return None
    shards = ShardSet.open_url(
        url, data.cache, data.cache_bytes, verifier.ranks, at_once=data.shards_at_once, check=data.verify != "never"
    )
    shards.check_tokenizer(tokenizer)
    return shards


def prepare_folder(
    data: DataConfig, tokenizer: Tokenizer, out: Path, progress: ProgressCallback | None = None
) -> dict[Split, ShardSet]:
    """Write the shard sets of a job to ``out/train`` and, where there is validation text, ``out/validation``.

    Shard sets that are there already are kept if they are the same; raises ``DataError`` if they are others.
    """
    splits: tuple[Split, ...] = ("train", "validation")
    verifier = verifier_of(data)
    written = {split: _prepare(data, tokenizer, split, progress, out / split, verifier) for split in splits}
    return {split: shards for split, shards in written.items() if shards is not None}


def tokenizer_corpus(data: DataConfig, progress: ProgressCallback | None = None) -> Iterator[str]:
    """The lines of the training text, for training a tokenizer on what the model will read."""
    corpus = open_corpus(data, "train", progress)
    if corpus is None:
        raise AssertionError("every job has training text")
    for passage in corpus:
        yield from (line for line in passage.text.split("\n") if line and not line.isspace())


def cache_key(corpus: Corpus, tokenizer: Tokenizer, options: Options) -> str:
    """A name for what a shard set is made from: text (hashes and formats, not where it lies), tokenizer, options."""
    text = [(part["format"], part["sha256"]) for part in corpus.contents()]
    return hashlib.sha256(json.dumps([text, tokenizer.fingerprint, options]).encode()).hexdigest()[:32]


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
    options: Options = {
        "text_column": data.text_column,
        "document_start": data.document_start,
        "held_out": data.validation_fraction if isinstance(corpus, Part) else None,
        "split": split if isinstance(corpus, Part) else None,
    }
    if data.missing == "refuse":  # shards of the default are those of releases without this key
        options["missing"] = data.missing
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

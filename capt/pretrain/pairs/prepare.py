"""The rows of a job's sources, those held out apart: read and encoded once for all ranks of a host, or in memory."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from capt.pretrain.base.errors import DataError, counted
from capt.pretrain.base.files import files_below
from capt.pretrain.base.locks import make_folder_once
from capt.pretrain.base.randomness import mix64
from capt.pretrain.base.records import read_record
from capt.pretrain.base.verification import Verifier
from capt.pretrain.pairs.data_config import PairSource
from capt.pretrain.pairs.forms import Counts, Pair, read_pairs
from capt.pretrain.pairs.sources import SourceRows, text_key
from capt.pretrain.pairs.store import RECORD, VERSION, RowsRecord, open_rows, require_digest
from capt.pretrain.pairs.writer import RowsWriter
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)

PlacedPairs = Iterable[tuple[str, Pair]]
"""Pairs, each with its place in the files."""


class PreparedSource(NamedTuple):
    """The rows of a source that are trained on, those that are held out, and what was found while they were read."""

    train: SourceRows | None
    held_out: SourceRows | None
    record: RowsRecord


def encode_source(source: PairSource, pairs: PlacedPairs, tokenizer: TextTokenizer, max_positions: int) -> SourceRows:
    """Encode pairs in memory, and log what they are. Raises as `RowsWriter`, and where there is no pair."""
    writer = RowsWriter(source, tokenizer, max_positions)
    for place, pair in pairs:
        writer.add(place, pair)
    if not writer.rows:
        raise DataError(f"source {source.name}: no pair in {', '.join(source.files)}")
    record = writer.finish()
    rows = writer.in_memory(record)
    report(rows, record)
    return rows


def prepare_source(
    source: PairSource, files: Sequence[Path], fraction: float | None, tokenizer: TextTokenizer, max_positions: int,
    verifier: Verifier, what: str = "", held_out: Mapping[str, Any] | None = None, *, hashes: bool = False,
    prompts: bool = True,
) -> PreparedSource:  # fmt: skip
    """The rows of ``files``, those held out apart, from ``verifier.cache`` or written there first.

    All ranks of ``verifier`` call this: one of each host (or of all that share the cache) writes while others wait. The
    folder goes by the content of the files, the settings and the tokenizer; a data set of the hub is encoded anew by
    every start.

    Args:
        source: its settings, all filled in.
        files: what to read.
        fraction: share of the queries to hold out, with all their pairs; None = `held_out_share`.
        tokenizer: of the encoder.
        max_positions: of the encoder.
        verifier: hashes files.
        what: name in the log; empty = that of the source.
        held_out: settings that the rows which are held out have in place of those of the source; None = `HELD_OUT`.
        hashes: keep the hash of each text.
        prompts: put the prompt of a row before its query.

    Raises:
        DataError: as `read_pairs` and `RowsWriter`, on all ranks.
        ConfigError: likewise.
    """
    source = source.model_copy(update={"name": what or source.name})
    ranks = verifier.ranks
    inputs = [*files, *([] if source.corpus is None else [source.corpus])]
    # A data set of the hub has no files here to hash: every start encodes it anew, under a name of its own.
    is_known = all(path.exists() for path in inputs)
    content = verifier.digests([part for path in inputs for part in files_below(path)]) if is_known else []
    launch = "" if is_known else ranks.broadcast(uuid.uuid4().hex)
    # Keys that do not change a token, such as the weight, do not make another folder.
    written = source.model_dump(mode="json")
    settings = {key: written[key] for key in _SETTINGS}
    settings |= {key: written[key] for key in (*_SELECTION, "own_length") if written[key] is not None}
    recipe = [VERSION, content, [str(path) for path in inputs], settings, fraction, tokenizer.fingerprint]
    recipe += ["hashes"] if hashes else []
    recipe += [] if prompts else ["no prompts"]
    own = [] if held_out is None else [dict(held_out)]
    name = hashlib.sha256(json.dumps([*recipe, max_positions, *own]).encode()).hexdigest()[:32]
    folder = verifier.cache / "pairs" / name
    wrote = False

    def write(partial: Path) -> None:
        nonlocal wrote
        apart = HELD_OUT if held_out is None else held_out
        _write(
            source, files, fraction, tokenizer, max_positions, partial, launch, apart, hashes=hashes, prompts=prompts
        )  # fmt: skip
        wrote = True

    # An error on the rank that writes reaches the ranks that wait.
    with ranks.synchronize_errors():
        make_folder_once(folder, write, is_made=lambda: _is_written(folder, launch), replace=True)
        opened = {split: open_rows(folder / split, source) for split in _SPLITS if (folder / split).is_dir()}
    for split, (_, record) in opened.items():
        require_digest(folder / split, record, verifier)
    train, other = (opened.get(split) for split in _SPLITS)
    record = next(each[1] for each in (train, other) if each is not None)
    if not wrote:  # else `read_pairs` has said it
        for remark in record.remarks:
            logger.warning("source %s: %s", source.name, remark)
    if train is not None:
        report(*train)
    return PreparedSource(train and train[0], other and other[0], record)


_SPLITS = ("train", "held_out")
_SETTINGS = (
    "form", "columns", "split", "prompts", "query_length", "document_length", "negatives", "in_batch", "loss", "view",
)  # fmt: skip
"""The settings of a source that decide its rows. In this order they have named the folders of all releases."""


_SELECTION = ("where", "negatives_below", "stored_negatives")
"""Settings of its selection, which name a folder where they are set."""


def _is_written(folder: Path, launch: str) -> bool:
    """Return whether the rows are there; those of a source of unknown content by this start."""
    split = next((folder / name for name in _SPLITS if (folder / name / RECORD).is_file()), None)
    return split is not None and (not launch or read_record(RowsRecord, split / RECORD).launch == launch)


def _write(
    source: PairSource, files: Sequence[Path], fraction: float | None, tokenizer: TextTokenizer, max_positions: int,
    folder: Path, launch: str, held_out: Mapping[str, Any], *, hashes: bool, prompts: bool,
) -> None:  # fmt: skip
    counts = Counts()
    pairs: PlacedPairs = pairs_of(source, files, counts)
    if not prompts:
        pairs = ((place, replace(pair, prompt=None)) for place, pair in pairs)
    if fraction is None:
        fraction, pairs = held_out_share(pairs)
    writers: dict[str, RowsWriter] = {}
    # Both splits in one pass over the files.
    for place, pair, is_held_out in split_pairs(pairs, fraction):
        split = _SPLITS[is_held_out]
        if split not in writers:
            (folder / split).mkdir()
            settings = source.model_copy(update=held_out) if is_held_out else source
            writers[split] = RowsWriter(settings, tokenizer, max_positions, folder / split, hashes=hashes)
        writers[split].add(place, pair)
    for writer in writers.values():
        writer.finish(counts.remarks(), launch)


HELD_OUT = {"negatives": 0, "in_batch": True}
"""Settings of the rows that are held out: their negatives are the documents of the others."""


def pairs_of(source: PairSource, files: Sequence[Path], counts: Counts | None = None) -> Iterator[tuple[str, Pair]]:
    """Read ``files`` with the options of ``source``; see `read_pairs`."""
    return read_pairs(
        files,
        form=source.form,
        corpus=source.corpus,
        columns=source.columns,
        split=source.split,
        counts=counts,
        selection=source.selection,
    )


_ENOUGH, _LEAST, _MOST = 200, 0.02, 0.1
"""Held-out pairs whose recall has a standard error of 0.035 at most; the least and the most share to hold out."""


def held_out_share(pairs: PlacedPairs) -> tuple[float, PlacedPairs]:
    """Return the share of some pairs to hold out, and the same pairs, of which the first 10,000 were read for it.

    It is 2%, where that is too few the share of 200 pairs, and a tenth at most.
    """
    pairs = iter(pairs)
    first = list(islice(pairs, round(_ENOUGH / _LEAST)))
    return min(_MOST, max(_LEAST, _ENOUGH / max(1, len(first)))), chain(first, pairs)


def split_pairs(pairs: PlacedPairs, fraction: float) -> Iterator[tuple[str, Pair, bool]]:
    """Say of each pair whether it is held out: all those whose query has a key in the first part of all keys.

    So a query is on one side alone, in whatever order the pairs come.
    """
    for place, pair in pairs:
        is_held_out = False
        if fraction:
            # A key has 63 bits, mixing spreads it over 64; the comparison with a share of all needs that.
            is_held_out = int(mix64(np.array([text_key(pair.query)], dtype=np.uint64))[0]) < fraction * 2**64
        yield place, pair, is_held_out


def report(rows: SourceRows, record: RowsRecord) -> None:
    """Log how many pairs there are, how long their texts are, and what was found in them."""
    sides = {"query": rows.queries, "document": rows.documents}
    # Texts alone are on both sides; of other prompts or limits there they are other inputs, if both are encoded.
    if rows.is_alone or (rows.is_one_column and rows.queries.mean_length == rows.documents.mean_length):
        sides = {"text": rows.documents}
    # Of the texts that are cut, the longest is as long as the limit.
    notes = [
        f"; {counted(texts.cut, noun)} cut to {texts.longest} tokens (data.sequence_length"
        + (")" if noun == "text" else f", or {noun}_length of a side)")
        for noun, texts in sides.items()
        if texts.cut
    ]
    lengths = ", ".join(f"{texts.mean_length:.1f} tokens a {noun}" for noun, texts in sides.items())
    count = counted(len(rows), "text" if "text" in sides else "pair")
    logger.info("source %s: %s, %s%s", rows.source.name, count, lengths, "".join(notes))

"""The rows of sources on disk: encoded once for all ranks of a host, which map the files.

A folder holds one file for each array of `SourceRows`, and ``rows.json``. Ranks share the pages that they read, so that
a source may be larger than memory. While it is written, a digest and a number of each distinct text are in memory
(about 150 bytes), to give equal texts one number; the texts are not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from capt.pretrain.base.arrays import ArrayFile, Column, map_array
from capt.pretrain.base.errors import DataError, counted
from capt.pretrain.base.files import write_json
from capt.pretrain.base.locks import make_folder_once
from capt.pretrain.base.overlap import text_hash
from capt.pretrain.base.randomness import mix64
from capt.pretrain.base.records import Count, Record, read_record
from capt.pretrain.base.verification import Verifier
from capt.pretrain.data.shards import token_dtype
from capt.pretrain.data.views import find_view
from capt.pretrain.pairs.config import PairSource
from capt.pretrain.pairs.forms import Counts, Pair, read_pairs
from capt.pretrain.pairs.known import KnownPositives
from capt.pretrain.pairs.losses import find_loss, loss_of
from capt.pretrain.pairs.sources import EncodedTexts, Lists, SourceRows, longest_text, text_key
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)

_RECORD = "rows.json"
_VERSION = 2
_AT_ONCE = 4096
"""Texts that are encoded in one call."""

Pairs = Iterable[tuple[str, Pair]]


class RowsRecord(Record):
    """The content of ``rows.json``: the arrays beside it, and what was found while they were written."""

    version: int = _VERSION
    digest: str = Field(max_length=64)
    arrays: dict[str, Annotated[tuple[str, Count], Field(strict=False)]]
    """Name -> the type of the numbers, and how many there are."""
    cut: Annotated[tuple[Count, Count], Field(strict=False)]
    """Queries and documents that are longer than allowed."""
    notes: dict[str, Count]
    remarks: list[str]
    unscored: str | None = None
    """The place of the first row without a teacher's scores, where others have them."""
    launch: str = ""
    """The start that has written it, where the content of the source is not known before it is read."""
    unused: Count = 0
    """Hard negatives that the rows have and the source does not use."""


class PreparedSource(NamedTuple):
    """The rows of a source that are trained on, those that are held out, and what was found while they were read."""

    train: SourceRows | None
    held_out: SourceRows | None
    record: RowsRecord


def _column(folder: Path | None, name: str, dtype: Any) -> Column:
    """An array that grows, in memory where there is no folder."""
    return Column(None if folder is None else folder / f"{name}.bin", dtype)


class _Side:
    """The distinct texts of queries or documents, encoded as they come."""

    def __init__(
        self, folder: Path | None, name: str, tokenizer: TextTokenizer, length: int | None, max_positions: int,
        what: str, own: int | None, *, hashes: bool,
    ) -> None:  # fmt: skip
        self._name, self._what, self._own = name, what, own
        self._tokenizer, self._length, self._max_positions = tokenizer, length, max_positions
        self.ids = _column(folder, f"{name}_ids", token_dtype(tokenizer.vocab_size))
        self.starts, self.keys = _column(folder, f"{name}_starts", "<i8"), _column(folder, f"{name}_keys", "<i8")
        self.hashes = _column(folder, f"{name}_hashes", "V32") if hashes else None
        self.starts.append([0])
        self._numbers: dict[bytes, int] = {}
        self._waiting: list[tuple[str, str]] = []
        self._longest: dict[str, int] = {}
        self._end = 0
        self.cut = 0

    def columns(self) -> dict[str, Column]:
        """The arrays of the texts, by name."""
        found = {f"{self._name}_{what}": getattr(self, what) for what in ("ids", "starts", "keys", "hashes")}
        return {name: column for name, column in found.items() if column is not None}

    def longest(self, prompt: str, what: str = "") -> int:
        """Tokens of the longest text after a prompt. Raises ``ConfigError`` where they do not fit each other."""
        if prompt not in self._longest:
            self._longest[prompt] = longest_text(
                self._tokenizer, prompt, self._length, self._max_positions, what or self._what, self._own
            )
        return self._longest[prompt]

    def number(self, text: str, prompt: str, place: str) -> int:
        """The number of a text with its prompt, a new one where it has none yet."""
        # The same text behind another prompt is another text; no text holds a NUL, so the two do not run together.
        content = f"{prompt}\0{text}".encode(errors="surrogatepass")
        name = hashlib.blake2b(content, digest_size=16).digest()
        number = self._numbers.setdefault(name, len(self._numbers))
        if number == len(self.keys) + len(self._waiting):  # it is new
            self.longest(prompt, place)
            self._waiting.append((prompt, text))
            if len(self._waiting) >= _AT_ONCE:
                self.flush()
        return number

    def flush(self) -> None:
        """Encode the texts that wait."""
        special, waiting = self._tokenizer.special, self._waiting
        encoded = self._tokenizer.encode_batch([prompt + text for prompt, text in waiting])
        parts: list[Any] = []
        starts = array("q")
        for (prompt, _), ids in zip(waiting, encoded, strict=True):
            longest = self.longest(prompt)
            # 2: `<s>` and `</s>`.
            self.cut += len(ids) + 2 > longest
            kept = ids[: longest - 2]
            parts += [[special.bos], kept, [special.eos]]
            self._end += len(kept) + 2
            starts.append(self._end)
        if parts:
            self.ids.append(np.concatenate(parts))
        self.starts.append(starts)
        # The key is of the text alone: documents are equal whatever prompt is before them.
        self.keys.append([text_key(text) for _, text in waiting])
        if self.hashes is not None:
            both = (text_hash(each) for _, text in waiting for each in (text, text.strip()))
            self.hashes.append(np.frombuffer(b"".join(both), "V32"))
        waiting.clear()


class RowsWriter:
    """Encodes the pairs of a source, whose settings are all filled in (`PairData.each`).

    A negative with the key of a positive of its row is left out, and counted. A row without a positive is a text alone,
    which is its own positive.

    Args:
        source: the source.
        tokenizer: of the encoder.
        max_positions: of the encoder.
        folder: where the arrays are written; None keeps them in memory.
        hashes: keep the hash of each text.

    Raises:
        ConfigError: a prompt and a length that do not fit together, or the encoder.
    """

    def __init__(
        self, source: PairSource, tokenizer: TextTokenizer, max_positions: int, folder: Path | None = None, *,
        hashes: bool = False,
    ) -> None:  # fmt: skip
        self.source, self._folder, self._view = source, folder, find_view(source.view)
        lengths = (source.query_length, source.document_length)
        self._sides = [
            _Side(
                folder,
                name,
                tokenizer,
                length,
                max_positions,
                f"source {source.name}, {name}",
                source.own_length,
                hashes=hashes,
            )
            for name, length in zip(("queries", "documents"), lengths, strict=True)
        ]
        # A prompt that does not fit the length is refused before a row is read.
        for side, prompt in zip(self._sides, (source.prompts.query, source.prompts.document), strict=True):
            side.longest(prompt)
        names = ("query", "positives", "positive_starts", "negatives", "negative_starts")
        scores = ("scores", "positive_scores", "negative_scores")
        self._columns = {name: _column(folder, name, "<i8") for name in names}
        self._columns |= {name: _column(folder, name, "<f4") for name in scores}
        self._ends = {"positive_starts": 0, "negative_starts": 0}
        for name in self._ends:
            self._columns[name].append([0])
        self.rows = 0
        self._negatives = self._unused = 0
        self._is_scored: bool | None = None
        self._teacher = [0, ""]
        """Rows that a teacher has scored, and the place of the first that it has not."""

    def add(self, place: str, pair: Pair) -> None:
        """Add one row.

        Raises:
            DataError: it has no text, a score where its source has none (or the other way round), one out of range, or
                no negative in a source with ``in_batch`` false.
        """
        source = self.source
        own = pair.positives or (pair.query,)
        if not pair.query.strip() or not all(text.strip() for text in own):
            raise DataError(f"{place}: an empty query or positive; remove the row")
        self._check_kind(place, pair)
        # The reader has left out negatives that are positives.
        scores = pair.negative_scores or (float("nan"),) * len(pair.negatives)
        negatives = dict(zip(pair.negatives, scores, strict=True))
        if not source.in_batch and not negatives:
            raise DataError(
                f"{place}: no negative, and source {source.name} has in_batch false: give the row negatives, or set "
                "in_batch=true"
            )
        if not source.negatives:
            self._unused += len(negatives)
            negatives = {}
        query_prompt = source.prompts.query if pair.prompt is None else pair.prompt
        queries, documents = self._sides
        columns = self._columns
        # Texts are stored once and rows refer to them by number; the columns of a row are of varying length.
        columns["query"].append([queries.number(pair.query, query_prompt, place)])
        # The first score counts where a document is named twice.
        given = pair.positive_scores or (float("nan"),) * len(own)
        mine = dict(zip(reversed(own), reversed(given), strict=True))
        order = list(dict.fromkeys(own))
        self._put("positive", [documents.number(text, source.prompts.document, place) for text in order])
        self._put("negative", [documents.number(text, source.prompts.document, place) for text in negatives])
        columns["positive_scores"].append([mine[text] for text in order])
        columns["negative_scores"].append(list(negatives.values()))
        if pair.score is not None:
            columns["scores"].append([pair.score])
        self._negatives += len(negatives)
        self.rows += 1
        # A teacher must have scored all rows or none; the first row without scores is named.
        if pair.positive_scores is not None and (pair.negative_scores is not None or not negatives):
            self._teacher[0] += 1  # type: ignore[operator]
        else:
            self._teacher[1] = self._teacher[1] or place

    def _put(self, name: str, numbers: Sequence[int]) -> None:
        self._columns[f"{name}s"].append(numbers)
        self._ends[f"{name}_starts"] += len(numbers)
        self._columns[f"{name}_starts"].append([self._ends[f"{name}_starts"]])

    def _check_kind(self, place: str, pair: Pair) -> None:
        source, is_scored = self.source, pair.score is not None
        # `auto` takes rows of both kinds.
        loss = find_loss(loss_of(source.loss, is_scored=is_scored))
        if is_scored and "scores" not in loss.needs:
            raise DataError(
                f"{place}: two texts and their score, and source {source.name} has the loss {source.loss}, of pairs "
                "that belong together: set loss=cosent, or keep the rows of high scores and set form=columns"
            )
        if not is_scored and "scores" in loss.needs:
            raise DataError(
                f"{place}: no score, and source {source.name} has the loss {source.loss}, of rows of two texts and a "
                "score: name its column by columns={score: NAME}, or set loss=contrast"
            )
        if self._is_scored not in (None, is_scored):
            raise DataError(f"{place}: rows with a score and rows without are in source {source.name}: divide it")
        self._is_scored = is_scored
        if loss.of_cosines and pair.score is not None and not -1 <= pair.score <= 1:
            raise DataError(
                f"{place}: score {pair.score:g} is not a cosine, which is from -1 to 1: divide the scores (those of "
                "STS by 5), or set loss=cosent, which reads their order alone"
            )
        if pair.positives and (self._view.corrupts or self._view.draw is not None):
            raise DataError(
                f"{place}: a row of two texts, and source {source.name} has the view {source.view}, of one text alone: "
                "set form=texts with columns={text: NAME}, or view=dropout"
            )

    def finish(self, remarks: Sequence[str] = (), launch: str = "") -> RowsRecord:
        """Write what is left, and the record, which holds both arguments.

        Raises:
            DataError: no row has a negative, and some are asked for.
        """
        source = self.source
        if self.rows and source.negatives and not self._negatives:
            raise DataError(
                f"source {source.name}: negatives is {source.negatives}, and no row has a negative: give the rows "
                "hard negatives (capt mine writes them), or set data.negatives=0"
            )
        for side in self._sides:
            side.flush()
        columns = dict(self._columns)
        # Columns that no row has filled are not written.
        if not self._is_scored:
            del columns["scores"]
        if not self._teacher[0]:
            del columns["positive_scores"], columns["negative_scores"]
        for side in self._sides:
            columns |= side.columns()
        # The digest goes by column, whatever the order in which they were filled.
        self._arrays = {name: column.finish() for name, column in columns.items()}
        arrays = {name: (column.dtype.str, len(column)) for name, column in columns.items()}
        digest = _digest_of(_hashed(arrays), {name: column.sha256 for name, column in columns.items()})
        notes = {"texts are cut": sum(side.cut for side in self._sides)}
        # Not part of the digest, for it follows from the rows.
        if not self._is_scored:
            arrays |= self._index(arrays)
        record = RowsRecord(
            digest=digest,
            arrays=arrays,
            cut=(self._sides[0].cut, self._sides[1].cut),
            notes=notes,
            remarks=list(remarks),
            unscored=str(self._teacher[1]) if self._teacher[0] and self._teacher[1] else None,
            launch=launch,
            unused=self._unused,
        )
        if self._folder is not None:
            write_json(self._folder / _RECORD, record.model_dump(mode="json"))
        return record

    def _index(self, kinds: Mapping[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
        """Write the known positives of each query."""
        arrays = self._arrays if self._folder is None else _mapped(self._folder, kinds)
        rows = _rows_of(self.source, arrays, None)
        index = rows.keys.known
        written = {}
        for name in _INDEX:
            column = _column(self._folder, f"known_{name}", "<i8")
            column.append(getattr(index, name))
            self._arrays[f"known_{name}"] = column.finish()
            written[f"known_{name}"] = (column.dtype.str, len(column))
        return written

    def in_memory(self, record: RowsRecord) -> SourceRows:
        """The rows, where they were kept in memory."""
        return _rows_of(self.source, self._arrays, record)


_INDEX = ("queries", "starts", "documents")
"""The arrays of `KnownPositives`."""


def _hashed(arrays: Mapping[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """The arrays that the digest of rows is of: the others follow from the texts, and are not always there."""
    return {name: kind for name, kind in arrays.items() if not name.startswith("known_") and "_hashes" not in name}


def _digest_of(arrays: Mapping[str, tuple[str, int]], hashes: Mapping[str, str]) -> str:
    """Return a SHA-256 of the types, the lengths and the hashes of arrays."""
    listed = (f"{name} {dtype} {length} {hashes[name]}" for name, (dtype, length) in sorted(arrays.items()))
    return hashlib.sha256("".join(listed).encode()).hexdigest()


def _require_digest(folder: Path, record: RowsRecord, verifier: Verifier) -> None:
    """Refuse arrays that are not those of the record; all ranks of ``verifier`` hash them together."""
    arrays = _hashed(record.arrays)
    found = verifier.digests([folder / f"{name}.bin" for name in arrays])
    with verifier.ranks.synchronize_errors():
        if _digest_of(arrays, dict(zip(arrays, found, strict=True))) != record.digest:
            raise DataError(f"{folder}: damaged: remove {folder.parent}, it is then written anew")


def _rows_of(source: PairSource, arrays: Mapping[str, np.ndarray], record: RowsRecord | None) -> SourceRows:
    """The rows of some arrays; without a record those that are not indexed yet."""
    queries, documents = (
        EncodedTexts(
            arrays[f"{name}_ids"], arrays[f"{name}_starts"], arrays[f"{name}_keys"], cut, arrays.get(f"{name}_hashes")
        )
        for name, cut in zip(("queries", "documents"), (0, 0) if record is None else record.cut, strict=True)
    )
    index = None
    if "known_queries" in arrays:
        index = KnownPositives(*(arrays[f"known_{name}"] for name in _INDEX))
    return SourceRows(
        source=source,
        queries=queries,
        documents=documents,
        query=arrays["query"],
        positives=Lists(arrays["positives"], arrays["positive_starts"]),
        negatives=Lists(arrays["negatives"], arrays["negative_starts"]),
        scores=arrays.get("scores"),
        positive_scores=arrays.get("positive_scores"),
        negative_scores=arrays.get("negative_scores"),
        digest="" if record is None else record.digest,
        index=index,
    )


def _mapped(folder: Path, arrays: Mapping[str, tuple[str, int]]) -> dict[str, np.ndarray]:
    """The arrays in ``folder``, mapped. Raises ``DataError`` where a file is missing or of another size."""
    remedy = f": remove {folder}, it is then written anew"
    return {
        name: map_array(folder / f"{name}.bin", ArrayFile(dtype, (length,), has_header=False), remedy)
        for name, (dtype, length) in arrays.items()
    }


def open_rows(folder: Path, source: PairSource) -> tuple[SourceRows, RowsRecord]:
    """The rows in ``folder``, mapped. Raises ``DataError`` where a file is missing or of another size."""
    record = read_record(RowsRecord, folder / _RECORD, "; remove the folder", error=DataError)
    return _rows_of(source, _mapped(folder, record.arrays), record), record


def encode_source(source: PairSource, pairs: Pairs, tokenizer: TextTokenizer, max_positions: int) -> SourceRows:
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
    content = verifier.digests([part for path in inputs for part in _files_of(path)]) if is_known else []
    launch = "" if is_known else ranks.broadcast(uuid.uuid4().hex)
    # Keys that do not change a token, such as the weight, do not make another folder.
    written = source.model_dump(mode="json")
    settings = {key: written[key] for key in _SETTINGS}
    settings |= {key: written[key] for key in (*_SELECTION, "own_length") if written[key] is not None}
    recipe = [_VERSION, content, [str(path) for path in inputs], settings, fraction, tokenizer.fingerprint]
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
        _require_digest(folder / split, record, verifier)
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


def _files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(part for part in path.rglob("*") if part.is_file())


def _is_written(folder: Path, launch: str) -> bool:
    """Return whether the rows are there; those of a source of unknown content by this start."""
    split = next((folder / name for name in _SPLITS if (folder / name / _RECORD).is_file()), None)
    return split is not None and (not launch or read_record(RowsRecord, split / _RECORD).launch == launch)


def _write(
    source: PairSource, files: Sequence[Path], fraction: float | None, tokenizer: TextTokenizer, max_positions: int,
    folder: Path, launch: str, held_out: Mapping[str, Any], *, hashes: bool, prompts: bool,
) -> None:  # fmt: skip
    counts = Counts()
    pairs: Pairs = pairs_of(source, files, counts)
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


def held_out_share(pairs: Pairs) -> tuple[float, Pairs]:
    """Return the share of some pairs to hold out, and the same pairs, of which the first 10,000 were read for it.

    It is 2%, where that is too few the share of 200 pairs, and a tenth at most.
    """
    pairs = iter(pairs)
    first = list(islice(pairs, round(_ENOUGH / _LEAST)))
    return min(_MOST, max(_LEAST, _ENOUGH / max(1, len(first)))), chain(first, pairs)


def split_pairs(pairs: Pairs, fraction: float) -> Iterator[tuple[str, Pair, bool]]:
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
    # Of the texts that are cut, the longest is as long as the limit.
    sides = (("query", "query_length", rows.queries), ("document", "document_length", rows.documents))
    notes = "".join(
        f"; {counted(texts.cut, noun)} cut to {texts.longest} tokens (data.sequence_length, or {key} of a side)"
        for noun, key, texts in sides
        if texts.cut
    )
    logger.info(
        "source %s: %s, %.1f tokens a query, %.1f a document%s",
        *(rows.source.name, counted(len(rows), "pair"), rows.queries.mean_length, rows.documents.mean_length),
        notes,
    )

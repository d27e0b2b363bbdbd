"""Writing the rows of a source: each text is encoded once, as it comes, and rows name texts by number.

While rows are written, a digest and a number of each distinct text are in memory (about 150 bytes), to give equal texts
one number; the texts are not.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capt.pretrain.base.arrays import Column
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import write_json
from capt.pretrain.base.overlap import text_hash
from capt.pretrain.data.shards import token_dtype
from capt.pretrain.data.views import find_view
from capt.pretrain.pairs.data_config import PairSource
from capt.pretrain.pairs.forms import Pair
from capt.pretrain.pairs.losses import find_loss, loss_of
from capt.pretrain.pairs.sources import SourceRows, longest_text, text_key
from capt.pretrain.pairs.store import INDEX, RECORD, RowsRecord, digest_of_rows, map_rows, source_rows
from capt.tokenizer.encode import TextTokenizer

_AT_ONCE = 4096
"""Texts that are encoded in one call."""


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
            DataError: no row has a negative, and the source needs some.
        """
        source = self.source
        if self.rows and source.negatives and source.needs_negatives and not self._negatives:
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
        digest = digest_of_rows(arrays, {name: column.sha256 for name, column in columns.items()})
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
            write_json(self._folder / RECORD, record.model_dump(mode="json"))
        return record

    def _index(self, kinds: Mapping[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
        """Write the known positives of each query."""
        arrays = self._arrays if self._folder is None else map_rows(self._folder, kinds)
        rows = source_rows(self.source, arrays, None)
        index = rows.keys.known
        written = {}
        for name in INDEX:
            column = _column(self._folder, f"known_{name}", "<i8")
            column.append(getattr(index, name))
            self._arrays[f"known_{name}"] = column.finish()
            written[f"known_{name}"] = (column.dtype.str, len(column))
        return written

    def in_memory(self, record: RowsRecord) -> SourceRows:
        """The rows, where they were kept in memory."""
        return source_rows(self.source, self._arrays, record)

"""Output of ``capt data inspect`` for pairs: counts, lengths, and a few rows as the encoder sees them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.parallel import batched
from capt.pretrain.pairs.config import PairJob
from capt.pretrain.pairs.data_config import PairSource
from capt.pretrain.pairs.forms import Counts, Pair, folder_form
from capt.pretrain.pairs.known import LeftOut, RowKeys, left_out
from capt.pretrain.pairs.prepare import pairs_of
from capt.pretrain.pairs.sources import text_key
from capt.tokenizer.encode import TextTokenizer

_LENGTH = 128
"""Tokens of a text where nothing says how many."""
_SHOWN = 3
"""Positives, and negatives, that are shown of a row."""


@dataclass(frozen=True)
class Side:
    """Settings for reading the texts of one side: the prompt before them, and the tokens that one may have.

    ``length`` counts the special tokens around a text and not its prompt; None is ``own``, the length that the encoder
    reads, or 128, and fewer where there is no room.
    """

    prompt: str = ""
    length: int | None = None
    own: int | None = None


@dataclass
class Lengths:
    """Tokens of all texts of one side, as they are without a limit (characters where there is no tokenizer)."""

    texts: int = 0
    shortest: int = 0
    longest: int = 0
    total: int = 0
    limit: int | None = None
    """The tokens that are read of one, its prompt included."""
    cut: int = 0
    """Texts that are longer than the limit, so that their end is not read."""

    def add(self, lengths: Sequence[int], limit: int | None) -> None:
        """Count some texts."""
        self.limit = limit
        if lengths:
            self.shortest = min(lengths) if self.texts == 0 else min(self.shortest, *lengths)
            self.longest = max(self.longest, *lengths)
            self.texts += len(lengths)
            self.total += sum(lengths)
            self.cut += 0 if limit is None else sum(length > limit for length in lengths)


@dataclass(frozen=True)
class ShownText:
    """A text of a sample; ``ids`` are what the encoder reads, ``pieces`` their names."""

    role: str
    text: str
    ids: list[int]
    pieces: list[str]
    is_cut: bool


@dataclass(frozen=True)
class Sample:
    """A row, with the place that it comes from."""

    place: str
    texts: list[ShownText]
    score: float | None
    more: int
    """Positives and negatives that are not shown."""


@dataclass(frozen=True)
class PairSummary:
    """Counts, the number of positives and negatives, lengths of both sides, the first rows, and the keys of all rows
    without a score, which say what belongs to which query."""

    counts: Counts
    positives: int
    negatives: int
    query: Lengths
    document: Lengths
    query_side: Side
    document_side: Side
    samples: list[Sample]
    keys: RowKeys


def left_out_of(summaries: Sequence[PairSummary]) -> list[LeftOut | None]:
    """Return what steps of each source leave out as known positives, by all sources; None of rows with scores alone."""
    known = [summary.keys.known for summary in summaries]
    return [left_out(summary.keys, known) if len(summary.keys.queries) else None for summary in summaries]


def text_ids(tokenizer: TextTokenizer, texts: Sequence[str], side: Side) -> tuple[list[list[int]], int]:
    """The ids of every text with its prompt and ``<s> </s>`` around it, uncut, and the ids that the encoder may read.

    Raises:
        ConfigError: the prompt is longer than the texts that may follow it.
    """
    special = tokenizer.special
    before = len(tokenizer.encode_batch([side.prompt])[0]) if side.prompt else 0
    length = side.length or max(8, min(side.own or _LENGTH, tokenizer.model_max_length - before))
    # 2: `<s>` and `</s>`.
    if before > length - 2:
        raise ConfigError(
            f"the prompt {side.prompt[:60]!r} has {before} tokens, the text after it at most {length - 2}: "
            "shorten the prompt, or allow more tokens"
        )
    encoded = tokenizer.encode_batch([side.prompt + text for text in texts])
    return [[special.bos, *ids.tolist(), special.eos] for ids in encoded], length + before


def summarize_pairs(source: PairSource, tokenizer: TextTokenizer | None, samples: int = 3) -> PairSummary:
    """Read all pairs of a source, and describe them. Raises ``DataError`` and ``ConfigError`` as `pairs_of`."""
    counts = Counts()
    pairs = pairs_of(source, [Path(pattern).expanduser() for pattern in source.files], counts)
    query = Side(source.prompts.query, source.query_length, source.own_length)
    document = Side(source.prompts.document, source.document_length, source.own_length)
    lengths = {"query": Lengths(), "document": Lengths()}
    shown: list[Sample] = []
    positives = negatives = 0
    queries_of, documents_of, starts = array("q"), array("q"), array("q", [0])
    # A tokenizer is fast on many texts at a time, and a source may be larger than memory.
    for block in batched(pairs, 1024):
        positives += sum(len(pair.positives) for _, pair in block)
        negatives += sum(len(pair.negatives) for _, pair in block)
        for _, pair in block:
            if pair.score is None:
                queries_of.append(text_key(pair.query))
                # As they are drawn: each text of a row once, copies of it beside it.
                documents_of.extend(map(text_key, dict.fromkeys(pair.positives or (pair.query,))))
                starts.append(len(documents_of))
        queries = [pair.query for _, pair in block]
        documents = [text for _, pair in block for text in (*pair.positives, *pair.negatives)]
        for name, texts, side in (("query", queries, query), ("document", documents, document)):
            if tokenizer is None:
                lengths[name].add([len(text) for text in texts], None)
            else:
                ids, limit = text_ids(tokenizer, texts, side)
                lengths[name].add([len(row) for row in ids], limit)
        shown += [_sample(place, pair, query, document, tokenizer) for place, pair in block[: samples - len(shown)]]
    keys = RowKeys(*(np.frombuffer(values, np.int64) for values in (queries_of, documents_of, starts)))
    return PairSummary(
        counts, positives, negatives, lengths["query"], lengths["document"], query, document, shown, keys
    )


def _sample(place: str, pair: Pair, query: Side, document: Side, tokenizer: TextTokenizer | None) -> Sample:
    """A row as the encoder sees it: a text that is longer than allowed keeps its beginning, and ends with ``</s>``."""
    sides = (("positive", pair.positives), ("negative", pair.negatives))
    roles = [("query", pair.query), *((role, text) for role, texts in sides for text in texts[:_SHOWN])]
    shown = []
    for role, text in roles:
        if tokenizer is None:
            shown.append(ShownText(role, text, [], [], False))
            continue
        side = query if role == "query" else document
        # A row's own prompt takes the place of the source's.
        if role == "query" and pair.prompt is not None:
            side = replace(side, prompt=pair.prompt)
        (ids,), limit = text_ids(tokenizer, [text], side)
        # The end of a long text is cut, and `</s>` stays the last token.
        read = ids if len(ids) <= limit else [*ids[: limit - 1], tokenizer.special.eos]
        pieces = [str(tokenizer.backend.id_to_token(i)) for i in read]
        shown.append(ShownText(role, text, read, pieces, len(ids) > limit))
    return Sample(place, shown, pair.score, 1 + len(pair.positives) + len(pair.negatives) - len(shown))


def views_of(job: PairJob, count: int) -> dict[str, list[tuple[str, str]]]:
    """Both views of the first rows of a training, as text, by source; of sources whose rows are one text alone."""
    from capt.pretrain.pairs.task import PairTask

    # The order of the rows does not depend on the size of a step, which may be larger than a small file.
    batch = job.batch.model_copy(update={"global_": min(count, job.batch.global_)})
    with TemporaryDirectory() as folder:
        task = PairTask(job.model_copy(update={"batch": batch}), Path(folder))
    steps = task.step_assembler(batch.global_, 1, 1, 0)
    alone = [source for source in task.sources if source.is_one_column]
    found: dict[str, list[tuple[str, str]]] = {source.source.name: [] for source in alone}
    for step in range(_TURNS * len(task.sources)):
        (rows,) = steps(step * batch.global_, step)
        texts, n = rows.tokens.split(rows.lengths.tolist()), len(rows.ids)
        for row, number in enumerate(rows.sources.tolist()):
            shown = found.get(task.sources[number].source.name)
            if shown is not None and len(shown) < count:
                first, second = (task.tokenizer.decode(texts[i].tolist(), skip_special=False) for i in (row, n + row))
                shown.append((first, second))
        if all(len(each) == count for each in found.values()):
            break
    return found


_TURNS = 4
"""Steps for each source in which its rows are looked for."""


def is_pairs(path: Path) -> bool:
    """Return whether a path names pairs, and not a set of token shards."""
    names = ("qrels", "state.json", "dataset_dict.json")
    return not path.is_dir() or folder_form(path) is not None or any((path / name).exists() for name in names)

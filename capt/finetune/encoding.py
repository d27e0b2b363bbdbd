"""Turn texts and pairs of texts into token ids: between special tokens, cut to a length, cached for large sets."""

from __future__ import annotations

import hashlib
import logging
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import require_stored
from capt.pretrain.base.locks import make_once
from capt.tokenizer.encode import TextTokenizer
from capt.tokenizer.special import PairTemplate

logger = logging.getLogger(__name__)

CACHE_FROM = 50_000
"""Sets of at least this number of rows are kept on disk as ids; smaller ones are tokenized in seconds."""


@dataclass(frozen=True)
class EncodedTexts:
    """Token ids of ``n`` rows, special tokens included, one after the other.

    Row ``i`` is ``ids[starts[i] : starts[i + 1]]``; its token types are 1 from ``seconds[i]`` on (its end where all are
    0, as for one text). ``cut`` rows were longer than allowed.
    """

    ids: Int32[np.ndarray, " total"]
    starts: Int64[np.ndarray, " n1"]
    seconds: Int32[np.ndarray, " n"]
    cut: int

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def lengths(self) -> Int64[np.ndarray, " n"]:
        """Tokens of each row."""
        return np.diff(self.starts)


def encode_texts(
    first: Sequence[str],
    second: Sequence[str] | None,
    tokenizer: TextTokenizer,
    max_length: int,
    *,
    source: str | None,
    types: bool = False,
    cache: Path | None = None,
) -> EncodedTexts:
    """``<s> A </s>`` of every row, and of a pair what the tokenizer's own template makes of it (`PairTemplate`).

    Rows longer than ``max_length`` lose tokens of their longer text first, then of both (``longest_first`` of
    Hugging Face); how many is logged. Uses all cores.

    Args:
        first: the texts, or the first of each pair.
        second: the second of each pair, if they are pairs.
        tokenizer: made of the vocabulary that the encoder was pretrained with.
        max_length: tokens of a row, special tokens included.
        source: what to call the rows in the log; None = they are some of many, and the caller says how many are cut.
        types: whether token types are read; without it they are all 0.
        cache: folder to keep the ids of ``CACHE_FROM`` rows or more in, by content; any process may share it.

    Raises:
        DataError: the tokenizer's template for pairs cannot be used; see `PairTemplate`.
    """
    if cache is None or len(first) < CACHE_FROM:
        encoded = _encode(first, second, tokenizer, max_length, types)
    else:
        path = cache / f"{_key(first, second, tokenizer, max_length, types)}.npz"

        def make() -> None:
            logger.info("%s: tokenizing %s rows into %s", source, f"{len(first):,}", path)
            _write(path, _encode(first, second, tokenizer, max_length, types))

        make_once(path.with_suffix(".lock"), path.exists, make)
        encoded = _read(path)
    if encoded.cut and source is not None:
        logger.warning("%s: %d of %d rows were cut to %d tokens", source, encoded.cut, len(encoded), max_length)
    return encoded


def truncated_lengths(
    a: Int64[np.ndarray, " n"], b: Int64[np.ndarray, " n"], room: int
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Return how many tokens of both texts of each pair stay, so that at most ``room`` of their ``a + b`` tokens do.

    The longer text is cut down to what the shorter leaves; where neither fits half of the room, both get half (of an
    odd room the longer gets one more; of two equal ones the second).
    """
    short, long = np.minimum(a, b), np.maximum(a, b)
    short_kept = np.where(a + b <= room, short, np.minimum(short, room // 2))
    long_kept = np.minimum(long, room - short_kept)
    return np.where(a <= b, short_kept, long_kept), np.where(a <= b, long_kept, short_kept)


def _encode(
    first: Sequence[str], second: Sequence[str] | None, tokenizer: TextTokenizer, max_length: int, types: bool
) -> EncodedTexts:
    texts = tokenizer.encode_batch(first)
    if second is not None:
        return join_pairs(texts, tokenizer.encode_batch(second), tokenizer.pair, max_length, types=types)
    special = tokenizer.special
    bos, eos = (np.array([i], dtype=np.int32) for i in (special.bos, special.eos))
    lengths = np.array([len(ids) for ids in texts], dtype=np.int64)
    keep = np.minimum(lengths, max_length - 2)
    parts = [part for ids, n in zip(texts, keep, strict=True) for part in (bos, ids[:n], eos)]
    return _in_rows(parts, keep + 2, keep + 2, keep < lengths)


def join_pairs(
    texts: Sequence[np.ndarray], others: Sequence[np.ndarray], template: PairTemplate, max_length: int, *, types: bool
) -> EncodedTexts:
    """Join the ids of both texts of each pair by a template, cut to ``max_length`` as `encode_texts` cuts them."""
    a, b = (np.array([len(ids) for ids in each], dtype=np.int64) for each in (texts, others))
    before, gap, after = (np.array(x, dtype=np.int32) for x in (template.before, template.between, template.after))
    keep, keep_b = truncated_lengths(a, b, max_length - template.added)
    pairs = zip(texts, others, keep, keep_b, strict=True)
    parts = [part for ids, other, n, m in pairs for part in (before, ids[:n], gap, other[:m], after)]
    lengths = keep + keep_b + template.added
    seconds = _second_type(template, keep, keep_b, lengths) if types else lengths
    return _in_rows(parts, lengths, seconds, (keep < a) | (keep_b < b))


def _in_rows(
    parts: Sequence[np.ndarray], lengths: Int64[np.ndarray, " n"], seconds: np.ndarray, cut: np.ndarray
) -> EncodedTexts:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return EncodedTexts(np.concatenate(parts), starts, seconds.astype(np.int32), int(cut.sum()))


def _second_type(
    template: PairTemplate, a: Int64[np.ndarray, " n"], b: Int64[np.ndarray, " n"], lengths: Int64[np.ndarray, " n"]
) -> Int64[np.ndarray, " n"]:
    """The place in each row of ``a`` and ``b`` tokens of text from which on token types are 1."""
    place = template.second_type
    if place is None:
        return lengths
    # In the template each text has one place, and takes its own number of tokens in the row.
    first, second = len(template.before), len(template.before) + 1 + len(template.between)
    return np.asarray(place + (a - 1) * (place > first) + (b - 1) * (place > second), dtype=np.int64)


def _key(
    first: Sequence[str], second: Sequence[str] | None, tokenizer: TextTokenizer, max_length: int, types: bool
) -> str:
    template = None if second is None else tokenizer.pair
    digest = hashlib.sha256(f"{tokenizer.fingerprint}/{max_length}/{template}/{types}".encode())
    for texts in (first, second or ()):
        for text in texts:
            data = text.encode()
            # With its length: other texts never have the same bytes one after the other.
            digest.update(len(data).to_bytes(4, "little") + data)
    return digest.hexdigest()[:32]


def _read(path: Path) -> EncodedTexts:
    require_stored(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            return EncodedTexts(file["ids"], file["starts"], file["seconds"], int(file["cut"]))
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: damaged: {error}; remove it, and it is made again") from None


def _write(path: Path, encoded: EncodedTexts) -> None:
    partial = path.with_suffix(".partial.npz")  # its owner holds the lock
    np.savez(partial, ids=encoded.ids, starts=encoded.starts, seconds=encoded.seconds, cut=encoded.cut)
    partial.replace(path)

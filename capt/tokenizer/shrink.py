"""A tokenizer with a part of its pieces: WordPiece, byte-level or SentencePiece BPE, and Unigram.

A text all of whose pieces are kept has the same pieces in both. WordPiece looks for the longest piece, which is still
there. Of BPE every merge on the way to a kept piece is kept, with both parts and the result, in its old order: within a
word whose pieces are kept no other merge has happened. Unigram keeps scores, and the lowest of them, by which an
unknown character is judged; the best path through a text is then the best of fewer.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Int64
from tokenizers import Tokenizer, pre_tokenizers

from capt.pretrain.base.errors import DataError, shown
from capt.tokenizer.encode import TextTokenizer
from capt.tokenizer.special import SpecialIds

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_KINDS = ("WordPiece", "BPE", "Unigram")


@dataclass(frozen=True)
class ShrunkTokenizer:
    """A tokenizer with fewer pieces.

    Attributes:
        tokenizer: the new one.
        old_ids: the id that each new one had, ascending.
    """

    tokenizer: TextTokenizer
    old_ids: Int64[np.ndarray, " n"]

    @cached_property
    def new_ids(self) -> dict[int, int]:
        """The new id of each old one that is kept."""
        return {old: new for new, old in enumerate(self.old_ids.tolist())}


def count_pieces(tokenizer: TextTokenizer, texts: Iterable[str]) -> Counter[int]:
    """Count how often each id occurs in texts, without special tokens around them."""
    counts: Counter[int] = Counter()
    block: list[str] = []
    for text in texts:
        block.append(text)
        if len(block) == 1024:
            counts.update(_ids(tokenizer, block))
            block.clear()
    counts.update(_ids(tokenizer, block))
    return counts


def _ids(tokenizer: TextTokenizer, texts: list[str]) -> Iterator[int]:
    return (i for ids in tokenizer.encode_batch(texts) for i in ids.tolist())


def shrink_tokenizer(
    tokenizer: TextTokenizer, counts: Mapping[int, int], number: int | None = None, always: Iterable[int] = ()
) -> ShrunkTokenizer:
    """Return the tokenizer with the pieces that ``counts`` has, those that they need, special tokens, and bytes.

    A letter of the texts stays a piece where it is one, so that a word whose piece is gone is spelt. Ids keep their
    order and lose the gaps.

    Args:
        tokenizer: the tokenizer.
        counts: how often each id occurs in texts.
        number: keep this number of ids at most for their counts, the most frequent ones; None = all.
        always: ids that stay, whatever they are and however often they occur.

    Raises:
        DataError: it is of another kind, or names a piece that it does not have.
    """
    spec = json.loads(tokenizer.backend.to_str())
    model = spec["model"]
    kind = model.get("type")
    if kind not in _KINDS:
        raise DataError(f"a tokenizer of the kind {shown(kind)}; pieces are taken out of {', '.join(_KINDS)}")
    pieces = _pieces(model)
    name_of = {i: name for name, i in pieces.items()}
    chosen = {i for i, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:number]}
    letters = {letter for i in counts for letter in name_of.get(i, "")}
    kept = chosen | {i for name, i in pieces.items() if _always(name, letters, model)} | {*always}
    kept |= {token["id"] for token in spec["added_tokens"]} | set(asdict(tokenizer.special).values())
    if (unknown := model.get("unk_token")) in pieces:
        kept.add(pieces[unknown])
    if kind == "BPE":
        kept |= _derived(model, pieces, kept)
    if kind == "Unigram":
        scores = [score for _, score in model["vocab"]]
        kept.add(scores.index(min(scores)))
        if model.get("unk_id") is not None:
            kept.add(model["unk_id"])
    old_ids = np.array(sorted(kept & ({*name_of} | {token["id"] for token in spec["added_tokens"]})), dtype=np.int64)
    new = {old: place for place, old in enumerate(old_ids.tolist())}
    _renumber(spec, pieces, new)
    special = SpecialIds(**{role: new[i] for role, i in asdict(tokenizer.special).items()})
    backend = Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
    shrunk = TextTokenizer(backend, special, model_max_length=tokenizer.model_max_length)
    return ShrunkTokenizer(shrunk, old_ids)


def _pieces(model: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = model["vocab"]
    # Of Unigram a list of pieces with their scores, in the order of the ids.
    return dict(vocabulary) if isinstance(vocabulary, dict) else {name: i for i, (name, _) in enumerate(vocabulary)}


def _always(piece: str, letters: set[str], model: Mapping[str, Any]) -> bool:
    """Return whether a piece stays whatever the counts: a byte, or a letter of the texts."""
    bare = piece.removeprefix(model.get("continuing_subword_prefix") or "")
    return (len(bare) == 1 and (bare in letters or bare in _ALPHABET)) or _BYTE.fullmatch(piece) is not None


_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())
"""The letters by which byte-level BPE writes bytes, those of ASCII among them."""


def _derived(model: Mapping[str, Any], pieces: Mapping[str, int], kept: Iterable[int]) -> set[int]:
    """The ids of the parts of which merges make the kept pieces."""
    ranks = {_pair(merge): rank for rank, merge in enumerate(model["merges"])}
    prefix = model.get("continuing_subword_prefix") or ""
    name_of = {i: name for name, i in pieces.items()}
    found: set[int] = set()
    for i in kept:
        if i in name_of:
            found |= {pieces[part] for part in _parts(name_of[i], ranks, prefix) if part in pieces}
    return found


def _parts(piece: str, ranks: Mapping[tuple[str, str], int], prefix: str) -> set[str]:
    """Everything that BPE makes of the letters of a piece, the letters included."""
    letters = [piece[0], *(prefix + letter for letter in piece[1:])] if piece else []
    parts = set(letters)
    while len(letters) > 1:
        # The lowest rank first, and of two equal pairs the left one.
        rank, place = min((ranks.get(pair, len(ranks)), place) for place, pair in enumerate(pairwise(letters)))
        if rank == len(ranks):
            break
        merged = letters[place] + letters[place + 1].removeprefix(prefix)
        letters[place : place + 2] = [merged]
        parts.add(merged)
    return parts


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _renumber(spec: dict[str, Any], pieces: Mapping[str, int], new: Mapping[int, int]) -> None:
    """Leave the pieces out that have no new id, and write the new ids wherever the file has ids."""
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {name: new[i] for name, i in pieces.items() if i in new}
    else:
        model["vocab"] = [each for i, each in enumerate(model["vocab"]) if i in new]
        if model.get("unk_id") is not None:
            model["unk_id"] = new[model["unk_id"]]
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        there = model["vocab"]
        model["merges"] = [
            merge
            for merge in model["merges"]
            if all(part in there for part in (*_pair(merge), _pair(merge)[0] + _pair(merge)[1].removeprefix(prefix)))
        ]
    for token in spec["added_tokens"]:
        token["id"] = new[token["id"]]
    if spec.get("padding"):
        spec["padding"]["pad_id"] = new[spec["padding"]["pad_id"]]
    _renumber_processor(spec.get("post_processor"), new)


def _renumber_processor(processor: dict[str, Any] | None, new: Mapping[int, int]) -> None:
    """Write the new ids into what puts special tokens around a text."""
    if not processor:
        return
    for inner in processor.get("processors", []):
        _renumber_processor(inner, new)
    for role in ("sep", "cls"):
        if role in processor:
            token, old = processor[role]
            processor[role] = [token, new[old]]
    special = processor.get("special_tokens")
    for entry in special.values() if isinstance(special, dict) else special or []:
        entry["ids"] = [new[old] for old in entry["ids"]]

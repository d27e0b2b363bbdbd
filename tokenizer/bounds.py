"""Limits on what a ``tokenizer.json`` may ask for, and the border to the Rust library that runs it.

The library does what the file says, out of reach of signals: forty replacements of one letter by two are a terabyte. So
what could grow a text is added up before the file is used.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.base.errors import DataError, UserError
from pretrain.base.files import printable

GROWTH = 64
"""How many times longer the replacements of a pipeline may make a text, together."""
STEPS = 64
"""Steps of a pipeline."""
LONGEST = 10_000
"""Characters of a pattern, or of what is put before a text."""
_CHARACTER_MAP = 8 << 20
_LONGEST_MAPPED = 256
_BYTE_LEVELS = 3


def check_pipeline(spec: dict[str, Any], where: Path) -> None:
    """Refuse pipelines without bounds.

    Raises:
        DataError: a part has too many steps, too long a pattern, or makes a text longer than `GROWTH` times.
    """
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        steps = list(_steps(spec.get(part), where, part))
        growth = 1.0
        for step in steps:
            growth *= _growth(step, f"{where}: {part}")
            if growth > GROWTH:
                raise DataError(f"{where}: {part}: makes a text over {GROWTH} times as long")
        if sum(step.get("type") == "ByteLevel" for step in steps) > _BYTE_LEVELS:
            raise DataError(f"{where}: {part}: more than {_BYTE_LEVELS} steps of type ByteLevel")


def check_ids(tokenizer: Tokenizer, where: Path) -> None:
    """Raise ``DataError`` when the ids have gaps that would make tables of a hostile size."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"{where}: the vocabulary is empty")
    largest = max(vocabulary.values())
    if largest >= 4 * len(vocabulary) + 10_000:
        raise DataError(f"{where}: the largest id is {largest}, the vocabulary has {len(vocabulary)} tokens")


@contextmanager
def rust_errors(where: object, what: str) -> Iterator[None]:
    """Turn errors of the Rust library into a ``DataError``: bare exceptions, and panics, which are no ``Exception``."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{where}: {what} ({printable(str(error)) or type(error).__name__})") from error


def _steps(part: Any, where: Path, name: str) -> Iterator[dict[str, Any]]:
    """The steps of a part of the pipeline; a sequence gives the steps in it."""
    waiting = [part] if part is not None else []
    seen = 0
    while waiting:
        step = waiting.pop()
        seen += 1
        if seen > STEPS:
            raise DataError(f"{where}: {name}: more than {STEPS} steps")
        if not isinstance(step, dict):
            raise DataError(f"{where}: {name}: a step must be an object, it is {type(step).__name__}")
        if step.get("type") == "Sequence":
            inner: Any = next((step[key] for key in ("normalizers", "pretokenizers", "decoders") if key in step), [])
            if not isinstance(inner, list):
                raise DataError(f"{where}: {name}: a sequence must be a list, it is {type(inner).__name__}")
            waiting += inner[: STEPS + 1]
        else:
            yield step


def _growth(step: dict[str, Any], where: str) -> float:
    """The factor by which a step may lengthen a text."""
    kind = step.get("type")
    pattern = step.get("pattern")
    if isinstance(pattern, dict):
        for text in pattern.values():
            if not isinstance(text, str) or not 0 < len(text) <= LONGEST:
                raise DataError(f"{where}: a pattern must be a text of 1 to {LONGEST} characters")
    if kind == "Replace":
        content = step.get("content")
        if not isinstance(content, str) or not isinstance(pattern, dict):
            raise DataError(f"{where}: Replace needs a pattern and a content, both texts")
        shortest = len(pattern["String"]) if "String" in pattern else 1
        return max(1.0, len(content) / shortest)
    if kind == "Prepend":
        put = step.get("prepend")
        if not isinstance(put, str) or len(put) > LONGEST:
            raise DataError(f"{where}: Prepend needs a text of at most {LONGEST} characters")
    if kind == "Precompiled":
        _check_character_map(step.get("precompiled_charsmap"), where)
    return 1.0


def _check_character_map(coded: Any, where: str) -> None:
    """Check SentencePiece's map: the size of a trie, the trie, and the replacements, each ended by a NUL."""
    if not isinstance(coded, str) or len(coded) > _CHARACTER_MAP:
        raise DataError(f"{where}: precompiled_charsmap must be a text of at most {_CHARACTER_MAP} characters")
    try:
        blob = base64.b64decode(coded, validate=True)
    except ValueError:
        raise DataError(f"{where}: precompiled_charsmap is not base64") from None
    trie = int.from_bytes(blob[:4], "little")
    if len(blob) < 4 or trie % 4 or trie > len(blob) - 4:
        raise DataError(f"{where}: precompiled_charsmap is damaged")
    replacements = blob[4 + trie :]
    if max(map(len, replacements.split(b"\0"))) > _LONGEST_MAPPED or (replacements and replacements[-1:] != b"\0"):
        raise DataError(f"{where}: precompiled_charsmap has a replacement of over {_LONGEST_MAPPED} bytes")

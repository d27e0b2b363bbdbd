"""The three kinds of tokenizer folder, opened as one: a ``tokenizers`` pipeline and the special tokens it declares."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from tokenizer.errors import DataError

logger = logging.getLogger(__name__)

NEVER_IN_TEXT = -1e4
"""Unigram score of a piece that stands for no text: below any sequence of pieces that spells its name."""

# cls and sep come last: where both are declared, they are what stands around a text
_DECLARED = (
    ("bos_token", "bos"),
    ("eos_token", "eos"),
    ("cls_token", "bos"),
    ("sep_token", "eos"),
    ("pad_token", "pad"),
    ("unk_token", "unk"),
    ("mask_token", "mask"),
)


@dataclass(frozen=True)
class Opened:
    """A tokenizer folder as read, before its special tokens are resolved."""

    tokenizer: Tokenizer
    declared: dict[str, str]
    model_max_length: int


def open_folder(path: Path) -> Opened:
    """Open a tokenizer folder of any of the three kinds.

    Raises:
        DataError: there is no such folder, no tokenizer in it, or a file of it is damaged.
    """
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; a tokenizer is a folder, `capt tokenizer train` makes one")
    config = {
        key: value
        for name in ("special_tokens_map.json", "tokenizer_config.json")
        for key, value in _json(path / name).items()
        if value is not None
    }
    try:
        if (path / "tokenizer.json").is_file():
            tokenizer = _from_tokenizer_json(path / "tokenizer.json")
        elif (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            tokenizer = _byte_level_bpe(path, config)
        elif (path / "vocab.txt").is_file():
            tokenizer = _word_piece(path / "vocab.txt", config)
        else:
            raise DataError(f"{path}: {_what_is_missing(path)}")
    except DataError:
        raise
    except Exception as error:  # the Rust library raises bare Exception for whatever is wrong in a file
        raise DataError(f"{path}: damaged tokenizer ({error})") from error
    declared = {role: name for key, role in _DECLARED if (name := _content(config.get(key))) is not None}
    longest = config.get("model_max_length", 512)
    # transformers writes 1e30 for "no limit"
    return Opened(tokenizer, declared, int(longest) if longest < 1_000_000_000 else 512)


def _from_tokenizer_json(path: Path) -> Tokenizer:
    spec = json.loads(path.read_text(encoding="utf-8"))
    spec["truncation"] = spec["padding"] = None  # sentence encoders carry theirs; lengths are the caller's business
    if spec["model"]["type"] == "Unigram":
        vocabulary = spec["model"]["vocab"]
        for token in spec["added_tokens"]:
            if token["special"] and token["id"] < len(vocabulary) and vocabulary[token["id"]][0] == token["content"]:
                vocabulary[token["id"]][1] = NEVER_IN_TEXT
    return Tokenizer.from_str(json.dumps(spec))


def _byte_level_bpe(path: Path, config: dict[str, Any]) -> Tokenizer:
    vocabulary = _json(path / "vocab.json")
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    if not letters <= vocabulary.keys() or any(token.endswith("</w>") for token in vocabulary):
        raise DataError(f"{path}: vocab.json is not a byte-level BPE vocabulary as GPT-2's and RoBERTa's are")
    tokenizer = Tokenizer(models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt")))
    prefix = bool(config.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _word_piece(path: Path, config: dict[str, Any]) -> Tokenizer:
    tokens = path.read_text(encoding="utf-8").splitlines()
    lower_case = config.get("do_lower_case")
    if lower_case is None:
        # an uncased vocabulary has no capitals outside its special tokens
        lower_case = not any(token != token.lower() for token in tokens if not token.startswith("["))
        logger.info("%s: taken as %s", path, "uncased" if lower_case else "cased")
    tokenizer = Tokenizer(models.WordPiece.from_file(str(path), unk_token=_content(config.get("unk_token")) or "[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=lower_case,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _what_is_missing(path: Path) -> str:
    if any(path.glob("*.model")):
        return "a SentencePiece model only; `capt tokenizer export` makes a tokenizer.json of it"
    for has, lacks in (("vocab.json", "merges.txt"), ("merges.txt", "vocab.json")):
        if (path / has).is_file():
            return f"has {has} but no {lacks}"
    return "no tokenizer in it; it needs tokenizer.json, or vocab.json + merges.txt, or vocab.txt"


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: a JSON object was expected, found {type(value).__name__}")
    return value


def _content(token: Any) -> str | None:
    """A special token as configurations write it: its text, or an object with the text under ``content``."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None

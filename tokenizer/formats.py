"""The four kinds of tokenizer folder, opened as one: a ``tokenizers`` pipeline and the special tokens it declares."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pretrain.base.errors import DataError
from pretrain.base.files import file_in, read_json, read_text
from pretrain.base.records import Record, read_record
from tokenizer.bounds import check_ids, check_pipeline, rust_errors
from tokenizer.special import NEVER_IN_TEXT

logger = logging.getLogger(__name__)

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


_DEBERTA = "spm.model"
_CONVERT = "save it as tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"


class _Token(Record):
    content: str


class _Config(Record):
    """What is read of ``tokenizer_config.json`` and ``special_tokens_map.json``; they hold much else."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    model_max_length: Annotated[int | float, Field(ge=1)] | None = None
    add_prefix_space: bool | None = None
    do_lower_case: bool | None = None
    split_by_punct: bool | None = None
    tokenize_chinese_chars: bool | None = None
    strip_accents: bool | None = None


_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", _DEBERTA)
_ADDED = TypeAdapter(dict[str, int])


@dataclass(frozen=True)
class Opened:
    """A tokenizer folder as read, before its special tokens are resolved."""

    tokenizer: Tokenizer
    declared: dict[str, str]
    model_max_length: int


def open_folder(path: Path) -> Opened:
    """Open a tokenizer folder of any of the four kinds.

    Raises:
        DataError: there is no such folder, no tokenizer in it, or a file of it is damaged.
    """
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; a tokenizer is a folder, `capt tokenizer train` makes one")
    config = _read_config(path)
    has = {name: file_in(path, name) is not None for name in _FILES}
    with rust_errors(path, "damaged tokenizer"):
        if has["tokenizer.json"]:
            tokenizer = _from_tokenizer_json(path / "tokenizer.json")
        elif has["vocab.json"] and has["merges.txt"]:
            tokenizer = _byte_level_bpe(path, config)
        elif has["vocab.txt"]:
            tokenizer = _word_piece(path / "vocab.txt", config)
        elif has[_DEBERTA]:
            tokenizer = _sentencepiece_of_deberta(path, config)
        else:
            raise DataError(f"{path}: {_what_is_missing(path)}")
        check_ids(tokenizer, path)
    declared = {role: name for key, role in _DECLARED if (name := _content(getattr(config, key))) is not None}
    longest = config.model_max_length or 512
    # transformers writes 1e30 for "no limit"
    return Opened(tokenizer, declared, int(longest) if longest < 1_000_000_000 else 512)


def _read_config(path: Path) -> _Config:
    """Read what both files declare; a key of the second counts before that of the first."""
    values: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (file := file_in(path, name)) is not None:
            values |= read_record(_Config, file, error=DataError).model_dump(exclude_none=True)
    return _Config.model_validate(values)


def _from_tokenizer_json(path: Path) -> Tokenizer:
    spec = read_json(path)
    if not isinstance(spec, dict):
        raise DataError(f"{path}: a JSON object was expected, found {type(spec).__name__}")
    check_pipeline(spec, path)
    spec["truncation"] = spec["padding"] = None  # sentence encoders carry theirs; lengths are the caller's business
    if spec["model"]["type"] == "Unigram":
        vocabulary = spec["model"]["vocab"]
        for token in spec["added_tokens"]:
            if token["special"] and token["id"] < len(vocabulary) and vocabulary[token["id"]][0] == token["content"]:
                vocabulary[token["id"]][1] = NEVER_IN_TEXT
    return Tokenizer.from_str(json.dumps(spec))


def _byte_level_bpe(path: Path, config: _Config) -> Tokenizer:
    vocabulary = read_json(path / "vocab.json")
    if not isinstance(vocabulary, dict):
        raise DataError(f"{path / 'vocab.json'}: a JSON object was expected, found {type(vocabulary).__name__}")
    read_text(path / "merges.txt")  # for its size and its encoding
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    if not letters <= vocabulary.keys() or any(token.endswith("</w>") for token in vocabulary):
        raise DataError(f"{path}: vocab.json is not a byte-level BPE vocabulary as GPT-2's and RoBERTa's are")
    tokenizer = Tokenizer(models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt")))
    prefix = bool(config.add_prefix_space)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _word_piece(path: Path, config: _Config) -> Tokenizer:
    tokens = read_text(path).splitlines()
    lower_case = config.do_lower_case
    if lower_case is None:
        # an uncased vocabulary has no capitals outside its special tokens
        lower_case = not any(token != token.lower() for token in tokens if not token.startswith("["))
        logger.info("%s: taken as %s", path, "uncased" if lower_case else "cased")
    tokenizer = Tokenizer(models.WordPiece.from_file(str(path), unk_token=_content(config.unk_token) or "[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=config.tokenize_chinese_chars is not False,
        strip_accents=config.strip_accents,
        lowercase=lower_case,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _sentencepiece_of_deberta(path: Path, config: _Config) -> Tokenizer:
    """The tokenizer of DeBERTa-v2 and v3: SentencePiece's ids, and behind them the mask, which its model lacks."""
    from tokenizer.pieces import read_model, to_tokenizer  # SentencePiece, which no other kind needs

    for key in ("do_lower_case", "split_by_punct"):
        if getattr(config, key):
            raise DataError(f"{path}: tokenizer_config.json sets {key}, which {_DEBERTA} alone does not do; {_CONVERT}")
    proto = read_model(path / _DEBERTA)
    tokenizer = to_tokenizer(proto, path / _DEBERTA)
    added = {"[MASK]": len(proto.pieces)}
    if (file := file_in(path, "added_tokens.json")) is not None:
        try:
            added |= _ADDED.validate_python(read_json(file), strict=True)
        except ValidationError:
            raise DataError(f"{file}: expected an object of tokens and their ids") from None
    for token in added:
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True, lstrip=token == "[MASK]")])
    odd = next((token for token, number in added.items() if tokenizer.token_to_id(token) != number), None)
    if odd is not None:
        raise DataError(f"{path}: added_tokens.json gives {odd!r} an id that does not follow {_DEBERTA}; {_CONVERT}")
    return tokenizer


def _what_is_missing(path: Path) -> str:
    models_here = sorted(model.name for model in path.glob("*.model"))
    if models_here == ["sentencepiece.model"]:  # of ours
        return f"a SentencePiece model only; `capt tokenizer export {path} OUT` writes a tokenizer.json, to be put here"
    if models_here:  # their ids are not SentencePiece's own, or their text is changed before
        return f"a SentencePiece model only ({models_here[0]}), to which its class adds what no file says; {_CONVERT}"
    for has, lacks in (("vocab.json", "merges.txt"), ("merges.txt", "vocab.json")):
        if (path / has).is_file():
            return f"has {has} but no {lacks}"
    return "no tokenizer in it; it needs tokenizer.json, or vocab.json + merges.txt, or vocab.txt"


def _content(token: str | _Token | None) -> str | None:
    """The text of a special token, which configurations write as text or as an object with the key ``content``."""
    return token.content if isinstance(token, _Token) else token

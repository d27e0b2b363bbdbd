"""The four kinds of tokenizer folder, opened as one: a ``tokenizers`` pipeline and the special tokens it declares.

Every file and key that changes ids counts as it does for ``AutoTokenizer``, or is refused by name. The lower case of
sentence-transformers, which no file of transformers tells of, counts as it does there.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from capt.pretrain.base.errors import DataError, quoted, shown
from capt.pretrain.base.files import file_in, parse_row, printable, read_bytes, read_json, read_text
from capt.pretrain.base.records import Record, read_record
from capt.tokenizer.classes import (
    BYTE_LEVEL,
    CONVERT,
    OWN_TEMPLATE,
    WORD_PIECE,
    check_ids,
    check_pipeline,
    class_of,
    conform,
    require_class,
    rust_errors,
)
from capt.tokenizer.special import NEVER_IN_TEXT, ROLE_NAMES

logger = logging.getLogger(__name__)

# cls and sep come last: where both are declared, they surround a text
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
_SPECIAL = re.compile(r"[<\[].*[>\]]")
"""A token that is special by its looks, which no merge makes."""
_SENTENCE_CONFIGS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""Names at the star of ``sentence_*_config.json``, in the order in which sentence-transformers looks for them."""


class _Token(Record):
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False


class _Config(Record):
    """Keys that are read of ``tokenizer_config.json`` and ``special_tokens_map.json``; they hold much else."""

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
    keep_accents: bool | None = None
    split_special_tokens: bool | None = None
    padding_side: str | None = None
    truncation_side: str | None = None
    fast_tokenizer_files: list[str] | None = None
    additional_special_tokens: list[str | _Token] | None = None
    extra_special_tokens: list[str | _Token] | dict[str, str | _Token] | None = None
    added_tokens_decoder: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], _Token] | None = None
    control_symbols: list[str] | None = None
    """Written here alone: special tokens without a role that no text holds, such as SentencePiece's."""


_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", _DEBERTA)
_ADDED = TypeAdapter(dict[str, int])


@dataclass(frozen=True)
class Opened:
    """A tokenizer folder as read, before its special tokens are resolved."""

    tokenizer: Tokenizer
    declared: dict[str, str]
    model_max_length: int


@dataclass(frozen=True)
class _Folder:
    """Settings in the files beside the vocabulary.

    Attributes:
        path: the folder.
        config: the keys of ``tokenizer_config.json`` and ``special_tokens_map.json``.
        keys: those that are set, as a mapping.
        kind: the class of transformers; None where ``tokenizer.json`` is taken as it is.
        declared: names of special tokens by role.
        further: special tokens without a role.
        special: those of them that are special from the start, and not looked for in normalised text.
    """

    path: Path
    config: _Config
    keys: dict[str, Any]
    kind: str | None
    declared: dict[str, str]
    further: list[_Token]
    special: list[_Token]

    @cached_property
    def _never_text(self) -> frozenset[str]:
        return frozenset({*self.declared.values(), *ROLE_NAMES, *(self.config.control_symbols or ())})

    def is_text(self, token: str) -> bool:
        """Return whether a special token belongs to the texts themselves, and does not surround, pad or mask them."""
        return not self.config.split_special_tokens and token not in self._never_text


def open_folder(path: Path) -> Opened:
    """Open a tokenizer folder of any of the four kinds.

    Raises:
        DataError: there is no such folder, no tokenizer in it, a file of it is damaged, or a file or key of it asks for
            ids that cannot be given here.
    """
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; a tokenizer is a folder, `capt tokenizer train` makes one")
    folder = _read_folder(path)
    has = {name: file_in(path, name) is not None for name in _FILES}
    with rust_errors(path, "damaged tokenizer"):
        if has["tokenizer.json"]:
            tokenizer = _from_tokenizer_json(path / "tokenizer.json", folder)
        # A folder of BERT's class may hold files of the other kind too; its class reads vocab.txt.
        elif has["vocab.json"] and has["merges.txt"] and not (folder.kind in WORD_PIECE and has["vocab.txt"]):
            tokenizer = _byte_level_bpe(path, folder)
        elif has["vocab.txt"]:
            tokenizer = _word_piece(path / "vocab.txt", folder)
        elif has[_DEBERTA]:
            tokenizer = _sentencepiece_of_deberta(path, folder.config)
        else:
            raise DataError(f"{path}: {_what_is_missing(path)}")
        # Tokens outside the vocabulary come after it, as they have the ids behind it.
        _add_tokens(tokenizer, folder)
        # A step of sentence-transformers, before all others, which AutoTokenizer does not know.
        tokenizer = _lower_cased(tokenizer, path)
        _require_different(tokenizer, path)
        check_ids(tokenizer, path)
    longest = folder.config.model_max_length or 512
    # transformers writes 1e30 for "no limit"
    ids = set(tokenizer.get_vocab(with_added_tokens=True).values())
    if (gap := next((number for number in range(max(ids)) if number not in ids), None)) is not None:
        logger.warning("%s: ids that belong to no token, the first is %d", path, gap)
    return Opened(tokenizer, folder.declared, int(longest) if longest < 1_000_000_000 else 512)


def _read_folder(path: Path) -> _Folder:
    """Read what is declared beside the vocabulary.

    A key of ``special_tokens_map.json`` counts before that of ``tokenizer_config.json``, but not where the latter has
    ``added_tokens_decoder``: such files are of newer releases, which read the former no more.
    """
    first, second = (
        read_record(_Config, file, error=DataError) if (file := file_in(path, name)) is not None else _Config()
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    if first.added_tokens_decoder is not None:
        second = _Config()
    values = first.model_dump(exclude_none=True) | second.model_dump(exclude_none=True)
    config = _Config.model_validate(values)
    for key in ("padding_side", "truncation_side"):
        if getattr(config, key) not in (None, "right"):
            raise DataError(
                f"{path}: {key} is {shown(getattr(config, key))}; texts are padded and cut on the right here"
            )
    if config.fast_tokenizer_files:
        raise DataError(f"{path}: fast_tokenizer_files names other files than tokenizer.json; {CONVERT}")
    kind = class_of(_object(path, "tokenizer_config.json"), _object(path, "config.json"), path)
    declared = {role: name for key, role in _DECLARED if (name := _content(getattr(config, key))) is not None}
    defaults = WORD_PIECE.get(kind or "") or BYTE_LEVEL.get(kind or "") or {}
    return _Folder(path, config, values, kind, {**defaults, **declared}, *_further(first, second, path))


def _further(first: _Config, second: _Config, path: Path) -> tuple[list[_Token], list[_Token]]:
    """Special tokens without a role, of both files, and those that ``tokenizer_config.json`` names.

    Raises:
        DataError: they are given twice and differ, and releases of transformers disagree on which of them count.
    """
    # Older releases write one key, newer ones the other, some both.
    lists: list[list[_Token]]
    if isinstance(first.extra_special_tokens, dict):
        named = [*_listed(first.extra_special_tokens), *_listed(first.additional_special_tokens)]
        lists = [named] if first.extra_special_tokens or first.additional_special_tokens is not None else []
    else:
        both = (first.extra_special_tokens, first.additional_special_tokens)
        lists = [_listed(given) for given in both if given]
        lists = lists or [_listed(given) for given in both if given is not None][:1]
    own = lists[0] if lists else []
    lists += [_listed(given) for given in (second.extra_special_tokens, second.additional_special_tokens) if given]
    for other in lists[1:]:
        if {token.content for token in other} != {token.content for token in lists[0]}:
            given = " and ".join(", ".join(shown(token.content) for token in one[:5]) or "none" for one in lists)
            raise DataError(
                f"{path}: further special tokens are given twice and differ ({given}); releases of transformers "
                f"disagree on which of them count; {CONVERT}"
            )
    return (lists[0] if lists else []), own


def _object(path: Path, name: str) -> dict[str, Any]:
    """A JSON object in the folder; empty where there is no such file."""
    value = read_json(path / name) if file_in(path, name) is not None else {}
    if not isinstance(value, dict):
        raise DataError(f"{path / name}: a JSON object was expected, found {type(value).__name__}")
    return value


def _from_tokenizer_json(path: Path, folder: _Folder) -> Tokenizer:
    spec = _each_key_once(path)
    check_pipeline(spec, path)
    conform(spec, folder.kind, folder.keys, path)
    # The usual template of the class, which is set where there is none.
    own = OWN_TEMPLATE.get(folder.kind or "")
    if own is not None and own == (folder.declared.get("bos") == "[CLS]"):
        spec["post_processor"] = None
    for part, key in (("truncation", "direction"), ("padding", "direction")):
        if str((spec.get(part) or {}).get(key, "Right")) != "Right":
            raise DataError(f"{path}: {part} is on the left; texts are padded and cut on the right here")
    spec["truncation"] = spec["padding"] = None  # sentence encoders carry theirs; lengths are the caller's business
    # A special piece must not be the best segmentation of a text that spells its name.
    if spec["model"]["type"] == "Unigram":
        vocabulary = spec["model"]["vocab"]
        for token in spec["added_tokens"]:
            if token["special"] and token["id"] < len(vocabulary) and vocabulary[token["id"]][0] == token["content"]:
                vocabulary[token["id"]][1] = NEVER_IN_TEXT
    # Without merges a byte-level model gives single bytes for any text, and no error.
    elif spec["model"]["type"] == "BPE" and not spec["model"].get("merges") and not spec["model"].get("ignore_merges"):
        begin, end = (spec["model"].get(key) or "" for key in ("continuing_subword_prefix", "end_of_word_suffix"))
        names = {token["content"] for token in spec["added_tokens"]}
        whole = (token.removeprefix(begin).removesuffix(end) for token in spec["model"]["vocab"] if token not in names)
        if longer := [token for token in whole if len(token) > 1 and not _SPECIAL.fullmatch(token)]:
            raise DataError(
                f"{path}: has no merges, without which no text gets {shown(longer[0])} and {len(longer) - 1:,} other "
                "tokens of model.vocab; fetch the file again"
            )
    # A token of text is found in texts; those with a role are not.
    for token in spec["added_tokens"]:
        if token["special"] and folder.is_text(token["content"]):
            token["special"] = False
    return Tokenizer.from_str(json.dumps(spec))


def _byte_level_bpe(path: Path, folder: _Folder) -> Tokenizer:
    require_class(folder.kind, BYTE_LEVEL, "vocab.json", path)
    vocabulary = _each_key_once(path / "vocab.json")
    lines = read_text(path / "merges.txt").removesuffix("\n").split("\n")
    merges = [line.removesuffix("\r") for line in lines if not line.startswith("#version")]
    # GPT-2's vocabulary has a letter for each of the 256 bytes.
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    if not letters <= vocabulary.keys() or any(token.endswith("</w>") for token in vocabulary):
        raise DataError(f"{path}: vocab.json is not a byte-level BPE vocabulary as GPT-2's and RoBERTa's are")
    made = {"".join(line.split(" ")) for line in merges}
    longer = {token for token in vocabulary if len(token) > 1 and not _SPECIAL.fullmatch(token)}
    # Some tokens that no merge makes are usual; a tenth of them are not.
    if 10 * len(longer - made) > len(longer):
        raise DataError(
            f"{path / 'merges.txt'}: makes {len(longer & made):,} of the {len(longer):,} longer tokens of vocab.json, "
            "and no text would get the others; it is cut off, or of another vocabulary: fetch both files again"
        )
    tokenizer = Tokenizer(models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt")))
    prefix = bool(folder.config.add_prefix_space)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _each_key_once(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ``DataError`` for one with a key twice: of a token with two ids one would be lost."""
    text = read_text(path)
    try:
        vocabulary = parse_row(text)
    except (ValueError, RecursionError) as problem:
        hint = "" if isinstance(problem, json.JSONDecodeError) else "; keep one of them"
        raise DataError(f"{path}: not valid JSON: {printable(str(problem))}{hint}") from None
    if not isinstance(vocabulary, dict):
        raise DataError(f"{path}: a JSON object was expected, found {type(vocabulary).__name__}")
    return vocabulary


def _require_each_once(path: Path, tokens: Sequence[str]) -> None:
    """Refuse a line of ``vocab.txt`` that repeats another one. Empty lines may repeat: no text is encoded as one."""
    lines: dict[str, int] = {}
    for number, token in enumerate(tokens, start=1):
        if token and (first := lines.setdefault(token, number)) != number:
            raise DataError(
                f"{path}, line {number}: the token {shown(token)}, as on line {first}, whose id no text would get; put "
                f"another name on line {first}, such as [unused{first}]"
            )


def _word_piece(path: Path, folder: _Folder) -> Tokenizer:
    require_class(folder.kind, WORD_PIECE, "vocab.txt", path.parent)
    if read_bytes(path).startswith(b"\xef\xbb\xbf"):
        raise DataError(
            f"{path}, line 1: begins with a byte order mark, which would be a part of the first token; remove it: "
            r"sed -i '1s/^\xef\xbb\xbf//' FILE"
        )
    # Only the last line end goes: an empty line is a token of its own, with an id.
    tokens = [line.rstrip() for line in read_text(path).removesuffix("\n").split("\n")]
    _require_each_once(path, tokens)
    config = folder.config
    lower_case = config.do_lower_case
    if lower_case is None and folder.kind is not None:
        lower_case = True  # as its class does
    elif lower_case is None:
        # an uncased vocabulary has no capitals outside its special tokens
        lower_case = not any(token != token.lower() for token in tokens if not token.startswith("["))
        logger.info("%s: taken as %s", path, "uncased" if lower_case else "cased")
    tokenizer = Tokenizer(models.WordPiece.from_file(str(path), unk_token=folder.declared.get("unk", "[UNK]")))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=config.tokenize_chinese_chars is not False,
        strip_accents=config.strip_accents,
        lowercase=lower_case,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _lower_cased(tokenizer: Tokenizer, path: Path) -> Tokenizer:
    """``tokenizer``, after the step that sentence-transformers puts before all others where its file asks for it.

    Without ``modules.json`` that library does not read the file.
    """
    if not any((folder / "modules.json").is_file() for folder in (path, *path.absolute().parents[:2])):
        return tokenizer
    names = (f"sentence_{name}_config.json" for name in _SENTENCE_CONFIGS)
    name = next((name for name in names if file_in(path, name) is not None), None)
    if name is None or not _object(path, name).get("do_lower_case"):
        return tokenizer
    spec = json.loads(tokenizer.to_str())
    first = spec["normalizer"]
    # Put before the steps that are there, whatever they are.
    steps = first["normalizers"] if first is not None and first["type"] == "Sequence" else [first] if first else []
    if any(step["type"] == "Lowercase" for step in steps):
        return tokenizer
    spec["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *steps]}
    return Tokenizer.from_str(json.dumps(spec))


def _sentencepiece_of_deberta(path: Path, config: _Config) -> Tokenizer:
    """The tokenizer of DeBERTa-v2 and v3: SentencePiece's ids, and after them the mask, which its model lacks."""
    from capt.tokenizer.pieces import read_model, to_tokenizer  # SentencePiece, which no other kind needs

    for key in ("do_lower_case", "split_by_punct"):
        if getattr(config, key):
            raise DataError(f"{path}: tokenizer_config.json sets {key}, which {_DEBERTA} alone does not do; {CONVERT}")
    tokenizer = to_tokenizer(read_model(path / _DEBERTA), path / _DEBERTA)
    tokenizer.add_special_tokens([AddedToken("[MASK]", normalized=False, special=True, lstrip=True)])
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, folder: _Folder) -> None:
    """Add the tokens outside the vocabulary, in the order of their ids, and further special ones after them.

    Raises:
        DataError: a token would get another id than its file says.
    """
    config, source = folder.config, "tokenizer_config.json: added_tokens_decoder"
    decoder = config.added_tokens_decoder
    if decoder is not None:
        added = {int(number): token for number, token in decoder.items()}
    else:
        source, numbers = "added_tokens.json", _object(folder.path, "added_tokens.json")
        try:
            ids = _ADDED.validate_python(numbers, strict=True)
        except ValidationError:
            raise DataError(f"{folder.path / source}: expected an object of tokens and their ids") from None
        special = {*folder.declared.values(), *(token.content for token in folder.special)}
        added = {number: _Token(content=token, special=token in special) for token, number in ids.items()}
        if len(added) != len(ids):
            raise DataError(f"{folder.path / source}: two tokens have the same id")
    # A tokenizer numbers added tokens as they come and takes no id: the order decides, and the result is compared.
    before = tokenizer.get_added_tokens_decoder()
    in_order = sorted(added.items())
    new = [token for number, token in in_order if number not in before or before[number].content != token.content]
    _add(tokenizer, new, folder)
    for number, token in in_order:
        known = before.get(number)
        is_same = known is None or known.content != token.content or _flags(known) == _flags(token)
        if not is_same and folder.is_text(token.content):
            raise DataError(
                f"{folder.path}: {source} and tokenizer.json disagree on the flags of {shown(token.content)}"
            )
        if tokenizer.token_to_id(token.content) != number:
            raise DataError(
                f"{folder.path}: {source} gives {shown(token.content)} the id {number}, but it has "
                f"{tokenizer.token_to_id(token.content)}: added tokens follow the vocabulary; {CONVERT}"
            )
    # Behind the tokens with ids, as transformers appends them.
    there = {known.content for known in tokenizer.get_added_tokens_decoder().values()}
    further: dict[str, _Token] = {}
    for token in folder.further:
        if token.content not in there:
            further.setdefault(token.content, token)
    _add(tokenizer, list(further.values()), folder)


def _require_different(tokenizer: Tokenizer, path: Path) -> None:
    """Refuse added tokens that are one text once it is normalised: which of them is found changes from run to run."""
    found: dict[str, str] = {}
    for token in tokenizer.get_added_tokens_decoder().values():
        if tokenizer.normalizer is None or token.special or not token.normalized:
            continue
        other = found.setdefault(tokenizer.normalizer.normalize_str(token.content), token.content)
        if other != token.content:
            raise DataError(
                f"{path}: the added tokens {shown(other)} and {shown(token.content)} are one text after normalisation, "
                "so which of them a text gets is random; remove one"
            )


def _add(tokenizer: Tokenizer, tokens: Sequence[_Token], folder: _Folder) -> None:
    """Add tokens in one call: each makes the search for all of them anew."""

    def made(token: _Token) -> AddedToken:
        special = token.special and not folder.is_text(token.content)
        return AddedToken(**token.model_dump() | {"special": special, "normalized": _is_normalized(token)})

    tokenizer.add_tokens([made(token) for token in tokens])


def _flags(token: AddedToken | _Token) -> tuple[bool, ...]:
    return token.single_word, token.lstrip, token.rstrip, _is_normalized(token)


def _is_normalized(token: AddedToken | _Token) -> bool:
    """Return whether a token is looked for in normalised text; by default special ones are not."""
    return not token.special if token.normalized is None else token.normalized


def _listed(tokens: list[str | _Token] | dict[str, str | _Token] | None) -> list[_Token]:
    """Further special tokens, which newer releases write under names."""
    listed = list(tokens.values()) if isinstance(tokens, dict) else tokens or []
    return [token if isinstance(token, _Token) else _Token(content=token, special=True) for token in listed]


def _what_is_missing(path: Path) -> str:
    models_here = sorted(model.name for model in path.glob("*.model"))
    if models_here == ["sentencepiece.model"]:  # of ours
        return (
            f"a SentencePiece model only; `capt tokenizer export {quoted(path)} OUT` writes a tokenizer.json, "
            "to be put here"
        )
    if models_here:  # their ids are not SentencePiece's own, or their text is changed before
        return f"a SentencePiece model only ({models_here[0]}), to which its class adds what no file says; {CONVERT}"
    for has, lacks in (("vocab.json", "merges.txt"), ("merges.txt", "vocab.json")):
        if (path / has).is_file():
            return f"has {has} but no {lacks}"
    return "no tokenizer in it; it needs tokenizer.json, or vocab.json + merges.txt, or vocab.txt"


def _content(token: str | _Token | None) -> str | None:
    """The text of a special token, which configurations write as text or as an object with the key ``content``."""
    return token.content if isinstance(token, _Token) else token

"""The class of transformers that makes the tokenizer of a folder, and what it adds to the files.

A folder means what ``AutoTokenizer`` takes it for. ``AutoTokenizer`` itself is not used: it imports torch, reads
``config.json`` unguarded and changes from release to release. What a class does is written out here, and what cannot be
done is refused by name.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from capt.pretrain.base.errors import DataError, UserError, shown
from capt.pretrain.base.files import printable
from capt.tokenizer.special import TRAINED

# Limits on what a ``tokenizer.json`` may ask for, and the border to the Rust library that runs it.
#
# The library does what the file says, out of reach of signals: forty replacements of one letter by two are a terabyte.
# So what could grow a text is added up before the file is used.


GROWTH = 64
"""Largest factor by which all replacements of a pipeline together may lengthen a text."""
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
        steps = list(_bounds_steps(spec.get(part), where, part))
        growth = 1.0
        # Steps follow each other, so their factors multiply.
        for step in steps:
            growth *= _growth(step, f"{where}: {part}")
            if growth > GROWTH:
                raise DataError(f"{where}: {part}: makes a text over {GROWTH} times as long")
        if sum(step.get("type") == "ByteLevel" for step in steps) > _BYTE_LEVELS:
            raise DataError(f"{where}: {part}: more than {_BYTE_LEVELS} steps of type ByteLevel")


def check_ids(tokenizer: Tokenizer, where: Path) -> None:
    """Raise ``DataError`` when two tokens have one id, or gaps between the ids would make tables of a hostile size."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"{where}: the vocabulary is empty")
    # Two tokens with one id leave one number fewer than there are tokens.
    tokens = {number: token for token, number in vocabulary.items()}
    if len(tokens) < len(vocabulary):
        number = next(number for token, number in vocabulary.items() if tokens[number] != token)
        names = " and ".join(shown(token) for token in sorted(vocabulary) if vocabulary[token] == number)
        raise DataError(
            f"{where}: the tokens {names} have the same id, {number}; give each token an id of its own, from 0 on and "
            "without gaps, into which appended tokens fall"
        )
    largest = max(vocabulary.values())
    # Some gaps are usual, as of padded vocabularies; a table of ids must not become a thousand times larger.
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
        # A panic of Rust is a BaseException, as an interrupt is, which is raised again.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{where}: {what} ({printable(str(error)) or type(error).__name__})") from error


def _bounds_steps(part: Any, where: Path, name: str) -> Iterator[dict[str, Any]]:
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
            # A list of a million steps is refused at the limit, without being copied.
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
        # A regular expression may match a single character.
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
    # Four bytes say how long the trie is, whose units have four bytes each.
    trie = int.from_bytes(blob[:4], "little")
    if len(blob) < 4 or trie % 4 or trie > len(blob) - 4:
        raise DataError(f"{where}: precompiled_charsmap is damaged")
    replacements = blob[4 + trie :]
    if max(map(len, replacements.split(b"\0"))) > _LONGEST_MAPPED or (replacements and replacements[-1:] != b"\0"):
        raise DataError(f"{where}: precompiled_charsmap has a replacement of over {_LONGEST_MAPPED} bytes")


CONVERT = "save it as tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
_AS_IT_IS = 'tokenizer_class "PreTrainedTokenizerFast" takes the file as it is'

_BERT = {"bos": "[CLS]", "eos": "[SEP]", "pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]"}
_GPT2 = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "unk": "<|endoftext|>"}

WORD_PIECE: dict[str, dict[str, str]] = {
    **dict.fromkeys(
        ("BertTokenizer", "ConvBertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "LayoutLMTokenizer",
         "LxmertTokenizer", "MobileBertTokenizer", "SqueezeBertTokenizer"),
        _BERT,
    ),
    "MPNetTokenizer": {**TRAINED, "unk": "[UNK]"},
}  # fmt: skip
"""Classes that read ``vocab.txt`` as BERT's, and the special tokens that they take where the folder names none."""

BYTE_LEVEL: dict[str, dict[str, str]] = {
    "RobertaTokenizer": TRAINED,
    "LongformerTokenizer": TRAINED,
    "BartTokenizer": TRAINED,
    "GPT2Tokenizer": _GPT2,
}
"""Classes that read ``vocab.json`` and ``merges.txt`` as GPT-2's."""

_DEBERTA = "DebertaV2Tokenizer"
_UNIGRAM = ("AlbertTokenizer", "CamembertTokenizer", _DEBERTA, "XLMRobertaTokenizer")
_PLAIN = ("PreTrainedTokenizer", "TokenizersBackend")
"""Without the ending ``Fast``: classes that take ``tokenizer.json`` as it is."""

OWN_TEMPLATE: dict[str, bool] = {
    **{name: name != "MPNetTokenizer" for name in WORD_PIECE},
    _DEBERTA: True,
    **dict.fromkeys(("RobertaTokenizer", "LongformerTokenizer", "BartTokenizer", "CamembertTokenizer"), False),
    "XLMRobertaTokenizer": False,
}
"""Classes that put special tokens around texts in their own way, whatever ``tokenizer.json`` says: a pair as BERT's
(``[CLS] A [SEP] B [SEP]``), or as RoBERTa's (``<s> A </s> </s> B </s>``)."""

_OF_MODELS = {
    "bert": "BertTokenizer", "distilbert": "BertTokenizer", "electra": "BertTokenizer", "lxmert": "LxmertTokenizer",
    "mpnet": "MPNetTokenizer", "roberta": "RobertaTokenizer", "gpt2": "GPT2Tokenizer",
}  # fmt: skip
"""The class by ``model_type`` of ``config.json``, where no ``tokenizer_class`` is named. Other models come with
tokenizers of any class (an ALBERT with BERT's ``vocab.txt``)."""


def class_of(tokenizer_config: dict[str, Any], model_config: dict[str, Any], where: Path) -> str | None:
    """The class that a folder means, without the ending ``Fast``; None where it takes ``tokenizer.json`` as it is.

    Raises:
        DataError: the class is not named by a text.
    """
    # `tokenizer_class` of either file comes before the `model_type`.
    for config in (tokenizer_config, model_config):
        if (named := config.get("tokenizer_class")) is not None:
            if not isinstance(named, str):
                raise DataError(f"{where}: tokenizer_class is {shown(named)}; a name is expected")
            name = named.removesuffix("Fast")
            return None if name in _PLAIN else name
    kind = model_config.get("model_type")
    return _OF_MODELS.get(kind) if isinstance(kind, str) else None


def require_class(name: str | None, known: dict[str, dict[str, str]], file: str, where: Path) -> None:
    """Raise ``DataError`` where the class of a folder makes something else of ``file`` than the ``known`` ones do."""
    if name is not None and name not in known:
        raise DataError(f"{where}: {shown(name)} makes of {file} what no file says; {CONVERT}")


def conform(spec: dict[str, Any], name: str | None, config: dict[str, Any], where: Path) -> None:
    """Change ``spec``, the content of ``tokenizer.json``, as the class ``name`` does by the keys of ``config``.

    Raises:
        DataError: ids are random, or the class makes another pipeline than the file describes.
    """
    model = spec["model"]
    if model.get("dropout"):
        raise DataError(
            f"{where}: model.dropout is {shown(model['dropout'])}, which makes ids random; set it to null in the file"
        )
    normalizer: Any = spec.get("normalizer")
    before: Any = spec.get("pre_tokenizer")
    # transformers builds the pipeline of these classes anew from the keys, whatever the file says.
    if name in WORD_PIECE:
        usual = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
        fits = _type(normalizer) == "BertNormalizer" and _type(before) == "BertPreTokenizer"
        fits = fits and all(model.get(key, value) == value for key, value in usual.items())
        fits = fits and bool(normalizer.get("clean_text", True))
        if fits:
            normalizer["lowercase"] = config.get("do_lower_case") is not False
            normalizer["handle_chinese_chars"] = config.get("tokenize_chinese_chars") is not False
            normalizer["strip_accents"] = config.get("strip_accents")
    elif name in BYTE_LEVEL:
        fits = normalizer is None and _type(before) == "ByteLevel" and before.get("use_regex", True)
        if fits:
            before["add_prefix_space"] = bool(config.get("add_prefix_space"))
    elif name in _UNIGRAM:
        fits = True
        _require_agreement(normalizer, before, config, where)
    else:
        fits = True
    if not fits:
        raise DataError(f"{where}: {name} makes another pipeline than this file describes; {_AS_IT_IS}")


def _require_agreement(normalizer: Any, before: Any, config: dict[str, Any], where: Path) -> None:
    """Refuse keys that contradict the steps of the file: releases of transformers disagree on which of them counts."""
    steps = [*_steps(normalizer), *_steps(before)]
    types = {_type(step) for step in steps}
    # The older key and the newer one for a space before the text.
    prefixes = {
        step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
        for step in steps
        if _type(step) == "Metaspace"
    }
    does = {
        "do_lower_case": "Lowercase" in types,
        "keep_accents": "StripAccents" not in types,
        "split_by_punct": "Punctuation" in types,
        "add_prefix_space": True in prefixes,
    }
    for key, value in does.items():
        if isinstance(config.get(key), bool) and config[key] is not value:
            raise DataError(
                f"{where}: tokenizer_config.json sets {key} to {str(config[key]).lower()}, and this file does the "
                f"opposite; make them agree, or {_AS_IT_IS}"
            )


def _steps(part: Any) -> list[Any]:
    """The steps of a part of a pipeline, whose bounds `capt.tokenizer.classes.check_pipeline` has checked."""
    if _type(part) != "Sequence":
        return [] if part is None else [part]
    inner: list[Any] = next((part[key] for key in ("normalizers", "pretokenizers") if key in part), [])
    return [step for one in inner for step in _steps(one)]


def _type(step: Any) -> str | None:
    return step.get("type") if isinstance(step, dict) else None

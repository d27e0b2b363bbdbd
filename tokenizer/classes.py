"""The class of transformers that makes the tokenizer of a folder, and what it adds to the files.

A folder means what ``AutoTokenizer`` takes it for. ``AutoTokenizer`` itself is not used: it imports torch, reads
``config.json`` unguarded and changes from release to release. What a class does is written out here, and what cannot be
done is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretrain.base.errors import DataError, shown
from tokenizer.special import TRAINED

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
    """The steps of a part of a pipeline, whose bounds `tokenizer.bounds.check_pipeline` has checked."""
    if _type(part) != "Sequence":
        return [] if part is None else [part]
    inner: list[Any] = next((part[key] for key in ("normalizers", "pretokenizers") if key in part), [])
    return [step for one in inner for step in _steps(one)]


def _type(step: Any) -> str | None:
    return step.get("type") if isinstance(step, dict) else None

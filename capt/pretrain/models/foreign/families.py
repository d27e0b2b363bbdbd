"""The families of encoders that can be fine-tuned, by ``model_type`` of ``config.json``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capt.pretrain.base.errors import CheckpointError, DataError, shown
from capt.pretrain.models.architecture import EncoderConfig, Family, encoder_of_type, model_types
from capt.pretrain.models.hf_folder import read_config, read_json, read_tokenizer_configs, require_fit
from capt.pretrain.models.sentence_folder import encoder_folder
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

FAMILIES: dict[str, Family] = {
    "bert": Family("BertForSequenceClassification", "bert.pooler.dense", "classifier"),
    "electra": Family("ElectraForSequenceClassification", "classifier.dense", "classifier.out_proj", "gelu"),
    "distilbert": Family(
        "DistilBertForSequenceClassification", "pre_classifier", "classifier", "relu", "dropout", "attention_dropout"
    ),
    "albert": Family("AlbertForSequenceClassification", "albert.pooler", "classifier"),
    "mpnet": Family(
        "MPNetForSequenceClassification", "classifier.dense", "classifier.out_proj", counts_from_padding=True
    ),
    "camembert": Family(
        "CamembertForSequenceClassification", "classifier.dense", "classifier.out_proj", counts_from_padding=True
    ),
    "deberta-v2": Family("DebertaV2ForSequenceClassification", "pooler.dense", "classifier", "gelu"),
}
"""Families by ``model_type`` of ``config.json`` that run on transformers' model. Others run on our own encoders."""


def family_of(hf_config: Mapping[str, Any], source: str) -> Family:
    """The family that the keys of a ``config.json`` name.

    Raises:
        CheckpointError: the family is not known here; ``source`` is named.
    """
    kind = hf_config.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    own = encoder_of_type(kind)
    if own is None or own.hf.classifier is None:
        known = [name for name in model_types() if (cls := encoder_of_type(name)) is not None and cls.hf.classifier]
        names = ", ".join(dict.fromkeys([*known, *FAMILIES]))
        raise CheckpointError(f"{source}: model_type is {shown(kind)}; encoders of {names} can be fine-tuned")
    return own.hf.classifier


def require_known(hf_config: Mapping[str, Any], source: str) -> None:
    """Refuse a ``config.json`` of no family that has an encoder here. Raises ``CheckpointError``, naming ``source``."""
    kind = hf_config.get("model_type")
    if kind not in FAMILIES and encoder_of_type(kind) is None:
        names = ", ".join(dict.fromkeys([*model_types(), *FAMILIES]))
        raise CheckpointError(f"{source}: model_type is {shown(kind)}; there are encoders of {names}")


def own_encoder(hf_config: Mapping[str, Any]) -> type[EncoderConfig] | None:
    """Our own encoder for the keys of a ``config.json``; None where the family runs on transformers' model."""
    kind = hf_config.get("model_type")
    return None if kind in FAMILIES else encoder_of_type(kind)


def read_description(folder: Path) -> tuple[dict[str, Any], TextTokenizer]:
    """The keys of ``config.json`` and the tokenizer of an encoder of a known family; no tensor is read.

    Raises:
        CheckpointError: the family is not known, the files are damaged or name code to run, there is no usable
            tokenizer, or model and tokenizer do not fit.
    """
    folder = encoder_folder(folder)
    hf_config = read_json(folder / "config.json")
    require_known(hf_config, str(folder / "config.json"))
    if own_encoder(hf_config) is not None:
        hf_config = read_config(folder)
    read_tokenizer_configs(folder)
    tokenizer = read_tokenizer(folder, folder)
    require_fit(folder, hf_config, tokenizer)
    return hf_config, tokenizer


def read_tokenizer(folder: Path, source: Path) -> TextTokenizer:
    """The tokenizer in ``folder``. Raises ``CheckpointError``, which names ``source``, where it cannot be read."""
    try:
        return load_tokenizer(folder)
    except DataError as error:
        raise CheckpointError(f"{source}: its tokenizer cannot be read: {error}") from None

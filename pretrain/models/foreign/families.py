"""The families of encoders that are known here, by ``model_type`` of ``config.json``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capt.pretrain.base.errors import CheckpointError, DataError, shown
from capt.pretrain.models.hf_folder import read_config, read_json, read_tokenizer_configs
from capt.tokenizer.encode import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class Family:
    """How transformers builds its own sequence classifier of a family, so that ours can become one.

    Attributes:
        architecture: the class of transformers.
        dense: its name for the first layer of the classification head.
        out: its name for the last layer of the head.
        activation: the function between the two.
        dropout: the key of ``config.json`` for dropout of hidden states.
        attention_dropout: the key for dropout of attention weights.
        counts_from_padding: positions begin behind the padding id, as in RoBERTa, so that the first
            ``pad_token_id + 1`` rows of the position table belong to no token.
    """

    architecture: str
    dense: str
    out: str
    activation: str = "tanh"
    dropout: str = "hidden_dropout_prob"
    attention_dropout: str = "attention_probs_dropout_prob"
    counts_from_padding: bool = False


ROBERTA_TYPES = ("roberta", "xlm-roberta")
"""Families that run on our own RoBERTa; the others run on transformers' model."""

_ROBERTA = Family("RobertaForSequenceClassification", "classifier.dense", "classifier.out_proj")

FAMILIES: dict[str, Family] = {
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
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
"""Families by ``model_type`` of ``config.json``."""


def family_of(hf_config: Mapping[str, Any], source: str) -> Family:
    """The family that the keys of a ``config.json`` name.

    Raises:
        CheckpointError: the family is not known here; ``source`` is named.
    """
    kind = hf_config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"{source}: model_type is {shown(kind)}; encoders of {', '.join(FAMILIES)} can be fine-tuned"
        )
    return FAMILIES[kind]


def read_description(folder: Path) -> tuple[dict[str, Any], TextTokenizer]:
    """The keys of ``config.json`` and the tokenizer of an encoder of a known family; no tensor is read.

    Raises:
        CheckpointError: the family is not known, the files are damaged or name code to run, there is no usable
            tokenizer, or model and tokenizer pad with different ids.
    """
    hf_config = read_json(folder / "config.json")
    family_of(hf_config, str(folder / "config.json"))
    if hf_config["model_type"] in ROBERTA_TYPES:
        hf_config = read_config(folder)
    read_tokenizer_configs(folder)
    tokenizer = read_tokenizer(folder, folder)
    pad = hf_config.get("pad_token_id")
    if pad not in (None, tokenizer.special.pad):
        raise CheckpointError(f"{folder}: the model pads with {shown(pad)}, its tokenizer with {tokenizer.special.pad}")
    return hf_config, tokenizer


def read_tokenizer(folder: Path, source: Path) -> TextTokenizer:
    """The tokenizer in ``folder``. Raises ``CheckpointError``, which names ``source``, where it cannot be read."""
    try:
        return load_tokenizer(folder)
    except DataError as error:
        raise CheckpointError(f"{source}: its tokenizer cannot be read: {error}") from None

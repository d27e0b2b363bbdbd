"""Encoders behind one call: the final hidden state of the first token (``<s>``, ``[CLS]``) of each sequence.

RoBERTa and XLM-R run on our encoder, which computes its last layer for that token alone. Any other family that is known
here runs on transformers' model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pretrain.base.errors import CheckpointError, shown
from pretrain.models.config import RobertaConfig
from pretrain.models.roberta import RobertaEncoder, initialise


@dataclass(frozen=True)
class Family:
    """How transformers' own sequence classifier of a family is built, so that ours can become one.

    ``dense`` and ``out`` are its names for the two layers of the head, ``activation`` stands between them;
    ``dropout`` and ``attention_dropout`` are keys of ``config.json``. ``counts_from_padding``: as in RoBERTa, positions
    begin behind the padding id, so that many rows of the position table are not usable.
    """

    architecture: str
    dense: str
    out: str
    activation: str = "tanh"
    dropout: str = "hidden_dropout_prob"
    attention_dropout: str = "attention_probs_dropout_prob"
    counts_from_padding: bool = False


OURS = ("roberta", "xlm-roberta")
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


def family_of(described: Mapping[str, Any], source: str) -> Family:
    """The family that a ``config.json`` belongs to. Raises ``CheckpointError`` for one that is not known here."""
    kind = described.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"{source}: model_type is {shown(kind)}; encoders of {', '.join(FAMILIES)} can be fine-tuned"
        )
    return FAMILIES[kind]


class SentenceEncoder(nn.Module, ABC):
    """What a classifier stands on.

    Attributes:
        hidden: width of the output.
        rows: rows of the word embedding.
        max_positions: the longest sequence, special tokens included.
        reads_types: whether token types (0 for the first text of a pair, 1 for the second) make a difference.
    """

    hidden: int
    rows: int
    max_positions: int
    reads_types = False

    @abstractmethod
    def forward(
        self, tokens: Int[Tensor, "n L"], types: Int[Tensor, "n L"] | None, padded: bool
    ) -> Float[Tensor, "n h"]:
        """Final hidden state of each sequence's first token; ``padded`` says whether any token is padding."""

    @abstractmethod
    def flops(self, length: float) -> float:
        """Forward FLOP of a sequence of ``length`` tokens, a multiply-add being 2."""


class RobertaSentences(SentenceEncoder):
    """Our RoBERTa. Its last layer is computed at ``<s>`` alone, which nothing else of the output would change."""

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden, self.rows, self.max_positions = config.hidden, config.vocab_rows, config.max_positions
        self.model = RobertaEncoder(config)
        initialise(self.model, config.initializer_range)

    def forward(
        self, tokens: Int[Tensor, "n L"], types: Int[Tensor, "n L"] | None, padded: bool
    ) -> Float[Tensor, "n h"]:
        """Final hidden state of ``<s>``; RoBERTa has no token types."""
        first = torch.zeros_like(tokens[:, :1])
        return self.model(tokens, padded=padded, rows=first)[:, 0]  # type: ignore[no-any-return]

    def flops(self, length: float) -> float:
        """Matrix products only; of the last layer the keys and values everywhere, the rest at ``<s>``."""
        config, h = self.config, self.config.hidden
        row = 4 * h * h + 4 * h * config.ffn + 4 * length * h
        return config.layers * length * 4 * h * h + ((config.layers - 1) * length + 1) * row


class TransformersSentences(SentenceEncoder):
    """An encoder of transformers, without its pooler."""

    def __init__(self, model: nn.Module, described: Mapping[str, Any], source: str) -> None:
        super().__init__()
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # type: ignore[assignment]
        self.model = model
        config: Any = model.config
        self.hidden, self.rows = config.hidden_size, config.vocab_size
        self.pad_id = int(described["pad_token_id"])
        unusable = self.pad_id + 1 if family_of(described, source).counts_from_padding else 0
        self.max_positions = config.max_position_embeddings - unusable
        self.reads_types = getattr(config, "type_vocab_size", 0) > 1 and described["model_type"] != "mpnet"
        self._layers = int(config.num_hidden_layers)

    def forward(
        self, tokens: Int[Tensor, "n L"], types: Int[Tensor, "n L"] | None, padded: bool
    ) -> Float[Tensor, "n h"]:
        """Final hidden state of the first token."""
        mask = (tokens != self.pad_id).long() if padded else None
        segments = {"token_type_ids": types} if types is not None and self.reads_types else {}
        out = self.model(input_ids=tokens, attention_mask=mask, **segments)
        return out.last_hidden_state[:, 0]  # type: ignore[no-any-return]

    def flops(self, length: float) -> float:
        """Twice the matrix elements outside the embeddings a token, and the attention's two products."""
        named = self.model.named_parameters()
        matrices = sum(p.numel() for name, p in named if p.ndim > 1 and "embeddings" not in name)
        return length * (2.0 * matrices + 4.0 * self._layers * length * self.hidden)


def build_encoder(
    described: Mapping[str, Any], *, dropout: float, attention_dropout: float, source: str
) -> SentenceEncoder:
    """A freshly initialised encoder as ``described`` (the keys of a ``config.json``), with these dropouts.

    Raises:
        CheckpointError: the family is not known, or keys are missing or impossible; ``source`` is named.
    """
    family = family_of(described, source)
    if described["model_type"] in OURS:
        config = RobertaConfig.from_hf(described, f"{source}: config.json")
        update = {"dropout": dropout, "attention_dropout": attention_dropout}
        return RobertaSentences(config.model_copy(update=update))
    from transformers import AutoConfig, AutoModel

    keys = {**described, family.dropout: dropout, family.attention_dropout: attention_dropout}
    kind = keys.pop("model_type")
    try:
        return TransformersSentences(AutoModel.from_config(AutoConfig.for_model(kind, **keys)), described, source)
    except Exception as error:  # each of its classes raises what it likes for a value that it does not
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{source}: config.json does not describe a {kind} encoder: {text}") from None

"""The row of the registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from capt.pretrain.config.base import PositiveInt
from capt.pretrain.models.architecture import EncoderConfig, Family, HuggingFace
from capt.pretrain.models.config import RobertaConfig

_KEYS = {
    "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "ffn": "intermediate_size",
    "dropout": "hidden_dropout_prob", "attention_dropout": "attention_probs_dropout_prob",
    "segments": "type_vocab_size",
    "layer_norm_eps": "layer_norm_eps", "pad_id": "pad_token_id", "max_positions": "max_position_embeddings",
    "vocab_size": "vocab_size",
}  # fmt: skip
_HEAD = {
    "mlm.dense.*": ("cls.predictions.transform.dense.*",),
    "mlm.norm.*": ("cls.predictions.transform.LayerNorm.*",),
    "mlm.bias": ("cls.predictions.bias",),
}
_ROBERTA = RobertaConfig.hf


class ToyConfig(EncoderConfig):
    """ERNIE 1, which has BERT's form."""

    presets: ClassVar[Mapping[str, Mapping[str, int]]] = {"small": {"layers": 2, "hidden": 32, "heads": 2, "ffn": 48}}
    module: ClassVar[str] = "tests.toy_encoder.encoder:ToyEncoder"
    packs_documents: ClassVar[bool] = False
    decided_by_init: ClassVar[tuple[str, ...]] = (*EncoderConfig.decided_by_init, "segments")
    hf: ClassVar[HuggingFace] = replace(
        _ROBERTA,
        what="toy",
        types=("ernie",),
        masked_lm="ErnieForMaskedLM",
        encoder="ErnieModel",
        prefix="ernie.",
        heads=("cls.",),
        names={ours: tuple(x.replace("roberta.", "ernie.") for x in parts) for ours, parts in _ROBERTA.names.items()}
        | _HEAD,
        tied={
            "cls.predictions.decoder.weight": "ernie.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        unused=_ROBERTA.unused.replace("roberta", "ernie"),
        classifier=Family("ErnieForSequenceClassification", "ernie.pooler.dense", "classifier"),
    )

    arch: str = "toy"
    segments: PositiveInt = Field(2, description="rows of the table of segments")

    @property
    def elements(self) -> int:
        """Tables and matrices."""
        tables = self.vocab_rows + self.max_positions + self.segments
        return self.layers * (4 * self.hidden + 2 * self.ffn) * self.hidden + tables * self.hidden

    def flops(self, length: float, read: float, seen: float | None = None) -> float:
        """Every layer for every position."""
        h = self.hidden
        return self.layers * length * (8 * h * h + 4 * h * self.ffn + 4 * (length if seen is None else seen) * h)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> ToyConfig:
        """Read the keys."""
        return cls(size="custom", **{ours: config[theirs] for ours, theirs in _KEYS.items()})

    def to_hf(self, *, bos_id: int, eos_id: int) -> dict[str, Any]:
        """Write the keys."""
        keys = {theirs: getattr(self, ours) for ours, theirs in _KEYS.items()}
        return {"architectures": ["ErnieForMaskedLM"], "model_type": "ernie", "hidden_act": "gelu", **keys}

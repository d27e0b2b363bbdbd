"""The keys of a Hugging Face ``config.json`` of RoBERTa or XLM-R as a typed record with bounds. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pretrain.base.errors import CheckpointError, shown

_Rate = Annotated[float, Field(ge=0, lt=1)]


class HFConfig(BaseModel):
    """The keys that decide an encoder. Bounds are far above any encoder in use and far below what hangs a machine."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    vocab_size: int = Field(ge=1, le=1 << 24)
    hidden_size: int = Field(ge=1, le=1 << 16)
    num_hidden_layers: int = Field(ge=1, le=1000)
    num_attention_heads: int = Field(ge=1, le=1 << 12)
    intermediate_size: int = Field(ge=1, le=1 << 19)
    max_position_embeddings: int = Field(ge=3, le=1 << 20)
    type_vocab_size: Literal[1]
    pad_token_id: int = Field(ge=0, lt=1 << 20)
    hidden_dropout_prob: _Rate
    attention_probs_dropout_prob: _Rate
    layer_norm_eps: float = Field(gt=0, le=1)
    initializer_range: float = Field(gt=0, le=100)


def list_names(names: Iterable[str]) -> str:
    """The first five ``names`` of tensors for an error message; those of a foreign file may have any length."""
    every = list(names)
    first = [name if name.isprintable() and len(name) <= 100 else shown(name) for name in every[:5]]
    return ", ".join(first) + (f" and {len(every) - 5} more" if len(every) > 5 else "")


def parse_hf_config(config: Mapping[str, Any], source: str) -> HFConfig:
    """Check the mapping ``config``, which was read from ``source``, and return it as a record.

    Raises:
        CheckpointError: a key is missing, of another type or out of bounds; the message names it.
    """
    missing = [key for key in HFConfig.model_fields if key not in config]
    if missing:
        raise CheckpointError(f"{source} has no {', '.join(missing)}; a RoBERTa or XLM-R encoder needs them")
    try:
        parsed = HFConfig.model_validate(dict(config))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        message = first["msg"][0].lower() + first["msg"][1:]
        raise CheckpointError(
            f"{source}: {key} is {shown(config[key])}, which describes no RoBERTa encoder: {message}"
        ) from None
    if parsed.max_position_embeddings <= parsed.pad_token_id + 1:
        raise CheckpointError(f"{source}: max_position_embeddings leaves no position beyond pad_token_id + 1")
    if parsed.pad_token_id >= parsed.vocab_size:
        raise CheckpointError(f"{source}: pad_token_id {parsed.pad_token_id} is outside vocab_size {parsed.vocab_size}")
    if parsed.hidden_size % parsed.num_attention_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads {parsed.num_attention_heads} does not divide "
            f"hidden_size {parsed.hidden_size}"
        )
    return parsed

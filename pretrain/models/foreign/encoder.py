"""A transformers model behind the `Encoder` protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from pretrain.base.errors import ConfigError, DataError
from pretrain.models.encoder import Encoder
from pretrain.models.foreign.families import family_of
from pretrain.models.pooling import take_rows


class TransformersEncoder(Encoder):
    """An encoder of transformers without its pooler. Its parameters have the names that transformers gives them.

    Args:
        model: a bare encoder, such as ``BertModel``.
        hf_config: the keys of its ``config.json``, ``pad_token_id`` among them.
        source: where they come from, for error messages.
    """

    def __init__(self, model: nn.Module, hf_config: Mapping[str, Any], source: str) -> None:
        super().__init__()
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # type: ignore[assignment]
        self._transformers = (model,)  # in a tuple, which torch does not register: the parts are, under their own names
        for name, part in model.named_children():
            self.add_module(name, part)
        config: Any = model.config
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        self.pad_id = int(hf_config["pad_token_id"])
        unused_rows = self.pad_id + 1 if family_of(hf_config, source).counts_from_padding else 0
        self.max_positions = config.max_position_embeddings - unused_rows
        self.reads_types = getattr(config, "type_vocab_size", 0) > 1 and hf_config["model_type"] != "mpnet"
        self._layers = int(config.num_hidden_layers)

    @property
    def model(self) -> Any:
        """The transformers model itself."""
        return self._transformers[0]

    def train(self, mode: bool = True) -> TransformersEncoder:
        """Set training mode, of the transformers model as well."""
        self.model.train(mode)
        return super().train(mode)

    def forward(
        self,
        tokens: Int[Tensor, "b L"],
        types: Int[Tensor, "b L"] | None = None,
        *,
        padded: bool = False,
        documents: Int[Tensor, "b L"] | None = None,
        runs: int | None = None,
        rows: Int[Tensor, "b r"] | None = None,
    ) -> Float[Tensor, "b _ h"]:
        """Final hidden states; see `Encoder.forward`. All positions are computed, whatever ``rows``.

        Raises:
            ConfigError: ``documents`` are given: the masks of transformers' encoders differ by family.
            DataError: the sequence is longer than ``max_positions``.
        """
        if tokens.shape[1] > self.max_positions:
            raise DataError(
                f"a sequence of {tokens.shape[1]} tokens is longer than the encoder's {self.max_positions} positions"
            )
        if documents is not None:
            raise ConfigError(
                f"{type(self.model).__name__} of transformers cannot keep attention inside documents here; "
                "set data.cross_document_attention=true"
            )
        mask = (tokens != self.pad_id).long() if padded else None
        segments = {"token_type_ids": types} if types is not None and self.reads_types else {}
        hidden: Tensor = self.model(input_ids=tokens, attention_mask=mask, **segments).last_hidden_state
        return hidden if rows is None else take_rows(hidden, rows)

    @property
    def word_embedding(self) -> nn.Embedding:
        """The table of token embeddings."""
        return self.model.get_input_embeddings()  # type: ignore[no-any-return]

    def flops(self, length: float, read: float | None = None) -> float:
        """Twice the matrix elements outside the embeddings for each token, and the two products of the attention."""
        named = self.named_parameters()
        matrices = sum(p.numel() for name, p in named if p.ndim > 1 and "embeddings" not in name)
        return length * (2.0 * matrices + 4.0 * self._layers * length * self.hidden_size)

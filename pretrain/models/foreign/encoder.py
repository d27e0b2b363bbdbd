"""A transformers model behind the `Encoder` protocol."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.config import TransformersConfig
from capt.pretrain.models.foreign.families import family_of, own_encoder, require_known
from capt.pretrain.models.foreign.read import PretrainedEncoder
from capt.pretrain.models.heads import take_rows
from capt.pretrain.models.hf_config import list_names


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


class RegisteredEncoder(TransformersEncoder):
    """The encoder that a row of the registry describes, with fresh weights."""

    def __init__(self, config: TransformersConfig) -> None:
        keys = config.to_hf(bos_id=0, eos_id=0)
        super().__init__(_model(keys, f"model.arch {config.arch}"), keys, config.arch)


# An encoder of any known family from the keys of its ``config.json``, and its weights into it.


logger = logging.getLogger(__name__)


def build_encoder(hf_config: Mapping[str, Any], *, dropout: float, attention_dropout: float, source: str) -> Encoder:
    """A freshly initialised encoder: ours for a family that can be pretrained, else transformers' model.

    Args:
        hf_config: the keys of a ``config.json``.
        dropout: probability, of hidden states.
        attention_dropout: probability, of attention weights.
        source: where the keys come from, for error messages.

    Raises:
        CheckpointError: the family is not known, or keys are missing or impossible.
    """
    require_known(hf_config, source)
    if (own := own_encoder(hf_config)) is not None:
        config = own.from_hf(hf_config, f"{source}: config.json")
        encoder = config.model_copy(update={"dropout": dropout, "attention_dropout": attention_dropout}).build_encoder()
        config.initialise(encoder)
        return encoder
    family = family_of(hf_config, source)
    keys = {**hf_config, family.dropout: dropout, family.attention_dropout: attention_dropout}
    return TransformersEncoder(_model(keys, source), hf_config, source)


def _model(hf_config: Mapping[str, Any], source: str) -> nn.Module:
    """The bare model of transformers that the keys of a ``config.json`` describe, freshly initialised."""
    from transformers import AutoConfig, AutoModel

    keys = {key: value for key, value in hf_config.items() if key != "model_type"}
    kind = hf_config["model_type"]
    try:
        return AutoModel.from_config(AutoConfig.for_model(kind, **keys))  # type: ignore[no-any-return]
    except Exception as error:  # each of its classes raises what it likes for a value that it does not
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{source}: config.json does not describe a {kind} encoder: {text}") from None


def load_encoder(
    pretrained: PretrainedEncoder,
    source: str,
    *,
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    allow_missing: bool = False,
) -> Encoder:
    """The encoder with the weights of ``pretrained``, built only once they are known to have the sizes it claims.

    Args:
        pretrained: weights, sizes and tokenizer, as `read_encoder` returns them.
        source: where they were read, for error messages.
        dropout: probability, of hidden states.
        attention_dropout: probability, of attention weights.
        allow_missing: warn of weights that are missing (they stay as initialised) or unknown, instead of refusing.

    Raises:
        CheckpointError: weights are missing, unknown or of another shape, or the tokenizer has more ids than the
            encoder embeds.
    """
    options: dict[str, Any] = {"dropout": dropout, "attention_dropout": attention_dropout, "source": source}
    with torch.device("meta"):
        empty = build_encoder(pretrained.hf_config, **options)
    shapes = {name: tensor.shape for name, tensor in empty.state_dict().items()}
    state = pretrained.state
    _compare(shapes, state, source, allow_missing)
    encoder = build_encoder(pretrained.hf_config, **options)
    encoder.load_state_dict({name: state[name] for name in shapes if name in state}, strict=False)
    ids = pretrained.tokenizer.vocab_size
    if ids > encoder.vocab_size:
        raise CheckpointError(f"{source}: the tokenizer has {ids} ids, the encoder {encoder.vocab_size} rows")
    return encoder


def _compare(shapes: Mapping[str, torch.Size], state: Mapping[str, Tensor], source: str, allow_missing: bool) -> None:
    """Compare the encoder's names and ``shapes`` with the weights in ``state``."""
    unequal = [
        f"{name} is {tuple(state[name].shape)}, not {tuple(shape)}"
        for name, shape in shapes.items()
        if name in state and state[name].shape != shape
    ]
    if unequal:
        raise CheckpointError(f"{source}: config.json and tensors disagree: {list_names(unequal)}")
    differences = {
        "missing": sorted(shapes.keys() - state.keys()),
        "unexpected": sorted(state.keys() - shapes.keys()),
    }
    if not any(differences.values()):
        return
    problem = "; ".join(f"{kind}: {list_names(names)}" for kind, names in differences.items() if names)
    if not allow_missing:
        # no such hint where weights are missing: the model would be trained from random ones in their place
        hint = "" if differences["missing"] else "; model.allow_missing=true leaves them out"
        raise CheckpointError(f"{source}: not the weights of its encoder ({problem}){hint}")
    logger.warning("%s: missing weights stay as initialised, unexpected ones are left out: %s", source, problem)

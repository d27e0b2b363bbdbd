"""An encoder of any known family from the keys of its ``config.json``, and its weights into it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pretrain.base.errors import CheckpointError
from pretrain.models.config import RobertaConfig
from pretrain.models.encoder import Encoder
from pretrain.models.foreign.encoder import TransformersEncoder
from pretrain.models.foreign.families import ROBERTA_TYPES, family_of
from pretrain.models.foreign.read import PretrainedEncoder
from pretrain.models.hf_config import list_names
from pretrain.models.layers import initialise_weights
from pretrain.models.roberta import RobertaEncoder

logger = logging.getLogger(__name__)


def build_encoder(hf_config: Mapping[str, Any], *, dropout: float, attention_dropout: float, source: str) -> Encoder:
    """A freshly initialised encoder: our RoBERTa for RoBERTa and XLM-R, else transformers' model.

    Args:
        hf_config: the keys of a ``config.json``.
        dropout: probability, of hidden states.
        attention_dropout: probability, of attention weights.
        source: where the keys come from, for error messages.

    Raises:
        CheckpointError: the family is not known, or keys are missing or impossible.
    """
    family = family_of(hf_config, source)
    if hf_config["model_type"] in ROBERTA_TYPES:
        config = RobertaConfig.from_hf(hf_config, f"{source}: config.json")
        encoder = RobertaEncoder(config.model_copy(update={"dropout": dropout, "attention_dropout": attention_dropout}))
        initialise_weights(encoder, config.initializer_range)
        return encoder
    from transformers import AutoConfig, AutoModel

    keys = {**hf_config, family.dropout: dropout, family.attention_dropout: attention_dropout}
    kind = keys.pop("model_type")
    try:
        return TransformersEncoder(AutoModel.from_config(AutoConfig.for_model(kind, **keys)), hf_config, source)
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

"""Build a `CaptModel` from weights of any origin; everything that does not fit is listed in the error."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pretrain.base.errors import CheckpointError
from pretrain.models.capt import CaptModel
from pretrain.models.config import RobertaConfig
from pretrain.models.hf_map import HEAD, TIED
from pretrain.models.vocabulary import with_rows


def build_model(state: Mapping[str, Tensor], config: RobertaConfig, source: str) -> CaptModel:
    """Our model in evaluation mode with the weights ``state``; with an aggregation head if ``state`` has one.

    Rows that padded the vocabulary (``pad_vocab_to``) are left out.

    Raises:
        CheckpointError: as :func:`load_weights` does.
    """
    plain = config.model_copy(update={"compile": False, "activation_checkpointing": "none"})
    model = CaptModel(plain, contrast=any(name.startswith(HEAD) for name in state))
    load_weights(model, state, source)
    return unpadded(model).eval()


def unpadded(model: CaptModel) -> CaptModel:
    """``model`` without the rows that ``pad_vocab_to`` added: the same function of the same ids."""
    config = model.config
    if config.vocab_rows == config.classes:
        return model
    plain = CaptModel(config.model_copy(update={"pad_vocab_to": 1}), contrast=model.aggregation is not None)
    plain.to(model.mlm.bias).load_state_dict(with_rows(model.state_dict(), config.classes))
    return plain.train(model.training)


def load_weights(model: CaptModel, state: Mapping[str, Tensor], source: str) -> None:
    """Copy ``state`` into ``model``.

    Raises:
        CheckpointError: names are missing or unknown, shapes differ, or tied tensors are not equal. All are listed;
            ``source`` says where the weights came from.
    """
    expected = model.state_dict()
    problems = [f"{name} is missing" for name in sorted(expected.keys() - TIED.keys() - state.keys())]
    problems += [f"{name} is unknown" for name in sorted(state.keys() - expected.keys())]
    problems += [
        f"{name} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    problems += [
        f"{name} differs from {other}, of which it is a second name"
        for name, other in TIED.items()
        if name in state and other in state and not torch.equal(state[name], state[other])
    ]
    if problems:
        raise CheckpointError(f"{source}: not the weights of this model: {'; '.join(problems)}")
    model.load_state_dict(dict(state), strict=False)

"""Put weights of any origin into an `LxmertModel`; everything that does not fit is listed in the error."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from pretrain.base.errors import CheckpointError
from pretrain.models.lxmert.config import LxmertConfig
from pretrain.models.lxmert.model import LxmertModel
from pretrain.models.lxmert.names import AGGREGATION, TIED
from pretrain.models.lxmert.read import PretrainedLxmert

logger = logging.getLogger(__name__)

HEADS = ("mlm.", "matching.", "region_heads.", "answer_head.", AGGREGATION)
"""Prefixes of the parts that a pretrained model may lack, so that they start from random weights."""


def build_model(state: Mapping[str, Tensor], config: LxmertConfig, source: str) -> LxmertModel:
    """Our model in evaluation mode with the weights ``state``; with an aggregation head if ``state`` has one.

    Raises:
        CheckpointError: as `load_weights` does.
    """
    plain = config.model_copy(update={"activation_checkpointing": "none"})
    model = LxmertModel(plain, contrast=any(name.startswith(AGGREGATION) for name in state))
    load_weights(model, state, source)
    return model.eval()


def load_weights(model: LxmertModel, state: Mapping[str, Tensor], source: str) -> None:
    """Copy ``state`` into ``model``, every parameter of it.

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
        listed = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"{source}: not the weights of this model: {listed}")
    model.load_state_dict(dict(state), strict=False)


def start_from(model: LxmertModel, pretrained: PretrainedLxmert, source: str) -> None:
    """Copy what ``pretrained``, read from ``source``, has into ``model``. The encoder and the pooler must be whole.

    Heads that it lacks, or that have other classes (objects, attributes and answers are classes of some data), stay
    as they were initialised; the log names them. Heads for which ``model`` has no place are left out.

    Raises:
        CheckpointError: a tensor of the encoder or of the pooler is missing or has another shape.
    """
    own = model.state_dict()
    state = {name: tensor for name, tensor in pretrained.state.items() if name in own or not name.startswith(HEADS)}
    fresh = set()
    for name, tensor in own.items():
        if name in TIED or not name.startswith(HEADS):
            continue
        if name not in state or state[name].shape != tensor.shape:
            state[name] = tensor
            fresh.add(name.rsplit(".", 1)[0])
    load_weights(model, state, source)
    if fresh:
        logger.warning("%s: heads that start from random weights: %s", source, ", ".join(sorted(fresh)))

"""An ONNX graph of the encoder with pooling, aggregation head and L2 norm, checked with onnxruntime.

Our own export: ``optimum``'s does not install beside the transformers release that this project uses.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.export import Dim

from pretrain.convert.huggingface import write_description
from pretrain.convert.output import new_folder
from pretrain.convert.reference import (
    Pooling,
    build_model,
    embed,
    probe_batches,
    require_close,
    require_pooling,
)
from pretrain.models.capt import CaptModel
from pretrain.models.config import RobertaConfig
from tokenizer.encode import TextTokenizer
from tokenizer.errors import ConfigError

logger = logging.getLogger(__name__)

_NEEDED = ("onnx", "onnxscript", "onnxruntime")
_OPSET = 20  # the first with Gelu as one operator; read by onnxruntime 1.17 (2024) and later
_OUTPUTS = ("sentence_embedding", "last_hidden_state")


class _Embedder(nn.Module):
    """What the graph computes: unit sentence rows, and the hidden state of every token."""

    def __init__(self, model: CaptModel, pooling: Pooling) -> None:
        super().__init__()
        self.model = model
        self.pooling: Pooling = pooling

    def forward(
        self, input_ids: Int[Tensor, "n L"], attention_mask: Int[Tensor, "n L"]
    ) -> tuple[Float[Tensor, "n h"], Float[Tensor, "n L h"]]:
        tokens = torch.where(attention_mask.bool(), input_ids, self.model.config.pad_id)
        return embed(self.model, tokens, self.pooling), self.model.encode(tokens, padded=True)

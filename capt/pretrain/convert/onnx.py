"""ONNX graphs, checked with onnxruntime: of the encoder with pooling, aggregation head and L2 norm, and of others.

Our own export: ``optimum``'s does not install beside the transformers release that this project uses.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.export import Dim

from capt.pretrain.base.errors import ConfigError, how_to_install
from capt.pretrain.convert.huggingface import write_description
from capt.pretrain.convert.reference import Pooling, card_inputs, embed, pool, probe_batches, require_close
from capt.pretrain.models.capt import CaptModel
from capt.tokenizer.encode import TextTokenizer

_NEEDED = ("onnx", "onnxscript", "onnxruntime")
_INPUTS = ("input_ids", "attention_mask")
_OUTPUTS = ("sentence_embedding", "last_hidden_state")
GRAPH = "model.onnx"


class _Embedder(nn.Module):
    """The graph: unit sentence rows, and the hidden state of every token."""

    def __init__(self, model: CaptModel, pooling: Pooling) -> None:
        super().__init__()
        self.model = model
        self.pooling: Pooling = pooling

    def forward(
        self, input_ids: Int[Tensor, "n L"], attention_mask: Int[Tensor, "n L"]
    ) -> tuple[Float[Tensor, "n h"], Float[Tensor, "n L h"]]:
        config = self.model.config
        tokens = torch.where(attention_mask.bool(), input_ids, config.pad_id)
        seen, empty = real_tokens(input_ids, attention_mask, config.pad_id, config.classes)
        hidden = self.model.encode(seen, padded=True)
        # A row of nothing but padding has the sentence embedding zero.
        return pool(self.model, hidden, tokens, self.pooling).masked_fill(empty, 0.0), hidden


def real_tokens(
    input_ids: Int[Tensor, "n L"], attention_mask: Int[Tensor, "n L"], pad: int, rows: int
) -> tuple[Int[Tensor, "n L"], Bool[Tensor, "n 1"]]:
    """Return the ids with padding where the mask is 0, and the rows that are nothing but padding.

    A graph's softmax over nothing is NaN. So such a row is computed as one other token of the ``rows`` there are.
    """
    real = attention_mask.bool()
    tokens = torch.where(real, input_ids, pad)
    empty = ~real.any(1, keepdim=True)
    first = torch.where(empty, (pad + 1) % rows, tokens[:, :1])
    return torch.cat([first, tokens[:, 1:]], 1), empty


def write_onnx(model: CaptModel, tokenizer: TextTokenizer, folder: Path, pooling: Pooling, max_length: int) -> None:
    """Write ``model.onnx`` with the tokenizer and the configuration into ``folder``.

    Inputs ``input_ids`` and ``attention_mask``, int64 (batch, sequence), both axes dynamic. Outputs
    ``sentence_embedding``, unit rows (batch, hidden), and ``last_hidden_state`` (batch, sequence, hidden), fp32. Where
    the whole mask of a row is 0, its sentence embedding is 0.
    """
    write_description(model.config, tokenizer, folder, max_length=max_length)
    config = model.config
    write_graph(_Embedder(model, pooling), folder, _INPUTS, _OUTPUTS, config.max_positions, config.pad_id)


def write_graph(
    graph: nn.Module, folder: Path, inputs: Sequence[str], outputs: Sequence[str], max_positions: int, pad_id: int
) -> None:
    """Write ``model.onnx`` of a module.

    Args:
        graph: takes the inputs in their order.
        folder: gets the file.
        inputs: names: ids, their mask and, where the encoder reads them, token types; each (batch, sequence).
        outputs: names, in the order of the results.
        max_positions: tokens of a row at most.
        pad_id: the id of padding.
    """
    # Two rows of some tokens, for a size of 1 would become a constant of the graph.
    ids = torch.full((2, min(7, max_positions)), pad_id + 1)
    shape = {0: Dim("batch"), 1: Dim("sequence", max=max_positions)}
    with _quiet_exporter():
        program = torch.onnx.export(
            graph.eval(),
            (ids, torch.ones_like(ids), torch.zeros_like(ids))[: len(inputs)],
            dynamo=True,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=(shape,) * len(inputs),
            verbose=False,
        )
        assert program is not None, "the dynamo exporter returns the program"
        program.save(folder / GRAPH)


def open_graph(folder: Path, name: str = GRAPH) -> Any:
    """Open a graph in a folder with onnxruntime, on the CPU."""
    import onnxruntime

    return onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"])


def require_packages() -> None:
    """Raise ``ConfigError`` when a package of the extra ``onnx`` is missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the ONNX export needs {', '.join(missing)}: {how_to_install('onnx')}")


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence the exporter, which reports deprecations in its own code, and every constant that it folds."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx._internal.exporter", "onnx_ir", "onnxscript")]
    # The levels are put back, for the process may log later.
    levels = [log.level for log in loggers]
    for log in loggers:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(loggers, levels, strict=True):
            log.setLevel(level)


@torch.no_grad()
def check_onnx(model: CaptModel, tokenizer: TextTokenizer, folder: Path, pooling: Pooling, max_length: int) -> float:
    """Run the graph on batches of several shapes, padded too; return the largest relative difference from ours.

    Raises:
        CheckpointError: an output differs.
    """
    session, worst = open_graph(folder), 0.0
    for tokens in probe_batches(model.config, tokenizer):
        real = (tokens != model.config.pad_id).long()
        sentences, hidden = session.run(_OUTPUTS, dict(zip(_INPUTS, (tokens.numpy(), real.numpy()), strict=True)))
        ours = embed(model, tokens, pooling)
        worst = max(worst, require_close("ONNX export, sentence_embedding", ours, sentences))
        # At padding the hidden state means nothing, and nothing reads it.
        keep = real.bool()
        ours = model.encode(tokens, padded=True)[keep]
        worst = max(worst, require_close("ONNX export, last_hidden_state", ours, hidden[keep.numpy()]))
    for given in card_inputs(folder):
        (sentences,) = session.run(_OUTPUTS[:1], {name: values.numpy() for name, values in given.items()})
        ours = embed(model, given["input_ids"], pooling)
        worst = max(worst, require_close("ONNX export, what its tokenizer gives", ours, sentences))
    return worst

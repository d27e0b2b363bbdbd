"""A graph in int8 beside the one in float: onnxruntime's dynamic quantization, with what it costs and gains.

Weights of matrix products are integers of seven bits, one scale for each column, and activations are quantized when
they are known. Seven bits, for the products of processors without VNNI add two of eight in 16 bits, and saturate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.convert.onnx import GRAPH, open_graph
from capt.pretrain.convert.reference import SPREAD, TEXTS
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)

INT8_GRAPH = "model_int8.onnx"
_LEAST_RANK = 4.0
"""Effective rank that vectors of different texts have at least; a quarter of the columns, where these are few."""
_FLAT = 0.1
"""Effective rank, as a share of the texts, below which int8 is known to cost much (e5's vectors)."""
_SECONDS = 0.5
"""Seconds of each of the two measurements of speed, at least, after a first pass."""
Rows = Float[np.ndarray, "n d"]


def least_rank(columns: int) -> float:
    """The least effective rank of vectors that have not collapsed."""
    return min(_LEAST_RANK, columns / 4)


@dataclass(frozen=True)
class VectorSpread:
    """The spread of vectors of texts that differ.

    Attributes:
        rank: effective rank (Roy and Vetterli 2007), as RankMe takes it.
        uniformity: of Wang and Isola (2020).
        distance: mean squared distance of two unit rows.
        unused: columns that are the same for every text.
    """

    rank: float
    uniformity: float
    distance: float
    unused: int

    @classmethod
    def of(cls, rows: Rows) -> VectorSpread:
        """Measure vectors of any length."""
        wide = rows.astype(np.float64)
        unit = wide / np.linalg.norm(wide, axis=1, keepdims=True).clip(1e-12)
        centred = unit - unit.mean(0)
        values = np.linalg.svd(centred, compute_uv=False)
        shares = values / max(values.sum(), 1e-300)
        rank = float(np.exp(-(shares * np.log(shares.clip(1e-300))).sum()))
        distances = 2 - 2 * (unit @ unit.T)[np.triu_indices(len(unit), 1)]
        uniformity = float(np.log(np.exp(-2 * distances).mean()))
        return cls(rank, uniformity, float(2 * (values**2).sum() / len(unit)), int((centred.std(0) < 1e-7).sum()))


def is_int8(quantize: str | None, to: str) -> bool:
    """Return whether an export to ``to`` has a graph in int8 as well. Raises ``ConfigError``: it cannot."""
    if quantize not in (None, "int8"):
        raise ConfigError(f"--quantize {quantize!r} is unknown; valid: int8")
    if quantize is not None and to != "onnx":
        raise ConfigError(f"--quantize {quantize} has no meaning with --to {to}: it is of --to onnx")
    return quantize is not None


def quantize_graph(folder: Path) -> None:
    """Write ``model_int8.onnx`` beside the graph of ``folder``."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(folder / GRAPH)
    # It transposes the matrices of linear maps, and then finds the shapes that the exporter has noted of them wrong.
    del model.graph.value_info[:]
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it advises other steps before it
    try:
        quantize_dynamic(
            model, folder / INT8_GRAPH, op_types_to_quantize=["MatMul"], per_channel=True, reduce_range=True,
            weight_type=QuantType.QInt8,
        )  # fmt: skip
    finally:
        root.setLevel(level)


def compare_graphs(folder: Path, tokenizer: TextTokenizer, pad: int, max_length: int) -> str:
    """Say what the vectors of the graph in int8 have lost, how fast both are, and whether the vectors have collapsed.

    Measured on the texts of `SPREAD` and `TEXTS`, in one process on the cores it has.
    """
    texts = [*SPREAD, *TEXTS]
    ids = tokenizer.encode_framed(texts, max_length)
    tokens = np.full((len(ids), max(map(len, ids))), pad, dtype=np.int64)
    for row, each in zip(tokens, ids, strict=True):
        row[: len(each)] = each
    given = {"input_ids": tokens, "attention_mask": (tokens != pad).astype(np.int64)}
    vectors, cost = _both(folder, given, "sentence_embedding")
    cosines = (vectors[0] * vectors[1]).sum(1)
    float_near, int8_near = (_nearest(each) for each in vectors)
    spread = VectorSpread.of(vectors[0][: len(SPREAD)])
    kept = float((float_near == int8_near).mean())
    text = (
        f"int8: cosine with the vector in float {cosines.mean():.4f} in the mean and {cosines.min():.4f} at least, the "
        f"nearest of {len(texts)} texts is the same for {kept:.0%}; {cost}"
    )
    if spread.rank < max(least_rank(vectors[0].shape[1]), _FLAT * len(SPREAD)):
        text += (
            f"; note: the vectors lie in few directions (effective rank {spread.rank:.1f}, uniformity "
            f"{spread.uniformity:.2f}), which int8 cannot tell apart well: measure retrieval before it is used"
        )
    return text


def compare_logits(folder: Path, given: Mapping[str, np.ndarray], kind: Literal["class", "labels", "order"]) -> str:
    """Say what the logits of the graph in int8 have lost, and how fast both are.

    Args:
        folder: with both graphs.
        given: the inputs of the graph for some texts, or pairs of texts.
        kind: what is made of the logits: the largest one is a class, each above 0 is a label, or they order texts.
    """
    logits, cost = _both(folder, given, "logits")
    apart = np.abs(logits[0] - logits[1])
    if kind == "class":
        same, what = logits[0].argmax(1) == logits[1].argmax(1), "the class is the same for"
    elif kind == "labels":
        same, what = (logits[0] > 0) == (logits[1] > 0), "a label is the same for"
    else:
        first, second = np.triu_indices(len(apart), 1)
        ours, theirs = (each[first] > each[second] for each in logits)
        same, what = ours == theirs, "the order of two is the same for"
    return (
        f"int8: logits differ by {apart.mean():.4f} in the mean and {apart.max():.4f} at most (from text to text by "
        f"{logits[0].std(0).mean():.4f}); {what} {same.mean():.0%}; {cost}"
    )


def _both(folder: Path, given: Mapping[str, np.ndarray], output: str) -> tuple[list[Rows], str]:
    """The outputs of the graphs in float and in int8 for the same input, and texts a second and megabytes of both."""
    found, rates, sizes = [], [], []
    for name in (GRAPH, INT8_GRAPH):
        rows, rate = _timed(open_graph(folder, name), given, output)
        found.append(rows)
        rates.append(rate)
        sizes.append(sum(path.stat().st_size for path in folder.glob(f"{name}*")))
    return found, (
        f"{rates[1]:,.0f} texts a second for {rates[0]:,.0f} (x {rates[1] / rates[0]:.2f}); {sizes[1] / 1e6:,.1f} MB "
        f"for {sizes[0] / 1e6:,.1f}"
    )


def _timed(session: Any, inputs: Mapping[str, np.ndarray], output: str) -> tuple[Rows, float]:
    """An output of a graph, and texts a second."""
    (rows,), passes = session.run([output], inputs), 0
    begin = time.monotonic()
    while time.monotonic() - begin < _SECONDS:
        session.run([output], inputs)
        passes += 1
    return rows, passes * len(rows) / (time.monotonic() - begin)


def _nearest(rows: Rows) -> np.ndarray:
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -np.inf)
    nearest: np.ndarray = cosines.argmax(1)
    return nearest

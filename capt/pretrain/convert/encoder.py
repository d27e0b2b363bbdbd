"""An encoder as a folder of Hugging Face, sentence-transformers or ONNX, compared with our model before it is there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from capt.pretrain.convert.huggingface import check_hf, write_hf
from capt.pretrain.convert.onnx import check_onnx, require_packages, write_onnx
from capt.pretrain.convert.output import write_export
from capt.pretrain.convert.quantized import compare_graphs, quantize_graph
from capt.pretrain.convert.reference import Pooling, require_pooling
from capt.pretrain.convert.sentence_transformers import check_sentence_transformers, write_sentence_transformers
from capt.pretrain.models.architecture import EncoderConfig
from capt.pretrain.models.capt import CaptModel, build_model
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)

Form = Literal["hf", "sentence-transformers", "onnx"]
Write = Callable[[CaptModel, TextTokenizer, Path, Pooling, int], None]
Check = Callable[[CaptModel, TextTokenizer, Path, Pooling, int], float]

_FORMS: dict[Form, tuple[Write, Check, str]] = {
    "hf": (write_hf, check_hf, "transformers gives our logits"),
    "sentence-transformers": (
        write_sentence_transformers, check_sentence_transformers, "sentence-transformers gives our embeddings",
    ),
    "onnx": (write_onnx, check_onnx, "onnxruntime gives our outputs"),
}  # fmt: skip
"""Each form's writer, its check, which returns the largest relative difference, and what that compares."""


def export_encoder(
    form: Form,
    state: Mapping[str, Tensor],
    config: EncoderConfig,
    tokenizer: TextTokenizer,
    out: Path,
    card: str,
    *,
    pooling: Pooling = "head",
    max_length: int | None = None,
    check: bool = True,
    overwrite: bool = False,
    beside: Callable[[Path], None] | None = None,
    int8: bool = False,
) -> Path:
    """Write ``out``, load it with the tool that it is for, and compare what it gives with ours; returns ``out``.

    ``hf`` is a masked-language model of transformers, with the aggregation head in a file of its own. The vectors of
    the others are ``head``, CAPT's s(x) of Eq. 1, or ``cls`` or ``mean``, the normalised output without the head.

    Args:
        form: the kind of folder.
        state: weights of a `CaptModel`.
        config: its configuration, vocabulary filled in.
        tokenizer: its tokenizer.
        out: the folder to make.
        card: text of ``README.md``.
        pooling: the sentence vectors; ``hf`` has none.
        max_length: the tokenizer's limit in ids, special tokens included; without it the number of positions.
        check: False leaves the comparison out.
        overwrite: replace an older export.
        beside: writes further files of the model into the folder.
        int8: of ONNX: also a graph in int8, and a line of the log about it.

    Raises:
        ConfigError: a package that ONNX needs is not installed.
        CheckpointError: the weights are not this model's, it has no head, ``out`` is taken, or the check fails.
        DataError: transformers reads the tokenizer differently. Nothing is left behind in any case.
    """
    if form == "onnx":
        require_packages()
    model = build_model(state, config, str(out))
    if form != "hf":
        require_pooling(model, pooling, str(out))
    write, compare, agrees = _FORMS[form]
    given = pooling, max_length or config.max_positions

    said: list[str] = []

    def write_all(folder: Path) -> None:
        write(model, tokenizer, folder, *given)
        if beside is not None:
            beside(folder)
        if int8:
            quantize_graph(folder)
            said.append(compare_graphs(folder, tokenizer, config.pad_id, given[1]))

    written = write_export(
        out,
        write=write_all,
        check=(lambda folder: compare(model, tokenizer, folder, *given)) if check else None,
        card=card,
        agrees=agrees,
        overwrite=overwrite,
    )
    for line in said:
        logger.info("%s", line)
    return written

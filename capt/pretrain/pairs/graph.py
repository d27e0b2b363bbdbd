"""``capt convert --to onnx`` of a model of vectors: a graph from ids and mask to unit rows, compared with ours."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize

from capt.pretrain.base.files import write_json
from capt.pretrain.convert.card import About
from capt.pretrain.convert.onnx import open_graph, real_tokens, require_packages, write_graph
from capt.pretrain.convert.output import write_export
from capt.pretrain.convert.quantized import compare_graphs, is_int8, quantize_graph
from capt.pretrain.convert.reference import TEXTS, card_inputs, require_close, tokenize
from capt.pretrain.pairs.export import one_limit, pair_card, require_width
from capt.pretrain.pairs.load import LoadedPairModel
from capt.pretrain.pairs.module import PairModule
from capt.pretrain.pairs.texts import PaddedTexts

logger = logging.getLogger(__name__)

_INPUTS, _OUTPUT = ("input_ids", "attention_mask"), "sentence_embedding"
_USE = """\
```python
import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
session = onnxruntime.InferenceSession("PATH/model.onnx")
inputs = tokenizer(["one text", "another text"], padding=True, truncation=True, return_tensors="np")  # its prompt first
inputs = {name: inputs[name].astype("int64") for name in ("input_ids", "attention_mask")}
rows = session.run(["sentence_embedding"], inputs)[0]
print(rows @ rows.T)  # unit rows: a dot product is a cosine
```"""


class _Vectors(nn.Module):
    """The graph: unit rows, cut to some first columns; zeros for a row that is nothing but padding."""

    def __init__(self, model: PairModule, columns: int | None) -> None:
        super().__init__()
        self.model, self._columns = model, columns

    def forward(self, input_ids: Int[Tensor, "n L"], attention_mask: Int[Tensor, "n L"]) -> Float[Tensor, "n d"]:
        encoder = self.model.encoder.model
        tokens, empty = real_tokens(input_ids, attention_mask, encoder.pad_id, encoder.vocab_size)
        rows = normalize(self.model.embed(PaddedTexts(tokens, True))[:, : self._columns], dim=1)
        return rows.masked_fill(empty, 0.0)


def onnx(
    trained: LoadedPairModel,
    out: Path,
    *,
    source: str | None,
    truncate_dim: int | None,
    quantize: str | None,
    overwrite: bool,
    about: About | None,
) -> Path:
    """Write a model of vectors as the ONNX folder ``out``; see `capt.pretrain.pairs.export.command`."""
    int8 = is_int8(quantize, "onnx")
    require_packages()
    require_width(trained, truncate_dim)
    prompts, *lengths = trained.reading(source)
    graph, encoder = _Vectors(trained.model.cpu().eval(), truncate_dim), trained.model.encoder.model
    length = one_limit(*lengths)
    said: list[str] = []

    def write(folder: Path) -> None:
        write_json(folder / "config.json", trained.job.model.encoder)
        write_graph(graph, folder, _INPUTS, (_OUTPUT,), encoder.max_positions, encoder.pad_id)
        trained.tokenizer.save(folder, model_max_length=length, types=False)
        if int8:
            quantize_graph(folder)
            said.append(compare_graphs(folder, trained.tokenizer, encoder.pad_id, length))

    @torch.no_grad()
    def check(folder: Path) -> float:
        session, worst = open_graph(folder), 0.0
        ids = [tokenize(texts, trained.tokenizer, length) for texts in (TEXTS[:1], TEXTS)]
        given = [{"input_ids": each, "attention_mask": (each != encoder.pad_id).long()} for each in ids]
        for inputs in (*given, *card_inputs(folder, pairs=False)):
            (rows,) = session.run([_OUTPUT], {name: values.numpy() for name, values in inputs.items()})
            worst = max(worst, require_close("ONNX export, sentence_embedding", graph(**inputs), rows))
        return worst

    named = {"query": prompts.query, "document": prompts.document}
    written = write_export(
        out,
        write=write,
        check=check,
        card=pair_card(trained, about, named, length, truncate_dim, library="onnx", use=_USE),
        agrees="onnxruntime gives our vectors",
        overwrite=overwrite,
    )
    for line in said:
        logger.info("%s", line)
    return written

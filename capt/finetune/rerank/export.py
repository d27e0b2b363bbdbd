"""``capt convert`` of a reranker, to a stock ``...ForSequenceClassification`` folder with one label, or ONNX."""

from __future__ import annotations

from pathlib import Path

from capt.finetune.load import load_fine_tuned
from capt.finetune.rerank.config import RerankJob
from capt.finetune.text_export import LABELS, Presentation, export_classifier
from capt.finetune.text_training import build_classifier
from capt.pretrain.convert.card import About

TARGETS = ("hf", "onnx")

_USE = """\
from sentence_transformers import CrossEncoder

model = CrossEncoder("{location}")
print(model.predict([("the query", "a document"), ("the query", "another document")]))
print(model.rank("the query", ["a document", "another document"]))"""

# The score is the logit: without this key CrossEncoder puts a sigmoid on one label.
_KEYS = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
_RERANKER = Presentation({**LABELS.use, "hf": _USE}, "text-ranking", "sentence-transformers", _KEYS)


def command(
    checkpoint: Path, out: Path, *, to: str, quantize: str | None = None, overwrite: bool = False,
    about: About | None = None,
) -> Path:  # fmt: skip
    """`export_classifier` as ``capt convert`` calls it; ``to`` is one of ``TARGETS``."""
    trained = load_fine_tuned(checkpoint, RerankJob, "rerank", build_classifier)
    return export_classifier(
        trained, out, to=to, quantize=quantize, overwrite=overwrite, about=about, shown_as=_RERANKER
    )

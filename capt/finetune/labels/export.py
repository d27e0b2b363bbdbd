"""``capt convert`` of a checkpoint of a ``labels`` job, to a stock ``...ForSequenceClassification`` folder or ONNX."""

from __future__ import annotations

from pathlib import Path

from capt.finetune.labels.config import LabelsJob
from capt.finetune.load import load_fine_tuned
from capt.finetune.text_export import export_classifier
from capt.finetune.text_training import build_classifier
from capt.pretrain.convert.card import About

TARGETS = ("hf", "onnx")


def command(
    checkpoint: Path, out: Path, *, to: str, quantize: str | None = None, overwrite: bool = False,
    about: About | None = None,
) -> Path:  # fmt: skip
    """`export_classifier` as ``capt convert`` calls it; ``to`` is one of ``TARGETS``."""
    trained = load_fine_tuned(checkpoint, LabelsJob, "labels", build_classifier)
    return export_classifier(trained, out, to=to, quantize=quantize, overwrite=overwrite, about=about)

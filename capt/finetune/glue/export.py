"""``capt convert`` of a checkpoint of a ``glue`` job, to a stock ``...ForSequenceClassification`` folder or ONNX."""

from __future__ import annotations

from pathlib import Path

from capt.finetune.glue.evaluate import GlueClassifier, load_classifier
from capt.finetune.load import FineTuned
from capt.finetune.text_export import export_classifier
from capt.pretrain.convert.card import About

TARGETS = ("hf", "onnx")


def command(
    checkpoint: Path | GlueClassifier, out: Path, *, to: str, quantize: str | None = None, overwrite: bool = False,
    about: About | None = None,
) -> Path:  # fmt: skip
    """Export a checkpoint, or the best one of a run, as `export_classifier` does; ``to`` is one of ``TARGETS``."""
    trained = checkpoint if isinstance(checkpoint, FineTuned) else load_classifier(checkpoint)
    return export_classifier(trained, out, to=to, quantize=quantize, overwrite=overwrite, about=about)

"""``capt convert`` of a pretrained encoder: a Hugging Face, sentence-transformers or ONNX folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

from pretrain.base.errors import ConfigError, did_you_mean
from pretrain.convert.about import About
from pretrain.convert.card import final_metrics
from pretrain.convert.evaluations import sections_of
from pretrain.convert.huggingface import export_hf
from pretrain.convert.onnx import export_onnx, require_packages
from pretrain.convert.reference import Pooling
from pretrain.convert.sentence_transformers import export_sentence_transformers
from pretrain.engine.checkpoint import read_metadata
from pretrain.language.card import Form, model_card
from pretrain.language.restore import Restored, load_model

logger = logging.getLogger(__name__)

TARGETS = ("hf", "sentence-transformers", "onnx")
POOLINGS = ("mean", "cls", "head")
"""The first is the default: the best of the three at sentence similarity (docs/results/language.md)."""


def command(
    checkpoint: Path,
    out: Path,
    *,
    to: str,
    pooling: str | None = None,
    overwrite: bool = False,
    about: About | None = None,
) -> Path:
    """Write a checkpoint, or the newest checkpoint of a run, as the folder ``out`` and return it.

    Args:
        checkpoint: a checkpoint or a run.
        out: a folder that does not exist or is empty.
        to: ``hf`` (``RobertaForMaskedLM``), ``sentence-transformers`` or ``onnx``.
        pooling: ``mean`` (also if None), ``cls`` or ``head`` (the aggregation head); of sentence-transformers and ONNX.
        overwrite: replace ``out`` if it is an older export.
        about: for the model card.

    Raises:
        UserError: an argument, the checkpoint or ``out`` is wrong, or an export differs from our model.
    """
    if pooling is not None and pooling not in POOLINGS:
        raise ConfigError(f"--pooling {pooling!r} is unknown; {did_you_mean(pooling, POOLINGS, 'valid:')}")
    if pooling is not None and to == "hf":
        raise ConfigError(f"--pooling {pooling} has no meaning with --to hf")
    if to == "onnx":
        require_packages()
    chosen = cast(Pooling, pooling or POOLINGS[0])
    restored = load_model(checkpoint)
    config, job = restored.model.config, restored.job
    state, card = restored.model.state_dict(), _card(restored, cast(Form, to), chosen, about)
    # Position rows beyond the windows of training are as random as they started, but for a model that came with more.
    length = config.max_positions if job.model.init else job.data.sequence_length
    shared: dict[str, Any] = {"max_length": length, "overwrite": overwrite}
    if to == "hf":
        export_hf(state, config, restored.tokenizer, out, card, **shared)
    elif to == "onnx":
        export_onnx(state, config, restored.tokenizer, out, card, pooling=chosen, **shared)
    else:
        export_sentence_transformers(state, config, restored.tokenizer, out, card, pooling=chosen, **shared)
    logger.info("%s written from %s", out, restored.checkpoint)
    return out


def _card(restored: Restored, form: Form, pooling: Pooling, about: About | None) -> str:
    config, run = restored.model.config, restored.checkpoint.resolve().parent.parent
    progress = read_metadata(restored.checkpoint).progress.model_dump()
    facts: dict[str, Any] = {
        "layers": config.layers,
        "hidden size": config.hidden,
        "attention heads": config.heads,
        "feed-forward size": config.ffn,
        "vocabulary rows": config.classes,
        "positions": config.max_positions,
        "parameters": sum(parameter.numel() for parameter in restored.model.parameters()),
    }
    if form != "hf":
        facts["sentence embedding"] = f"{config.pooling}, aggregation head" if pooling == "head" else pooling
    return model_card(
        form,
        name=run.name,
        model=facts,
        job=restored.job.model_dump(mode="json", by_alias=True),
        progress=progress,
        metrics=final_metrics(run, progress["step"]),
        about=(about or About()).started_from(restored.job.model.init, run),
        evaluations=sections_of(restored.checkpoint),
        pooling=pooling,
    )

"""``capt convert`` of a pretrained LXMERT: a stock ``LxmertForPreTraining`` folder with the answers as labels."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pretrain.config import flatten
from pretrain.convert.about import About
from pretrain.convert.card import final_metrics
from pretrain.convert.evaluations import sections_of
from pretrain.convert.lxmert import export_lxmert_hf
from pretrain.engine.checkpoint import read_metadata
from pretrain.vision_language.card import model_card
from pretrain.vision_language.features import read_features
from pretrain.vision_language.report import is_synthetic
from pretrain.vision_language.restore import Restored, load_model

logger = logging.getLogger(__name__)

TARGETS = ("hf",)


def command(checkpoint: Path, out: Path, *, to: str, overwrite: bool = False, about: About | None = None) -> Path:
    """Write a checkpoint, or the newest checkpoint of a run, as the folder ``out`` and return it.

    ``LxmertForPreTraining`` of transformers loads it; its configuration holds the names of the answers.

    Args:
        checkpoint: a checkpoint or a run.
        out: a folder that does not exist or is empty.
        to: one of ``TARGETS``.
        overwrite: replace ``out`` if it is an older export.
        about: for the model card.

    Raises:
        UserError: the checkpoint or ``out`` is wrong, or transformers computes something else than our model.
    """
    restored = load_model(checkpoint)
    export_lxmert_hf(
        restored.model.state_dict(),
        restored.model.config,
        restored.tokenizer,
        out,
        _card(restored, about or About()),
        architecture="LxmertForPreTraining",
        answers=restored.answers,
        max_length=restored.model.config.max_positions
        if restored.job.model.init
        else restored.job.data.sequence_length,
        overwrite=overwrite,
    )
    logger.info("%s written from %s", out, restored.checkpoint)
    return out


def _card(restored: Restored, about: About) -> str:
    config, run = restored.model.config, restored.checkpoint.resolve().parent.parent
    progress = read_metadata(restored.checkpoint).progress.model_dump()
    features = read_features(restored.checkpoint)
    job = restored.job.model_dump(mode="json", by_alias=True)
    kind = {} if features is None else features.features_of
    facts: dict[str, Any] = {
        "language, vision and cross-modality layers":
            f"{config.language_layers}, {config.vision_layers}, {config.cross_layers}",
        "hidden size": config.hidden,
        "attention heads": config.heads,
        "feed-forward size": config.ffn,
        "vocabulary rows": config.vocab_size,
        "feature size": config.feature_size,
        "object, attribute and answer classes":
            f"{config.object_classes}, {config.attribute_classes}, {config.answers}",
        "parameters": sum(parameter.numel() for parameter in restored.model.parameters()),
    }  # fmt: skip
    return model_card(
        name=run.name,
        model=facts,
        job=job,
        synthetic=is_synthetic(flatten(job)) or bool(kind.get("synthetic")),
        features_of=kind,
        progress=progress,
        metrics=final_metrics(run, progress["step"]),
        about=about.started_from(restored.job.model.init, run),
        evaluations=sections_of(restored.checkpoint),
    )

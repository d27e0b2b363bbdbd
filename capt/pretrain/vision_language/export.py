"""``capt convert`` of a pretrained LXMERT: a stock ``LxmertForPreTraining`` folder with the answers as labels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capt.pretrain.config import flatten
from capt.pretrain.convert.card import About, CardFacts, cell, lookup, result, table
from capt.pretrain.convert.lxmert import export_lxmert
from capt.pretrain.engine.evaluations import Section, sections_of
from capt.pretrain.vision_language.config import is_synthetic
from capt.pretrain.vision_language.load import LoadedVisionLanguageModel, load_model, read_features

logger = logging.getLogger(__name__)

TARGETS = ("hf",)

_HEAD: dict[str, Any] = {
    "library_name": "transformers",
    "tags": ["capt", "lxmert", "vision-language", "feature-extraction"],
}

_USE = """\
```python
import torch
from transformers import AutoTokenizer, LxmertForPreTraining

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = LxmertForPreTraining.from_pretrained("PATH")
regions = 36
features = torch.zeros(1, regions, model.config.visual_feat_dim)  # of a detector or extractor, see below
boxes = torch.rand(1, regions, 4)  # left, top, right, bottom, divided by the width and the height of the picture
sentence = tokenizer("A sentence about a picture.", truncation=True, return_tensors="pt")
output = model(**sentence, visual_feats=features, visual_pos=boxes)
matches = output.cross_relationship_score.softmax(-1)[:, 1]
```"""

_CAVEATS = (
    "Features must come from the same extractor as in training; others give answers that mean nothing.",
    "Boxes are left, top, right and bottom edge; the documentation of transformers, which says width and height, is "
    "misleading.",
    "The contrastive aggregation head is in `capt_head.safetensors`, which transformers does not read.",
    "The model repeats the biases and errors of its training data; it was evaluated only on what is listed here.",
)

_KEYS = (
    ("model.init", "started from"),
    ("data.source", "data source"),
    ("data.train", "data files"),
    ("data.mixture", "data sources"),
    ("data.regions", "region store"),
    ("data.sequence_length", "sequence length"),
    ("objectives.answers", "weight of question answering"),
    ("objectives.region_scope", "regions whose class is predicted"),
    ("objectives.word_rate", "share of words masked"),
    ("objectives.region_rate", "share of regions masked"),
    ("objectives.mismatched", "share of mismatched pairs"),
    ("batch.global", "pairs a step"),
    ("schedule.max_steps", "scheduled steps"),
    ("schedule.warmup_steps", "warmup steps"),
    ("optimizer.type", "optimizer"),
    ("optimizer.lr", "peak learning rate"),
    ("optimizer.weight_decay", "weight decay"),
    ("engine.precision", "precision"),
    ("contrast.weight", "weight of the contrastive loss"),
    ("contrast.queue", "queue (rows, all ranks)"),
    ("contrast.temperature.type", "temperature schedule"),
    ("run.seed", "seed"),
)
_COUNTED = {"step": "steps taken", "samples": "pairs seen", "tokens": "tokens seen"}


def _known(section: Section) -> dict[str, float]:
    return {name: value for name, value in section.metrics.items() if value is not None}


def _summary(job: Mapping[str, Any], trained: bool, synthetic: bool) -> str:
    if not trained:
        return "An LXMERT with the weights it was started from: no training step has been taken on them."
    capt = (
        " and CAPT (contrastive pretraining on corrupted views of each pair)" if lookup(job, "contrast.weight") else ""
    )
    answers = "with" if lookup(job, "objectives.answers") else "without"
    data = " Its training data are a **synthetic** microworld; it knows nothing of real pictures." if synthetic else ""
    return f"An LXMERT pretrained with LXMERT's objectives, {answers} question answering,{capt}.{data}".replace(
        ",.", "."
    )


def command(checkpoint: Path, out: Path, *, to: str, overwrite: bool = False, about: About | None = None) -> Path:
    """Write a folder that ``LxmertForPreTraining`` of transformers loads; see `capt.pretrain.commands`.

    Its configuration holds the names of the answers. Raises ``UserError`` as `load_model` and `export_lxmert`.
    """
    trained = load_model(checkpoint)
    export_lxmert(
        trained.model.state_dict(),
        trained.model.config,
        trained.tokenizer,
        out,
        _card(trained, about),
        architecture="LxmertForPreTraining",
        answers=trained.answers,
        max_length=trained.model.config.max_positions if trained.job.model.init else trained.job.data.sequence_length,
        overwrite=overwrite,
    )
    logger.info("%s written from %s", out, trained.checkpoint)
    return out


def _card(trained: LoadedVisionLanguageModel, about: About | None) -> str:
    config = trained.model.config
    facts = CardFacts.read(trained.checkpoint, trained.job, trained.job.model.init, about)
    steps = facts.progress["step"]
    features, evaluations = read_features(trained.checkpoint), sections_of(trained.checkpoint)
    kind = {} if features is None else features.features_of
    # A model of synthetic pictures must say so wherever it is published.
    synthetic = is_synthetic(flatten(facts.job)) or bool(kind.get("synthetic"))
    return facts.card(
        _HEAD,
        _summary(facts.job, bool(steps), synthetic),
        _USE,
        model={
            "language, vision and cross-modality layers":
                f"{config.language_layers}, {config.vision_layers}, {config.cross_layers}",
            "hidden size": config.hidden,
            "attention heads": config.heads,
            "feed-forward size": config.ffn,
            "vocabulary rows": config.vocab_size,
            "feature size": config.feature_size,
            "object, attribute and answer classes":
                f"{config.object_classes}, {config.attribute_classes}, {config.answers}",
            "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
            **{f"features: {key}": value for key, value in kind.items() if not isinstance(value, Mapping)},
        },
        training=facts.training(_KEYS, _COUNTED) if steps else {},
        caveats=_CAVEATS,
        results=[result("image-text-matching", section.name, section.metrics) for section in evaluations],
        evaluations=[f"{cell(s.name)}: {cell(s.protocol)}\n\n{table(_known(s))}" for s in evaluations],
    )  # fmt: skip

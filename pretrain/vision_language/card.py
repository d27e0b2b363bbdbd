"""The model card of an exported LXMERT: what the weights are, how they were trained, how to load them, its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pretrain.convert.about import About, result
from pretrain.convert.card import cell, compose, lookup, table, training_facts
from pretrain.engine.artifacts import Section

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


def model_card(
    *,
    name: str,
    model: Mapping[str, Any],
    job: Mapping[str, Any],
    synthetic: bool,
    features_of: Mapping[str, Any],
    progress: Mapping[str, int],
    metrics: Mapping[str, Any],
    about: About,
    evaluations: Sequence[Section],
) -> str:
    """The text of a ``README.md``: YAML head and Markdown.

    Args:
        name: the title.
        model: facts of the architecture.
        job: the resolved configuration as a mapping of sections; only known keys are shown, paths by name only.
        synthetic: whether the training data are the microworld's.
        features_of: what made the region features.
        progress: how far the training is: ``step``, ``samples``, ``tokens``.
        metrics: final measurements (see `pretrain.convert.card.final_metrics`).
        about: licence, languages and the like, for the head.
        evaluations: what ``capt evaluate`` has measured; also the head's ``model-index``.
    """
    trained = bool(progress.get("step"))
    results = [result("image-text-matching", section.name, section.metrics) for section in evaluations]
    features = {f"features: {key}": value for key, value in features_of.items() if not isinstance(value, Mapping)}
    return compose(
        about.head(_HEAD, name, results),
        name,
        _summary(job, trained, synthetic),
        _USE.replace("PATH", about.location),
        model={**model, **features},
        training=training_facts(job, progress, _KEYS, _COUNTED) if trained else {},
        evaluations=[f"{cell(s.name)}: {cell(s.protocol)}\n\n{table(_known(s))}" for s in evaluations],
        metrics=metrics,
        caveats=_CAVEATS,
    )


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

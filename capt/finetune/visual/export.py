"""Checkpoint -> stock ``LxmertForQuestionAnswering`` folder, loaded back and compared before it is in place.

The answers are in ``config.json`` as ``id2label``: answers that are only numbers are read in another table's order
sooner or later. Transformers has no class for statements about pictures.
"""

from __future__ import annotations

import logging
from pathlib import Path

from capt.finetune.visual.module import FineTunedLxmert, load_visual, read_answers
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.config import flatten
from capt.pretrain.convert.card import About, CardFacts, result
from capt.pretrain.convert.lxmert import export_lxmert
from capt.pretrain.vision_language.config import is_synthetic
from capt.pretrain.vision_language.load import read_features

logger = logging.getLogger(__name__)

TARGETS = ("hf",)

_USE = """\
```python
import torch
from transformers import AutoTokenizer, LxmertForQuestionAnswering

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = LxmertForQuestionAnswering.from_pretrained("PATH").eval()
regions = 36
features = torch.zeros(1, regions, model.config.visual_feat_dim)  # of a detector or extractor, see below
boxes = torch.rand(1, regions, 4)  # left, top, right, bottom, divided by the width and the height of the picture
question = tokenizer("What colour is the ball?", truncation=True, return_tensors="pt")
scores = model(**question, visual_feats=features, visual_pos=boxes).question_answering_score.sigmoid()
answer = model.config.id2label[int(scores.argmax())]
```"""

_CAVEATS = (
    "Features must come from the same extractor as in training; others give answers that mean nothing.",
    "Boxes are left, top, right and bottom edge; the documentation of transformers, which says width and height, is "
    "misleading.",
    "It was trained with binary cross entropy of soft scores; the loss that transformers computes is another one.",
)

_KEYS = (
    ("model.init", "started from"),
    ("data.train", "data files"),
    ("data.regions", "region store"),
    ("data.sequence_length", "sequence length"),
    ("batch.global", "questions a step"),
    ("schedule.max_steps", "steps"),
    ("optimizer.lr", "peak learning rate"),
    ("run.seed", "seed"),
)


def command(
    checkpoint: Path | FineTunedLxmert, out: Path, *, to: str, overwrite: bool = False, about: About | None = None
) -> Path:
    """Write ``out``, load it with transformers and compare its logits with ours; see `capt.pretrain.commands`.

    Raises as `load_visual` and `export_lxmert`, and ``CheckpointError`` for statements: transformers has no such class.
    """
    trained = load_visual(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    job, table = trained.job, read_answers(trained.job, trained.checkpoint)
    if table is None:
        raise CheckpointError(
            f"{trained.checkpoint}: a model of {job.data.visual_task.name}; transformers has no LXMERT for statements "
            "about pictures, only for questions (VQA, GQA)"
        )
    assert job.model.encoder is not None, "load_visual refuses a checkpoint without it"
    export_lxmert(
        trained.model.cpu().state_dict(),
        job.model.encoder.model_copy(update={"answers": len(table)}),
        trained.tokenizer,
        out,
        _card(trained, len(table), about),
        architecture="LxmertForQuestionAnswering",
        answers=table.answers,
        max_length=job.data.sequence_length,
        overwrite=overwrite,
    )
    logger.info("%s written from %s", out, trained.checkpoint)
    return out


def _card(trained: FineTunedLxmert, answers: int, about: About | None) -> str:
    facts = CardFacts.read(trained.checkpoint, trained.job, trained.job.model.init, about).validated()
    name, features = trained.job.data.visual_task.name, read_features(trained.checkpoint)
    kind = {} if features is None else features.features_of
    synthetic = is_synthetic(flatten(facts.job)) or bool(kind.get("synthetic"))
    scores = {"accuracy": facts.metrics["validation/accuracy"]} if "validation/accuracy" in facts.metrics else {}
    data = f"{name} (synthetic)" if synthetic else name
    summary = f"An LXMERT fine-tuned on {name}; its {answers:,} answers are in `config.json`."
    if synthetic:
        summary += " The data are a **synthetic** microworld; it knows nothing of real pictures."
    return facts.card(
        {"library_name": "transformers", "pipeline_tag": "visual-question-answering", "tags": ["capt", "lxmert"]},
        summary,
        _USE,
        model={f"features: {key}": value for key, value in kind.items() if not isinstance(value, dict | list)},
        training=facts.training(_KEYS, {"step": "steps taken"}),
        caveats=_CAVEATS,
        results=[result("visual-question-answering", f"{data}, validation", scores)] if scores else [],
    )

"""``model.init`` of a ``visual`` job: a pretrained LXMERT with its tokenizer, its answers and its kind of features.

Every weight of the encoder and the pooler must be there: a model that starts at random where it should not ends at
50.86% on NLVR2, without an error. The answer head is transplanted answer by answer, as LXMERT's ``loadLXMERTQA`` does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from finetune.visual.module import PictureClassifier
from pretrain.base.errors import CheckpointError
from pretrain.models.lxmert.config import LxmertConfig
from pretrain.vision_language.data.answers import convert_ans
from pretrain.vision_language.features import FeatureKind
from tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)

BACKBONE = ("encoder.", "pooler.")
HEAD = "answer_head."
_INNER, _OUTER = "answer_head.inner.weight", "answer_head.outer."
TRUTHS = ("false", "true")
"""The classes of a head for statements."""


@dataclass(frozen=True)
class Backbone:
    """A pretrained LXMERT.

    Attributes:
        source: as the configuration names it.
        config: sizes.
        state: weights by their names in `pretrain.models.lxmert.model.LxmertModel`.
        tokenizer: that of its sentences.
        answers: the classes of its answer head, in their order (`TRUTHS` for statements); None without one, or without
            their names.
        features: the kind of features that it was trained on; None where its source does not say.
    """

    source: str
    config: LxmertConfig
    state: dict[str, Tensor]
    tokenizer: TextTokenizer
    answers: tuple[str, ...] | None = None
    features: FeatureKind | None = None


def start_from(model: PictureClassifier, backbone: Backbone, classes: Sequence[str]) -> None:
    """Copy the backbone's weights into a model that has just been initialised.

    The head of statements is taken from one that has their truths among its answers and reads the same number of
    pictures, the head of questions from one of questions; else it stays as initialised.

    Args:
        model: made for ``backbone.config``.
        backbone: the pretrained one.
        classes: of the model's head: answers, or `TRUTHS`.

    Raises:
        CheckpointError: a weight of the encoder or the pooler is missing, unknown or of another shape.
    """
    _require_whole(model, backbone)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            if name.startswith(BACKBONE):
                parameter.copy_(backbone.state[name])
        before = backbone.answers
        if before is not None and (set(before) >= set(TRUTHS) if tuple(classes) == TRUTHS else before != TRUTHS):
            _transplant(own, backbone, before, classes)


def _require_whole(model: PictureClassifier, backbone: Backbone) -> None:
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters() if name.startswith(BACKBONE)}
    there = {name: tuple(x.shape) for name, x in backbone.state.items() if name.startswith(BACKBONE)}
    for problem, names in (
        ("lacks", shapes.keys() - there.keys()),
        ("has no place in the model for its", there.keys() - shapes.keys()),
        ("has other shapes of", {name for name in shapes.keys() & there.keys() if shapes[name] != there[name]}),
    ):
        if names:
            first = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            raise CheckpointError(
                f"model.init {backbone.source}: {problem} {len(names)} of {len(shapes)} weights of the backbone: "
                f"{first}; fine-tuning needs them all (model.init=scratch for random weights)"
            )


def _transplant(own: Mapping[str, Tensor], backbone: Backbone, before: Sequence[str], answers: Sequence[str]) -> None:
    """Rows of the last layer by the text of their answer, zeros for new answers; the layers below it as they are."""
    head = {name: x for name, x in backbone.state.items() if name.startswith(HEAD)}
    if head[_INNER].shape != own[_INNER].shape:
        logger.info("answer head: that of %s is for another number of pictures; a new one", backbone.source)
        return
    for name, parameter in own.items():
        if name.startswith(HEAD) and not name.startswith(_OUTER):
            parameter.copy_(head[name])
    rows = {convert_ans(text): row for row, text in reversed(list(enumerate(before)))}
    rows |= {text: row for row, text in reversed(list(enumerate(before)))}
    found = [rows.get(text, rows.get(convert_ans(text), -1)) for text in answers]
    index = torch.tensor(found)
    for part in ("weight", "bias"):
        taken = head[f"{_OUTER}{part}"][index.clamp_min(0)]
        taken[index < 0] = 0.0
        own[f"{_OUTER}{part}"].copy_(taken)
    known = int((index >= 0).sum())
    logger.info(
        "answer head: %d of %d answers from %s, %d new ones begin at 0",
        *(known, len(answers), backbone.source, len(answers) - known),
    )

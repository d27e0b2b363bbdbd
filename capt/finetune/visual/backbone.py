"""``model.init`` of a ``visual`` job: a pretrained LXMERT with its tokenizer, its answers and its kind of features.

Every weight of the encoder and the pooler must be there: a model that starts at random where it should not ends at
50.86% on NLVR2, without an error. The answer head is transplanted answer by answer, as LXMERT's ``loadLXMERTQA`` does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from capt.finetune.visual.config import VisualJob
from capt.finetune.visual.module import PictureClassifier, load_visual, read_answers
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.engine.checkpoint import find_best, read_manifest
from capt.pretrain.models.hf_config import TOKENIZER_FILES, local_folder
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.read import is_lxmert
from capt.pretrain.vision_language.load import FeatureKind, Start, answer_rows, named_answers, read_features, read_start
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

# Read what ``model.init`` names: a run or checkpoint of ours, a Hugging Face folder, or airsplay's file.


def read_backbone(job: VisualJob) -> Backbone:
    """The pretrained model of a job that does not start from scratch.

    Raises:
        CheckpointError: nothing usable is there, or it holds no tokenizer and ``tokenizer.path`` names none.
        DataError: the tokenizer that ``tokenizer.path`` names cannot be read.
    """
    init = job.model.init
    folder = local_folder(init)
    if is_lxmert(folder):
        return _pretrained(folder, job)
    checkpoint = find_best(folder)
    task = read_manifest(checkpoint).task
    if task == "visual":
        return _fine_tuned(checkpoint, str(init))
    if task == "capt_vl":
        return _pretrained(checkpoint, job)
    raise CheckpointError(f"{checkpoint}: a checkpoint of task {task}; it has no LXMERT to fine-tune")


def _pretrained(path: Path, job: VisualJob) -> Backbone:
    start = read_start(path)
    found, own, source = start.pretrained, job.tokenizer.path, str(job.model.init)
    # The tokenizer beside the weights counts; tokenizer.path is for weights without one.
    tokenizer = found.tokenizer
    if tokenizer is None and own is not None:
        tokenizer = load_tokenizer(local_folder(own, TOKENIZER_FILES))
    if tokenizer is None:
        raise CheckpointError(
            f"model.init {source}: no tokenizer beside the weights; set tokenizer.path to a folder with the "
            "vocab.txt of bert-base-uncased (or whatever it was pretrained with)"
        )
    if tokenizer.vocab_size > found.config.known("vocab_size"):
        raise CheckpointError(
            f"tokenizer.path has {tokenizer.vocab_size} ids, and model.init {source} embeds "
            f"{found.config.vocab_size}: it is not the tokenizer that it was pretrained with"
        )
    return Backbone(source, found.config, found.state, tokenizer, _answers(job, start), start.features)


def _answers(job: VisualJob, start: Start) -> tuple[str, ...] | None:
    """The classes of the answer head, if the task has one picture a row and can take the head over."""
    if job.data.visual_task.pictures != 1 and job.model.init_answers is None:
        return start.pretrained.answers
    return named_answers(start, job.model.init_answers)


def _fine_tuned(checkpoint: Path, source: str) -> Backbone:
    trained = load_visual(checkpoint)
    config = trained.job.model.encoder
    assert config is not None, "load_visual refuses a checkpoint without it"
    table = read_answers(trained.job, checkpoint)
    return Backbone(
        source,
        config,
        trained.model.state_dict(),
        trained.tokenizer,
        TRUTHS if table is None else table.answers,
        read_features(checkpoint),
    )


def encoder_of(job: VisualJob, base: LxmertConfig, tokenizer: TextTokenizer, feature_size: int) -> LxmertConfig:
    """The sizes of the model to train: those of ``base``, without heads of pretraining, with the job's dropouts."""
    model = job.model
    return base.model_copy(
        update={
            "vocab_size": base.vocab_size or tokenizer.vocab_size,
            "pad_id": tokenizer.special.pad if base.pad_id is None else base.pad_id,
            "feature_size": feature_size,
            "object_classes": 0,
            "attribute_classes": 0,
            "answers": 0,
            "dropout": model.dropout,
            "attention_dropout": model.attention_dropout,
            "activation_checkpointing": model.activation_checkpointing,
            "init": None,
            "init_answers": None,
        }
    )


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
        state: weights by their names in `capt.pretrain.models.lxmert.model.LxmertModel`.
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
        if before is None:
            logger.info("answer head: a new one; none of %s is taken over", backbone.source)
        elif set(before) >= set(TRUTHS) if tuple(classes) == TRUTHS else before != TRUTHS:
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
    outer = {part: head[f"{_OUTER}{part}"] for part in ("weight", "bias")}
    for part, tensor in answer_rows(outer, before, answers, backbone.source).items():
        own[f"{_OUTER}{part}"].copy_(tensor)

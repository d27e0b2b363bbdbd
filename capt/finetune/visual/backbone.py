"""``model.init`` of a ``visual`` job: a pretrained LXMERT with its tokenizer, its answers and its kind of features.

Every weight of the encoder and the pooler must be there: a model that starts at random where it should not ends at
50.86% on NLVR2, without an error. The answer head is transplanted answer by answer, as LXMERT's ``loadLXMERTQA`` does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from capt.finetune.visual.config import VisualJob
from capt.finetune.visual.module import PictureClassifier, load_visual, read_answers
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.engine.checkpoint import find_best, read_manifest
from capt.pretrain.models.hf_config import TOKENIZER_FILES, local_folder
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.read import PretrainedLxmert, is_lxmert
from capt.pretrain.vision_language.load import Start, answer_rows, named_answers, read_features, read_start
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

logger = logging.getLogger(__name__)

BACKBONE = ("encoder.", "pooler.")
HEAD = "answer_head."
_INNER, _OUTER = "answer_head.inner.weight", "answer_head.outer."
TRUTHS = ("false", "true")
"""The classes of a head for statements."""


def read_backbone(job: VisualJob) -> Start:
    """Read the pretrained model of a job that does not start from scratch, with its tokenizer and its answers.

    Raises:
        CheckpointError: nothing usable is there, or it holds no tokenizer and ``tokenizer.path`` names none.
        DataError: the tokenizer that ``tokenizer.path`` names cannot be read.
    """
    init, own = job.model.init, job.tokenizer.path
    folder = local_folder(init)
    if not is_lxmert(folder):
        checkpoint = find_best(folder)
        task = read_manifest(checkpoint).task
        if task == "visual":
            return _fine_tuned(checkpoint, init)
        if task != "capt_vl":
            raise CheckpointError(f"{checkpoint}: a checkpoint of task {task}; it has no LXMERT to fine-tune")
    start = read_start(init)
    found = start.pretrained
    # The tokenizer beside the weights counts; tokenizer.path is for weights without one.
    tokenizer = found.tokenizer
    if tokenizer is None and own is not None:
        tokenizer = load_tokenizer(local_folder(own, TOKENIZER_FILES))
    if tokenizer is None:
        raise CheckpointError(
            f"model.init {init}: no tokenizer beside the weights; set tokenizer.path to a folder with the "
            "vocab.txt of bert-base-uncased (or whatever it was pretrained with)"
        )
    if tokenizer.vocab_size > found.config.known("vocab_size"):
        raise CheckpointError(
            f"tokenizer.path has {tokenizer.vocab_size} ids, and model.init {init} embeds "
            f"{found.config.vocab_size}: it is not the tokenizer that it was pretrained with"
        )
    # Answers are named if the task has one picture a row and can take the head over.
    answers = found.answers
    if job.data.visual_task.pictures == 1 or job.model.init_answers is not None:
        answers = named_answers(start, job.model.init_answers)
    return replace(start, pretrained=replace(found, tokenizer=tokenizer, answers=answers))


def _fine_tuned(checkpoint: Path, source: Path) -> Start:
    trained = load_visual(checkpoint)
    config = trained.job.model.encoder
    assert config is not None, "load_visual refuses a checkpoint without it"
    table = read_answers(trained.job, checkpoint)
    answers = TRUTHS if table is None else table.answers
    pretrained = PretrainedLxmert(config, trained.model.state_dict(), trained.tokenizer, answers)
    return Start(source, pretrained, read_features(checkpoint))


def encoder_of(job: VisualJob, base: LxmertConfig, tokenizer: TextTokenizer, feature_size: int) -> LxmertConfig:
    """Return the sizes of the model to train: ``base`` without heads of pretraining, with the job's dropouts."""
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


def start_from(model: PictureClassifier, backbone: Start, classes: Sequence[str]) -> None:
    """Copy the backbone's weights into a model that has just been initialised.

    The head of statements is taken from one that has their truths among its answers and reads the same number of
    pictures, the head of questions from one of questions; else it stays as initialised.

    Args:
        model: made for the sizes of ``backbone``.
        backbone: the pretrained one; its answers are the classes of its head, `TRUTHS` for statements.
        classes: of the model's head: answers, or `TRUTHS`.

    Raises:
        CheckpointError: a weight of the encoder or the pooler is missing, unknown or of another shape.
    """
    _require_whole(model, backbone)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            if name.startswith(BACKBONE):
                parameter.copy_(backbone.pretrained.state[name])
        before = backbone.pretrained.answers
        if before is None:
            logger.info("answer head: a new one; none of %s is taken over", backbone.source)
        elif set(before) >= set(TRUTHS) if tuple(classes) == TRUTHS else before != TRUTHS:
            _transplant(own, backbone, before, classes)


def _require_whole(model: PictureClassifier, backbone: Start) -> None:
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters() if name.startswith(BACKBONE)}
    there = {name: tuple(x.shape) for name, x in backbone.pretrained.state.items() if name.startswith(BACKBONE)}
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


def _transplant(own: Mapping[str, Tensor], backbone: Start, before: Sequence[str], answers: Sequence[str]) -> None:
    """Rows of the last layer by the text of their answer, zeros for new answers; the layers below it as they are."""
    head = {name: x for name, x in backbone.pretrained.state.items() if name.startswith(HEAD)}
    if head[_INNER].shape != own[_INNER].shape:
        logger.info("answer head: that of %s is for another number of pictures; a new one", backbone.source)
        return
    for name, parameter in own.items():
        if name.startswith(HEAD) and not name.startswith(_OUTER):
            parameter.copy_(head[name])
    outer = {part: head[f"{_OUTER}{part}"] for part in ("weight", "bias")}
    for part, tensor in answer_rows(outer, before, answers, str(backbone.source)).items():
        own[f"{_OUTER}{part}"].copy_(tensor)

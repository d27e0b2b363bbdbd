"""Read what ``model.init`` names: a run or checkpoint of ours, a Hugging Face folder, or airsplay's file."""

from __future__ import annotations

from pathlib import Path

from finetune.visual.backbone import TRUTHS, Backbone
from finetune.visual.config import VisualJob
from finetune.visual.restore import load_visual, read_answers
from pretrain.base.errors import CheckpointError
from pretrain.engine.checkpoint import find_best, read_manifest
from pretrain.models.hub import TOKENIZER_FILES, local_folder
from pretrain.models.lxmert.config import LxmertConfig
from pretrain.models.lxmert.read import is_lxmert
from pretrain.vision_language.data.answers import load_table
from pretrain.vision_language.features import read_features
from pretrain.vision_language.start import Start, read_start
from tokenizer.encode import TextTokenizer, load_tokenizer


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
    """What the classes of the answer head are, as the source or ``model.init_answers`` says."""
    table = job.model.init_answers
    if table is None:
        return start.pretrained.answers
    answers, classes = load_table(table).answers, start.config.answers or 0
    if len(answers) != classes:
        raise CheckpointError(
            f"model.init_answers {table} has {len(answers)} answers, and the answer head of {start.source} {classes}: "
            "it is not its table"
        )
    return answers


def _fine_tuned(checkpoint: Path, source: str) -> Backbone:
    restored = load_visual(checkpoint)
    config = restored.job.model.encoder
    assert config is not None, "load_visual refuses a checkpoint without it"
    table = read_answers(restored.job, checkpoint)
    return Backbone(
        source,
        config,
        restored.model.state_dict(),
        restored.tokenizer,
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
        }
    )

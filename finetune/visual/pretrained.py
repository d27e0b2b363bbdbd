"""Read what ``model.init`` names: a run or checkpoint of ours, a Hugging Face folder, or airsplay's file."""

from __future__ import annotations

from pathlib import Path

from finetune.visual.backbone import Backbone
from finetune.visual.config import VisualJob
from finetune.visual.restore import load_visual, read_answers
from pretrain.base.errors import CheckpointError
from pretrain.engine.checkpoint import find_best, read_manifest
from pretrain.models.hub import local_folder
from pretrain.models.lxmert.config import LxmertConfig
from pretrain.vision_language.features import read_features
from tokenizer.encode import TextTokenizer


def read_backbone(job: VisualJob) -> Backbone:
    """The pretrained model of a job that does not start from scratch.

    Raises:
        CheckpointError: nothing usable is there, or it holds no tokenizer and ``tokenizer.path`` names none.
        DataError: the tokenizer that ``tokenizer.path`` names cannot be read.
    """
    init = job.model.init
    folder = local_folder(init)
    checkpoint = find_best(folder)
    task = read_manifest(checkpoint).task
    if task == "visual":
        return _fine_tuned(checkpoint, str(init))
    raise CheckpointError(f"{checkpoint}: a checkpoint of task {task}; it has no LXMERT to fine-tune")


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
        None if table is None else table.answers,
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

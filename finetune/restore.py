"""A fine-tuned model back from a checkpoint, which needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from capt.finetune.classifier import ENCODER
from capt.finetune.config import FineTuningJob
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.engine.checkpoint import find_best, open_checkpoint, read_job, read_weights, restored, verify
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.language.restore import load_model
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.encoder import load_encoder
from capt.pretrain.models.foreign.families import read_tokenizer
from capt.pretrain.models.foreign.read import PretrainedEncoder, encoder_keys, read_encoder
from capt.pretrain.models.hf_config import local_folder
from capt.pretrain.models.hf_folder import is_hf
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

# ``model.init``: a pretrained encoder with its tokenizer, from a run or checkpoint of ours or a Hugging Face folder.
#
# A weight that the encoder lacks, or that it has no place for, is an error; heads and poolers are left behind.


@dataclass(frozen=True)
class Backbone:
    """A pretrained encoder. ``hf_config``: the keys of a ``config.json`` from which it can be built again."""

    encoder: Encoder
    hf_config: dict[str, Any]
    tokenizer: TextTokenizer


def load_backbone(
    path: Path, *, dropout: float = 0.1, attention_dropout: float = 0.1, allow_missing: bool = False
) -> Backbone:
    """Load the encoder in ``path``, with these dropouts.

    Args:
        path: a run (its best checkpoint, else the newest) or a checkpoint, of ``capt_language`` or of fine-tuning; or a
            Hugging Face folder or hub id of a masked-language model, a classifier or an encoder. Heads are left behind.
        dropout: probability, of hidden states.
        attention_dropout: probability, of attention weights.
        allow_missing: warn of weights that are missing (they stay as initialised) or unknown, instead of refusing.

    Raises:
        CheckpointError: nothing usable there, no tokenizer, or weights are missing, unknown or of another shape.
    """
    source, folder = str(path), local_folder(path)
    pretrained = read_encoder(folder) if is_hf(folder) else _read_checkpoint(folder)
    encoder = load_encoder(
        pretrained, source, dropout=dropout, attention_dropout=attention_dropout, allow_missing=allow_missing
    )
    return Backbone(encoder, pretrained.hf_config, pretrained.tokenizer)


def _read_checkpoint(path: Path) -> PretrainedEncoder:
    """The encoder in a checkpoint of ours, or in the best checkpoint of a run."""
    checkpoint = find_best(path)
    verify(checkpoint)
    job = read_job(checkpoint)
    tokenizer = read_tokenizer(checkpoint / "tokenizer", checkpoint)
    if isinstance(job, LanguageJob):
        model = load_model(checkpoint).model
        hf_config = model.config.to_hf(bos_id=tokenizer.special.bos, eos_id=tokenizer.special.eos)
        return PretrainedEncoder(encoder_keys(hf_config), model.encoder.state_dict(), tokenizer)
    if isinstance(job, FineTuningJob) and (encoder := job.encoder_config()) is not None:
        weights = read_weights(checkpoint)
        state = {name.removeprefix(ENCODER): x for name, x in weights.items() if name.startswith(ENCODER)}
        return PretrainedEncoder(encoder, state, tokenizer)
    raise CheckpointError(f"{checkpoint}: a checkpoint of task {job.task.type}; it has no text encoder to fine-tune")


JobT = TypeVar("JobT", bound=FineTuningJob)
ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True)
class FineTuned(Generic[JobT, ModuleT]):
    """A checkpoint's model in evaluation mode, and its job."""

    checkpoint: Path
    model: ModuleT
    job: JobT

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that travels in the checkpoint. Raises ``DataError`` where there is none."""
        return load_tokenizer(self.checkpoint / "tokenizer")


def load_fine_tuned(
    path: Path, job_class: type[JobT], task: str, build: Callable[[JobT, Path], ModuleT]
) -> FineTuned[JobT, ModuleT]:
    """Load a checkpoint of a fine-tuning job, or the best one of a run, after verifying every file.

    Args:
        path: the checkpoint or the run.
        job_class: the configuration class of the task.
        task: the task's type, for the error message.
        build: makes the module from the checkpoint's job; it also gets the checkpoint, to name it in its errors.

    Raises:
        CheckpointError: nothing is there, it is damaged, or it is the checkpoint of another kind of job.
    """
    checkpoint = find_best(path)
    job = open_checkpoint(checkpoint, job_class, task)
    model = restored(checkpoint, "model", lambda: build(job, checkpoint))
    return FineTuned(checkpoint, model.eval(), job)

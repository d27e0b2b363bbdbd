"""A fine-tuned model back from a checkpoint, which needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from torch import nn

from capt.finetune.config import FineTuningJob
from capt.pretrain.engine.checkpoint import find_best, load_module, open_checkpoint
from capt.pretrain.language.load import Backbone as Backbone
from capt.pretrain.language.load import load_backbone as load_backbone
from capt.pretrain.models.lora import merge_lora
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

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
    model = load_module(checkpoint, "model", lambda: build(job, checkpoint))
    if getattr(getattr(job, "model", None), "lora", None) is not None:
        merge_lora(model)
    return FineTuned(checkpoint, model.eval(), job)

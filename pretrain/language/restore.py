"""A trained model back from a checkpoint, for evaluation and conversion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pretrain.engine.checkpoint import find_checkpoint, open_checkpoint, restored
from pretrain.language.config import LanguageJob
from pretrain.language.module import LanguageModule
from pretrain.models.build import unpadded
from pretrain.models.capt import CaptModel
from tokenizer.encode import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class Restored:
    """A checkpoint's model in evaluation mode (without rows that padded the vocabulary), its tokenizer and its job."""

    checkpoint: Path
    model: CaptModel
    tokenizer: TextTokenizer
    job: LanguageJob
    has_mlm: bool = True
    """False where the masked-language-model head was never trained (a bare encoder from elsewhere)."""


def load_model(path: Path) -> Restored:
    """Load a checkpoint, or the newest one of a run, after verifying every file.

    Raises:
        CheckpointError: nothing there, damaged, or the checkpoint of another kind of job.
    """
    checkpoint = find_checkpoint(path)
    job = open_checkpoint(checkpoint, LanguageJob, "capt_language")
    tokenizer = load_tokenizer(checkpoint / "tokenizer")
    config = job.model.for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    plain = config.model_copy(update={"compile": False, "activation_checkpointing": "none"})
    module = restored(checkpoint, "model", lambda: LanguageModule(job, plain))
    return Restored(checkpoint, unpadded(module.capt).eval(), tokenizer, job)

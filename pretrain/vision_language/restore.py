"""Load a pretrained LXMERT from a checkpoint of ours, for fine-tuning, evaluation and conversion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pretrain.base.errors import CheckpointError, UserError
from pretrain.engine.checkpoint import find_best, open_checkpoint, restored
from pretrain.models.lxmert.config import LxmertConfig
from pretrain.models.lxmert.model import LxmertModel
from pretrain.vision_language.config import VisionLanguageJob
from pretrain.vision_language.data.answers import load_table
from pretrain.vision_language.module import VisionLanguageModule
from tokenizer.encode import TextTokenizer, load_tokenizer

TASK = "capt_vl"
ANSWERS = "answers.json"
"""The answer table in a checkpoint whose model has an answer head: a JSON list in the order of the classes."""
_DECIDED = ("vocab_size", "pad_id", "feature_size", "object_classes", "attribute_classes", "answers")


@dataclass(frozen=True)
class Restored:
    """A model in evaluation mode with its tokenizer, its job, and the answers that its answer head's classes represent.

    ``answers`` is None where the model has no answer head.
    """

    checkpoint: Path
    module: VisionLanguageModule
    tokenizer: TextTokenizer
    job: VisionLanguageJob
    answers: tuple[str, ...] | None

    @property
    def model(self) -> LxmertModel:
        """The model without the temperature."""
        return self.module.lxmert


def load_model(path: Path) -> Restored:
    """Load a checkpoint of ``capt_vl``, or a run's best or newest one, after verifying every file.

    Raises:
        CheckpointError: nothing there, damaged, or the checkpoint of another kind of job.
    """
    checkpoint = find_best(path)
    job = open_checkpoint(checkpoint, VisionLanguageJob, TASK)
    config = _sizes(job.model, checkpoint)
    tokenizer = load_tokenizer(checkpoint / "tokenizer")
    if tokenizer.vocab_size > config.known("vocab_size") or tokenizer.special.pad != config.pad_id:
        raise CheckpointError(f"{checkpoint / 'tokenizer'}: not the tokenizer of this model ({config.vocab_size} ids)")
    answers = read_answers(checkpoint, config.known("answers"))
    module = restored(checkpoint, "model", lambda: VisionLanguageModule(job, config))
    return Restored(checkpoint, module.eval(), tokenizer, job, answers)


def read_answers(checkpoint: Path, classes: int) -> tuple[str, ...] | None:
    """The answers of ``classes`` classes that a verified checkpoint names; None for a model without answers.

    Raises:
        CheckpointError: there is no such file, or it has another number of answers.
    """
    if not classes:
        return None
    path = checkpoint / ANSWERS
    try:
        answers = load_table(path).answers
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing: the model has an answer head of {classes:,} classes") from None
    except UserError as error:
        raise CheckpointError(str(error)) from None
    if len(answers) != classes:
        raise CheckpointError(f"{path}: {len(answers):,} answers for an answer head of {classes:,} classes")
    return answers


def require_same_answers(checkpoint: Path, before: tuple[str, ...] | None, now: tuple[str, ...] | None) -> None:
    """Raise ``CheckpointError`` where the classes of a resumed run would mean other answers than its checkpoint's."""
    if before != now:
        raise CheckpointError(
            f"{checkpoint}: trained with another answer table than this job's; set data.answers as it was, or to a "
            f"copy of {checkpoint / ANSWERS}"
        )


def _sizes(config: LxmertConfig, checkpoint: Path) -> LxmertConfig:
    missing = [name for name in _DECIDED if getattr(config, name) is None]
    if missing:
        raise CheckpointError(
            f"{checkpoint / 'config.yaml'}: model.{missing[0]} is not set; every checkpoint of {TASK} has it"
        )
    return config.model_copy(update={"activation_checkpointing": "none"})

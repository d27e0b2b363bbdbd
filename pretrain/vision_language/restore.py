"""Load a pretrained LXMERT from a checkpoint of ours, for fine-tuning, evaluation and conversion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from capt.pretrain.base.errors import CheckpointError, UserError
from capt.pretrain.engine.checkpoint import find_best, open_checkpoint, restored
from capt.pretrain.models.hf_config import TOKENIZER_FILES, local_folder
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.model import LxmertModel
from capt.pretrain.models.lxmert.model import start_from as copy_weights
from capt.pretrain.models.lxmert.read import PretrainedLxmert, is_lxmert, read_lxmert
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.config import VisionLanguageJob
from capt.pretrain.vision_language.data.answers import load_table
from capt.pretrain.vision_language.features import FeatureKind, read_features, require_features
from capt.pretrain.vision_language.module import VisionLanguageModule
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

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


# The pretrained model that ``model.init`` names, whatever wrote it: a run of ours, Hugging Face, or airsplay.


_ANSWERS = "answer_head.outer."


@dataclass(frozen=True)
class Start:
    """Weights to start from.

    Attributes:
        source: what ``model.init`` says.
        pretrained: its sizes, weights and answers.
        tokenizer_folder: None where it has no tokenizer (airsplay's file).
        features: the kind of region features that it has seen; None where it does not say.
    """

    source: Path
    pretrained: PretrainedLxmert
    tokenizer_folder: Path | None
    features: FeatureKind | None

    @property
    def config(self) -> LxmertConfig:
        """Its sizes."""
        return self.pretrained.config


def read_start(source: Path) -> Start:
    """Read a run or checkpoint of ``capt_vl``, a Hugging Face folder (or hub id) or airsplay's ``.pth`` file.

    Raises:
        CheckpointError: it is none of these, or is damaged.
        DataError: its tokenizer cannot be read.
    """
    if is_lxmert(source):
        pretrained = read_lxmert(source)
        has_tokenizer = pretrained.tokenizer is not None
        return Start(source, pretrained, local_folder(source, TOKENIZER_FILES) if has_tokenizer else None, None)

    restored = load_model(source)
    model = restored.model
    pretrained = PretrainedLxmert(model.config, dict(model.state_dict()), restored.tokenizer, restored.answers)
    return Start(source, pretrained, restored.checkpoint / "tokenizer", read_features(restored.checkpoint))


def require_same_features(start: Start, store: RegionStore) -> None:
    """Raise ``CheckpointError`` where the store's features are not of the kind that the model was trained on."""
    if start.features is not None:
        require_features(store, start.features, str(start.source))


def start_from(model: LxmertModel, start: Start, answers: Sequence[str] | None) -> None:
    """Copy the weights into ``model``. Heads for other classes start anew, and so do answers of another table.

    Raises:
        CheckpointError: the encoder does not fit.
    """
    pretrained = start.pretrained
    if answers is None or pretrained.answers is None or tuple(answers) != tuple(pretrained.answers):
        state = {name: tensor for name, tensor in pretrained.state.items() if not name.startswith(_ANSWERS)}
        pretrained = replace(pretrained, state=state)
    copy_weights(model, pretrained, str(start.source))

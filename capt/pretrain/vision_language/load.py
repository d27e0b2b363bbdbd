"""Load a pretrained LXMERT, of ours or of Hugging Face, for fine-tuning, evaluation and conversion."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError, DataError, UserError
from capt.pretrain.base.files import write_json
from capt.pretrain.base.records import Record, read_record
from capt.pretrain.base.verification import Verifier
from capt.pretrain.engine.checkpoint import find_best, load_module, open_checkpoint
from capt.pretrain.models.hf_config import TOKENIZER_FILES, local_folder
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.model import LxmertModel
from capt.pretrain.models.lxmert.model import start_from as copy_weights
from capt.pretrain.models.lxmert.read import PretrainedLxmert, is_lxmert, read_lxmert
from capt.pretrain.regions.picture import feature_differences
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.config import VisionLanguageData, VisionLanguageJob
from capt.pretrain.vision_language.data.answers import convert_ans, load_table
from capt.pretrain.vision_language.module import VisionLanguageModule
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

logger = logging.getLogger(__name__)


REGIONS = "regions.json"


class FeatureKind(Record):
    """The origin of the features of a store, and their number of columns."""

    feature_size: Annotated[int, Field(gt=0, le=1 << 20)]
    features_of: dict[str, Any]

    @classmethod
    def of(cls, store: RegionStore) -> FeatureKind:
        """Return the kind of the features in an open store."""
        return cls(feature_size=store.manifest.feature_size, features_of=store.manifest.features_of)

    def save(self, folder: Path) -> Path:
        """Write ``regions.json`` into ``folder``; returns the file, which travels with every checkpoint."""
        path = folder / REGIONS
        write_json(path, self.model_dump())
        return path


def read_features(checkpoint: Path) -> FeatureKind | None:
    """Return the kind of features that the model of a checkpoint was trained on; None where it does not say."""
    try:
        return read_record(FeatureKind, checkpoint / REGIONS, error=CheckpointError)
    except FileNotFoundError:
        return None


def require_features(
    store: RegionStore, trained_on: FeatureKind | None, source: str, *, allow_other: bool | None = None
) -> None:
    """Refuse a store whose features are not of the kind that a model was trained on.

    Args:
        store: of the job.
        trained_on: the kind that the model has seen; None = unknown, and nothing is refused.
        source: names the model in the error.
        allow_other: another kind of the same size is meant, as ``data.allow_other_features`` of the job says; None for
            a job without this key, in which such features are never meant.

    Raises:
        CheckpointError: the size differs, or the kind does.
    """
    if trained_on is None:
        return
    mine = FeatureKind.of(store)
    if mine.feature_size != trained_on.feature_size:
        raise CheckpointError(
            f"data.regions {store.folder} has {mine.feature_size} features a region, and {source} was trained on "
            f"{trained_on.feature_size}: name the store that it was trained on, or one made in the same way"
        )
    different = feature_differences(mine.features_of, trained_on.features_of)
    if different and not allow_other:
        remedy = "name a store made in the same way"
        if allow_other is not None:
            remedy += ", or data.allow_other_features=true if they are meant"
        raise CheckpointError(
            f"data.regions {store.folder} holds features of another kind than {source} was trained on ({different}): "
            f"such features mean other things; {remedy}"
        )


def open_store(
    checkpoint: Path,
    data: VisionLanguageData,
    regions: Path | None,
    verifier: Verifier,
    *,
    allow_other: bool | None = None,
) -> RegionStore:
    """Open the store that a checkpoint is evaluated on: ``regions``, or that of its job.

    Raises:
        ConfigError: no store is named.
        DataError: the job's store is not there: it has moved, or the run names it from another folder than this one.
        CheckpointError: as `require_features`.
    """
    place = regions or data.require_files()
    if regions is None and isinstance(place, Path) and not place.exists():
        raise DataError(
            f"the run's data.regions {place} is not there, as seen from {Path.cwd()}: -o regions=STORE (of capt "
            "predict --regions STORE)"
        )
    store = RegionStore.open(place, verifier, cache=data.cache)
    require_features(store, read_features(checkpoint), str(checkpoint), allow_other=allow_other)
    return store


TASK = "capt_vl"
ANSWERS = "answers.json"
"""The answer table in a checkpoint whose model has an answer head: a JSON list in the order of the classes."""
_DECIDED = ("vocab_size", "pad_id", "feature_size", "object_classes", "attribute_classes", "answers")


@dataclass(frozen=True)
class LoadedVisionLanguageModel:
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


def load_model(path: Path) -> LoadedVisionLanguageModel:
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
    module = load_module(checkpoint, "model", lambda: VisionLanguageModule(job, config))
    return LoadedVisionLanguageModel(checkpoint, module.eval(), tokenizer, job, answers)


def read_answers(checkpoint: Path, classes: int) -> tuple[str, ...] | None:
    """Read the answers of ``classes`` classes in a verified checkpoint; None for a model without answers.

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


_ANSWERS = "answer_head.outer."


@dataclass(frozen=True)
class Start:
    """Weights to start from.

    Attributes:
        source: ``model.init``, as the job names it.
        pretrained: its sizes, weights and answers.
        features: the kind of region features that it has seen; None where it does not say.
        tokenizer_folder: None where it has no tokenizer.
    """

    source: Path
    pretrained: PretrainedLxmert
    features: FeatureKind | None = None
    tokenizer_folder: Path | None = None

    @property
    def config(self) -> LxmertConfig:
        """Its sizes."""
        return self.pretrained.config

    def named(self, answers: tuple[str, ...] | None) -> Start:
        """The same with these answers as the classes of its answer head."""
        return replace(self, pretrained=replace(self.pretrained, answers=answers))


def read_start(source: Path) -> Start:
    """Read a run or checkpoint of ``capt_vl``, or a Hugging Face folder (or hub id).

    Raises:
        CheckpointError: it is none of these, or is damaged.
        DataError: its tokenizer cannot be read.
    """
    found = local_folder(source)
    if is_lxmert(found):
        pretrained = read_lxmert(found)
        folder = None if pretrained.tokenizer is None else local_folder(source, TOKENIZER_FILES)
        return Start(source, pretrained, tokenizer_folder=folder)
    trained = load_model(found)
    model = trained.model
    pretrained = PretrainedLxmert(model.config, dict(model.state_dict()), trained.tokenizer, trained.answers)
    return Start(source, pretrained, read_features(trained.checkpoint), trained.checkpoint / "tokenizer")


def named_answers(start: Start, table: Path | Literal["new"] | None) -> tuple[str, ...] | None:
    """Return the classes of the answer head, as the source or ``table`` (``model.init_answers``) says.

    None is returned where there is no such head, or where a new one shall begin.

    Raises:
        CheckpointError: nothing says it, or ``table`` has another number of answers.
    """
    classes = start.config.answers or 0
    if table == "new":
        return None
    if table is None:
        if classes and start.pretrained.answers is None:
            raise CheckpointError(
                f"model.init {start.source}: it does not say what the {classes:,} classes of its answer head are; name "
                "their table, model.init_answers=all_ans.json (LXMERT's), or set model.init_answers=new for a new head"
            )
        return start.pretrained.answers
    answers = load_table(table).answers
    if len(answers) != classes:
        raise CheckpointError(
            f"model.init_answers {table} has {len(answers)} answers, and the answer head of {start.source} {classes}: "
            "it is not its table"
        )
    return answers


def answer_rows(
    before: Mapping[str, Tensor], names: Sequence[str], answers: Sequence[str], source: str
) -> dict[str, Tensor]:
    """Make ``weight`` and ``bias`` of a layer with a row for each of ``answers``, as LXMERT's ``loadLXMERTQA`` does.

    Rows are taken by the text of their answer, as it is or else converted (`convert_ans`); a new answer begins at 0.
    The log says how many are taken.

    Args:
        before: ``weight`` and ``bias`` of the layer in ``source``.
        names: the answers of its rows.
        answers: the answers of the rows to make.
        source: what to call it in the log.
    """
    # Reversed, so that the first of equal texts counts; one that is equal as it is goes before a converted one.
    rows = {convert_ans(text): row for row, text in reversed(list(enumerate(names)))}
    rows |= {text: row for row, text in reversed(list(enumerate(names)))}
    index = torch.tensor([rows.get(text, rows.get(convert_ans(text), -1)) for text in answers])
    taken = {part: tensor[index.clamp_min(0)] for part, tensor in before.items()}
    for tensor in taken.values():
        tensor[index < 0] = 0.0
    known = int((index >= 0).sum())
    logger.info(
        "answer head: %d of %d answers from %s, %d new ones begin at 0",
        *(known, len(answers), source, len(answers) - known),
    )
    return taken


def start_from(model: LxmertModel, start: Start, answers: Sequence[str] | None) -> None:
    """Copy the weights into ``model``; the answer head is taken over answer by answer, by their text (`answer_rows`).

    Heads for other classes start anew, and so does an answer head of which `named_answers` knows no answers. One that
    the job has no use for (``answers`` is None) is left out. The log says so.

    Raises:
        CheckpointError: the encoder does not fit.
    """
    pretrained = start.pretrained
    head = {name.removeprefix(_ANSWERS): x for name, x in pretrained.state.items() if name.startswith(_ANSWERS)}
    if head and answers is None:
        logger.info("answer head: that of %s (%d answers) is left out", start.source, pretrained.config.answers or 0)
    state = {name: tensor for name, tensor in pretrained.state.items() if not name.startswith(_ANSWERS)}
    if head and answers is not None and pretrained.answers is not None:
        taken = answer_rows(head, pretrained.answers, answers, str(start.source))
        state |= {_ANSWERS + part: tensor for part, tensor in taken.items()}
    copy_weights(model, replace(pretrained, state=state), str(start.source))

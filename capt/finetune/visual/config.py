"""The configuration of the ``visual`` job: LXMERT fine-tuned on VQA, GQA or NLVR2. No torch here.

Defaults are LXMERT's recipe (Tan and Bansal 2019, section 4.2, and their code): batches of 32, 4 epochs, 10% of
warmup and a linear decay to 0, gradients clipped at 5, weight decay 0.01. Two things differ: Adam corrects its bias,
and biases and LayerNorm do not decay, as in every job here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from capt.finetune.config import FineTuningJob, FineTuningSchedule
from capt.pretrain.base.errors import did_you_mean, shown
from capt.pretrain.config.base import PositiveInt, Section
from capt.pretrain.config.schema import BatchSection, OptimizerSection
from capt.pretrain.models.architecture import RECOMPUTE, Recompute
from capt.pretrain.models.hf_config import FolderOrId
from capt.pretrain.models.lxmert.config import INIT_ANSWERS, InitAnswers, LxmertConfig
from capt.pretrain.vision_language.config import (
    MICROWORLD_TASKS,
    SentenceTokenizer,
    VisionLanguageData,
    describe_inputs,
    without_microworld,
)

SCRATCH = Path("scratch")
"""The value of ``model.init`` for random weights."""


class VisualTask(NamedTuple):
    """A picture task: what the loop, the files, the result files and the report need to know of it.

    Attributes:
        key: the value of ``data.task``.
        name: the name that papers write, and the column of the report.
        pictures: how many a row shows.
        answers: whether rows are questions with an answer table; else they are statements, true or false.
        metrics: what validation reports, the one that selects models first.
        results: the module of its result file, with the functions of `capt.finetune.visual.dumps.ResultFile`;
            ``scores`` is for statements alone.
        stem: how many fields of an identifier, from the left, rows share that were written together; 0 = rows of one
            picture were.
        rare_answers: whether a built table has answers that occur less than ``data.minimum_answers`` times.
    """

    key: str
    name: str
    pictures: int
    answers: bool
    metrics: tuple[str, ...]
    results: str
    stem: int = 0
    rare_answers: bool = True


TASKS = {
    task.key: task
    for task in (
        VisualTask("vqa", "VQA", 1, True, ("accuracy",), "capt.finetune.visual.vqa", rare_answers=False),
        VisualTask("gqa", "GQA", 1, True, ("accuracy",), "capt.finetune.visual.gqa"),
        VisualTask("nlvr2", "NLVR2", 2, False, ("accuracy", "consistency"), "capt.finetune.visual.nlvr", stem=2),
    )
}
"""The picture tasks by the value of ``data.task``, in the order of the report's columns."""


def _known_task(name: str) -> str:
    if name not in TASKS:
        raise ValueError(f"unknown task {shown(name)}; {did_you_mean(name, sorted(TASKS))}")
    return name


class VisualData(VisionLanguageData):
    """The task, its files, and the region store that holds its pictures."""

    task: Annotated[str, AfterValidator(_known_task)] = Field(description=f"one of {', '.join(TASKS)}")
    validation_share: float | None = Field(
        None, gt=0, lt=1, description="without data.validation: this share of data.train, whole groups of rows that "
        "share their pictures, is what models are selected on"
    )  # fmt: skip
    bucketing: bool = Field(True, description="put rows of similar size into a batch; false = plain shuffled order")
    shuffle: bool = Field(True, description="false = file order in every epoch, without bucketing")
    max_train: PositiveInt | None = Field(None, description="train on this many rows, the same ones for every seed")
    allow_other_features: bool = Field(
        False, description="continue where model.init was trained on features of another kind than the store's"
    )

    @property
    def visual_task(self) -> VisualTask:
        """The task that ``task`` names."""
        return TASKS[self.task]

    @model_validator(mode="after")
    def _has_data(self) -> VisualData:
        if self.source == "microworld" and self.task not in MICROWORLD_TASKS:
            raise ValueError(
                f"data.source=microworld has no files of {self.task}: set data.source=files, and name data.regions and "
                "data.train"
            )
        if self.train and not self.validation and self.validation_share is None:
            raise ValueError(
                "data.validation is missing: name the files to select models on, or set data.validation_share=0.1"
            )
        return self


class VisualModel(Section):
    """The LXMERT to start from, and the dropouts of fine-tuning."""

    removed: ClassVar = {"augment": "none"}

    init: FolderOrId = Field(
        description="a run or checkpoint of ours, a Hugging Face folder, USER/NAME[@REV] of the hub, or scratch for "
        "random weights"
    )
    init_answers: InitAnswers | None = Field(None, description=INIT_ANSWERS)
    encoder: LxmertConfig | None = Field(
        None, description="with init=scratch: the encoder's sizes; else those of model.init take their place"
    )
    dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of embeddings and layer outputs")
    attention_dropout: NonNegativeFloat = Field(0.1, lt=1, description="dropout of the attention weights")
    activation_checkpointing: Recompute = Field("none", description=RECOMPUTE)

    @property
    def scratch(self) -> bool:
        """True where training starts from random weights."""
        return self.init == SCRATCH

    @model_validator(mode="after")
    def _one_init(self) -> VisualModel:
        if self.encoder is not None and self.encoder.init is not None:
            raise ValueError("model.encoder.init: not used here; model.init names what to start from")
        if self.encoder is not None and self.encoder.init_answers is not None:
            raise ValueError("model.encoder.init_answers: not used here; model.init_answers is the key")
        return self


class VisualSchedule(FineTuningSchedule):
    """LXMERT's four epochs."""

    epochs: PositiveFloat | None = Field(4.0, description="passes over the training data; null = max_steps alone")
    warmup_ratio: NonNegativeFloat | None = Field(0.1, le=1, description="of max_steps; null = warmup_steps")


class VisualOptimizer(OptimizerSection):
    """Adam as LXMERT was fine-tuned."""

    lr: PositiveFloat = Field(5e-5, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of Adam's two moments; of adamw, lamb and muon")
    clip: NonNegativeFloat = Field(5.0, description="largest global gradient norm; 0 = off")


class VisualJob(FineTuningJob):
    """A ``visual`` job: a pretrained LXMERT fine-tuned on questions or statements about pictures."""

    data: VisualData
    tokenizer: SentenceTokenizer = SentenceTokenizer()
    model: VisualModel
    batch: BatchSection = BatchSection(global_=32, micro=32)
    schedule: VisualSchedule = VisualSchedule()
    optimizer: VisualOptimizer = VisualOptimizer()

    @model_validator(mode="after")
    def _fits_the_task(self) -> VisualJob:
        if self.data.answers is not None and not self.data.visual_task.answers:
            raise ValueError(f"data.answers: {self.data.task} has statements, which are true or false; leave it out")
        return self

    @classmethod
    def replaced_by(cls, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
        """Files that are named later take the place of the microworld."""
        return without_microworld(below, above)

    def metric_names(self) -> frozenset[str]:
        """The task's metrics, the loss, and what tells a model that has learnt nothing."""
        return frozenset((*self.data.visual_task.metrics, "loss", "degenerate", "baseline"))

    def check_inputs(self) -> list[str]:
        """Describe the store, the files, the tokenizer and ``model.init``; no row is read."""
        lines = describe_inputs(self.data, None if self.model.scratch else self.model.init, self.tokenizer)
        return lines + (["model.init: random weights"] if self.model.scratch else [])

    def with_encoder(self, encoder: LxmertConfig) -> VisualJob:
        """The job with the sizes of the model that it trains filled in."""
        return self.model_copy(update={"model": self.model.model_copy(update={"encoder": encoder})})


JOB = VisualJob

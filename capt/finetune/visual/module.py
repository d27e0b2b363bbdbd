"""LXMERT under a head for one task: the pooled states of a sentence with each of its pictures, side by side."""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from capt.finetune.load import FineTuned, load_fine_tuned
from capt.finetune.visual.config import VisualJob
from capt.pretrain.base.errors import CheckpointError, DataError
from capt.pretrain.models.layers import initialise_weights
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.layers import LxmertEncoder
from capt.pretrain.models.lxmert.model import AnswerHead, Pooler
from capt.pretrain.vision_language.data.answers import AnswerTable, load_table
from capt.pretrain.vision_language.load import ANSWERS


class PictureClassifier(nn.Module):
    """Logits from the pooled states of ``p`` pairs of one sentence and a picture (Tan and Bansal 2019, section 4.2).

    With one picture it is the model of VQA and GQA, with two that of NLVR2. Parameters of the encoder and the pooler
    have the names that they have in `capt.pretrain.models.lxmert.model.LxmertModel`.

    Args:
        config: the encoder.
        outputs: number of logits.
        pictures: how many a sentence is about.
    """

    def __init__(self, config: LxmertConfig, outputs: int, pictures: int) -> None:
        super().__init__()
        h = config.hidden
        self.encoder = LxmertEncoder(config)
        self.pooler = Pooler(h)
        self.answer_head = AnswerHead(h, outputs, inputs=pictures * h, eps=config.layer_norm_eps)
        initialise_weights(self, config.initializer_range)

    def forward(
        self,
        tokens: Int[Tensor, "n L"],
        features: Float[Tensor, "n p R f"],
        boxes: Float[Tensor, "n p R 4"],
        present: Bool[Tensor, "n p R"] | None,
        padded: bool,
    ) -> Float[Tensor, "n outputs"]:
        """Logits in fp32, also under autocast. Arguments are those of `capt.finetune.visual.rows.PictureInputs`."""
        n, pictures = features.shape[:2]
        first = self.encoder.first(
            tokens.repeat_interleave(pictures, 0),  # the pairs of a sentence follow one another
            features.flatten(0, 1).to(_dtype(self)),
            boxes.flatten(0, 1),
            padded=padded,
            present=None if present is None else present.flatten(0, 1),
        )
        return self.answer_head(self.pooler(first).view(n, -1)).float()  # type: ignore[no-any-return]


def _dtype(module: nn.Module) -> torch.dtype:
    """The type of the weights: stores keep features in half precision."""
    return next(module.parameters()).dtype


# A fine-tuned model back from a checkpoint, which needs nothing beside itself but the region store.


FineTunedLxmert = FineTuned[VisualJob, PictureClassifier]
"""A checkpoint of a ``visual`` job, loaded."""


def classifier(job: VisualJob, answers: AnswerTable | None) -> PictureClassifier:
    """A freshly initialised model for a job whose encoder is known."""
    assert job.model.encoder is not None, "VisualJob.with_encoder fills it in"
    outputs = 2 if answers is None else len(answers)
    return PictureClassifier(job.model.encoder, outputs, job.data.visual_task.pictures)


def load_visual(path: Path) -> FineTunedLxmert:
    """Load a checkpoint of a ``visual`` job, or the best one of a run, after verifying every file.

    Raises:
        CheckpointError: nothing is there, it is damaged, or it is the checkpoint of another kind of job.
    """
    return load_fine_tuned(path, VisualJob, "visual", _build)


def read_answers(job: VisualJob, checkpoint: Path) -> AnswerTable | None:
    """The answer table of a checkpoint; None for statements. Raises ``CheckpointError`` where it is damaged."""
    if not job.data.visual_task.answers:
        return None
    try:
        return load_table(checkpoint / ANSWERS)
    except (DataError, FileNotFoundError) as error:
        raise CheckpointError(f"{checkpoint}: no usable answer table: {error}") from None


def _build(job: VisualJob, checkpoint: Path) -> PictureClassifier:
    if job.model.encoder is None:
        raise CheckpointError(f"{checkpoint / 'config.yaml'}: model.encoder is not set; every visual checkpoint has it")
    return classifier(job, read_answers(job, checkpoint))

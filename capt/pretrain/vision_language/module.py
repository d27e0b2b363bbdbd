"""The module that the engine wraps: LXMERT with its heads, and the temperature, which may be learned."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from capt.pretrain.contrast.temperature import Schedule
from capt.pretrain.contrastive.term import build_schedule
from capt.pretrain.data.corruption import IGNORE
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.model import LxmertModel, LxmertOutput
from capt.pretrain.vision_language.batches import VisionLanguageBatch
from capt.pretrain.vision_language.config import ObjectivesSection, VisionLanguageJob


class VisionLanguageOutput(NamedTuple):
    """The model's output and the temperature of this step."""

    lxmert: LxmertOutput
    temperature: float | Tensor


class VisionLanguageModule(nn.Module):
    """LXMERT + temperature schedule: ``temperature(step)`` is a number, or a tensor with a gradient if learned."""

    def __init__(self, job: VisionLanguageJob, config: LxmertConfig) -> None:
        super().__init__()
        self.lxmert = LxmertModel(config, contrast=job.contrast.weight > 0)
        self.temperature: Schedule = build_schedule(job.contrast.temperature, job.schedule.max_steps)

    def forward(self, batch: VisionLanguageBatch, *, step: int, heads: bool = True) -> VisionLanguageOutput:
        """Both views of ``batch`` through the model (see `LxmertModel.forward`)."""
        dtype = self.lxmert.matching.weight.dtype  # stores keep features in half precision
        output = self.lxmert(
            batch.tokens, batch.corrupted, batch.masked, batch.labels, batch.features.to(dtype),
            batch.corrupted_features().to(dtype), batch.boxes, batch.present if batch.missing else None,
            batch.masked_regions, padded=batch.padded, heads=heads,
        )  # fmt: skip
        return VisionLanguageOutput(output, self.temperature(step))


# The losses of LXMERT's pretraining (Tan and Bansal 2019, section 3.1; its released code decides the details).
#
# Every function returns a sum over a micro-batch. `Counts` says by what a sum is divided: numbers of words, pairs and
# regions of the whole optimizer step, over all micro-batches and ranks, so that one process and many, one batch and an
# accumulated one, have the same loss.


class LossSum(NamedTuple):
    """A loss summed over its rows, in nats or units of its own, and how many rows were predicted right, if any are."""

    loss: Float[Tensor, ""]
    correct: Int[Tensor, ""] | None = None


class Counts(NamedTuple):
    """The numbers by which the sums of losses of an optimizer step are divided.

    Attributes:
        words: masked words.
        pairs: pairs of a sentence and a picture.
        regions: regions of the pictures, masked or not.
        answers: questions with an answer.
        masked: masked regions.
    """

    words: float
    pairs: float
    regions: float
    answers: float
    masked: float

    @classmethod
    def of(cls, batch: VisionLanguageBatch) -> Counts:
        """The counts of a micro-batch that is in host memory."""
        real = batch.matched != IGNORE
        labelled = 0 if batch.answers is None else int((batch.answers != IGNORE).sum())
        words = int((batch.labels != IGNORE).sum())
        regions = int(batch.present[real].sum())
        return cls(words, int(real.sum()), regions, labelled, len(batch.masked_regions))


def divisors(counts: Float[Tensor, " 5"], region_rate: float, scope: str = "all") -> dict[str, Tensor]:
    """Divisor of each loss's sum, from the numbers in `Counts` over the whole step.

    The losses of regions are means over *all* regions, masked or not, times ``1 / region_rate``: LXMERT's normaliser,
    1 / 0.15. A count of 0 becomes infinity: the loss of no rows is 0, and by this it is known as one not measured.
    """
    words, pairs, regions, answers, masked = torch.where(counts > 0, counts, torch.inf).unbind()
    regions = regions * region_rate
    of_masked = torch.where(masked.isinf(), masked, regions)
    classes = of_masked if scope == "masked" else regions
    return {
        "mlm": words, "matching": pairs, "objects": classes, "attributes": classes, "features": of_masked,
        "answers": answers,
    }  # fmt: skip


def matching_loss(logits: Float[Tensor, "n 2"], matched: Int[Tensor, " n"]) -> LossSum:
    r"""Loss of the matching head: :math:`-\sum_i \log p(y_i)`, y = 1 for a matched pair."""
    return _cross_entropy(logits, matched)


def answer_loss(logits: Float[Tensor, "n answers"], answers: Int[Tensor, " n"]) -> LossSum:
    r"""Answers of matched questions: :math:`-\sum_i \log p(a_i)` over pairs with an answer (all others hold -100)."""
    return _cross_entropy(logits, answers)


def class_loss(
    logits: Float[Tensor, "n R c"],
    ids: Int[Tensor, "n R"],
    scores: Float[Tensor, "n R"],
    counted: Bool[Tensor, "n R"],
) -> LossSum:
    r"""Classes of regions, objects or attributes: :math:`-\sum_{ir} w_{ir} \log p(c_{ir})`.

    Args:
        logits: of every region.
        ids: what the detector said.
        scores: how sure it was, :math:`w`.
        counted: False for a region that is absent, or out of ``objectives.region_scope``.
    """
    rows = F.cross_entropy(_exact(logits).flatten(0, 1), ids.flatten(), reduction="none")
    weights = (scores * counted).flatten()
    return LossSum((rows * weights.to(rows.dtype)).sum())


def feature_loss(predicted: Float[Tensor, "m f"], features: Float[Tensor, "m f"]) -> LossSum:
    r"""Features of masked regions: :math:`\sum_r \frac1f \sum_k h(\hat v_{rk} - v_{rk})`, smooth L1 with beta 1.

    :math:`h(d) = d^2 / 2` for :math:`|d| < 1`, else :math:`|d| - 1/2`. The features are the original ones.
    """
    predicted = _exact(predicted)
    rows = F.smooth_l1_loss(predicted, features.to(predicted.dtype), reduction="none").mean(dim=1)
    return LossSum(rows.sum())


def loss_sums(output: LxmertOutput, batch: VisionLanguageBatch, section: ObjectivesSection) -> dict[str, LossSum]:
    """The sum of every loss whose head the model has and for which the batch holds labels, by its name."""
    sums = {
        "mlm": LossSum(output.mlm.loss_sum, output.mlm.correct),
        "matching": matching_loss(output.matching, batch.matched),
    }
    # Rows of IGNORE only fill a batch up, absent regions only a picture.
    real = (batch.matched != IGNORE).unsqueeze(1) & batch.present
    if section.region_scope == "masked":
        masked = torch.zeros_like(batch.present).flatten()
        masked[batch.masked_regions] = True
        counted = real & masked.view_as(real)
    else:
        counted = real
    if output.objects is not None and batch.object_ids is not None and batch.object_scores is not None:
        sums["objects"] = class_loss(output.objects, batch.object_ids, batch.object_scores, counted)
    if output.attributes is not None and batch.attribute_ids is not None and batch.attribute_scores is not None:
        sums["attributes"] = class_loss(output.attributes, batch.attribute_ids, batch.attribute_scores, counted)
    original = batch.features.flatten(0, 1)[batch.masked_regions]
    sums["features"] = feature_loss(output.features, original)
    if output.answers is not None and batch.answers is not None:
        sums["answers"] = answer_loss(output.answers, batch.answers)
    return sums


def _cross_entropy(logits: Tensor, labels: Tensor) -> LossSum:
    """Cross entropy and right predictions of the rows whose label is not -100."""
    logits = _exact(logits)
    loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE)
    correct = ((logits.argmax(dim=-1) == labels) & (labels != IGNORE)).sum()
    return LossSum(loss, correct)


def _exact(x: Tensor) -> Tensor:
    """At least fp32: logits may come in bf16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

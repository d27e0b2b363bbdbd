"""Every loss against its equation, written out in loops over numbers in double precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from capt.pretrain.models.heads import MLMOutput
from capt.pretrain.models.lxmert.model import LxmertOutput
from capt.pretrain.vision_language.batches import VisionLanguageBatch
from capt.pretrain.vision_language.config import ObjectivesSection
from capt.pretrain.vision_language.module import Counts, divisors, loss_sums
from capt.pretrain.vision_language.validation import only_first

N, R, L, F, OBJECTS, ATTRIBUTES, ANSWERS = 5, 4, 6, 3, 7, 2, 9


def _batch(seed: int = 0, **changes: Any) -> VisionLanguageBatch:
    """Picture i has 1 + i % R regions; pairs 1 and 3 have an answer; region 0 of pictures 0, 2 and 4 is masked."""
    torch.manual_seed(seed)
    present = torch.arange(R) < 1 + torch.arange(N).unsqueeze(1) % R
    answers = torch.full((N,), -100)
    answers[1], answers[3] = 4, 0
    fields: dict[str, Any] = {
        "tokens": torch.randint(5, 90, (N, L)), "corrupted": torch.randint(5, 90, (N, L)),
        "masked": torch.tensor([1, 8, 9, 27]), "labels": torch.tensor([6, 7, 8, 9]),
        "features": torch.randn(N, R, F).double() * present.unsqueeze(-1), "boxes": torch.rand(N, R, 4),
        "present": present, "zeroed": torch.zeros(N, R, dtype=torch.bool), "replaced": torch.tensor([2 * R]),
        "replacements": torch.randn(1, F), "masked_regions": torch.tensor([0, 2 * R, 4 * R]),
        "object_ids": torch.randint(0, OBJECTS, (N, R)), "object_scores": torch.rand(N, R) * present,
        "attribute_ids": torch.randint(0, ATTRIBUTES, (N, R)), "attribute_scores": torch.rand(N, R) * present,
        "matched": torch.tensor([1, 0, 1, 1, 0]), "answers": answers, "ids": torch.arange(N),
        "numbers": torch.arange(N), "padded": False, "missing": True,
    }  # fmt: skip
    return VisionLanguageBatch(**{**fields, **changes})


def _output(batch: VisionLanguageBatch, seed: int = 1) -> LxmertOutput:
    torch.manual_seed(seed)

    def logits(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    m = len(batch.masked_regions)
    mlm = MLMOutput(torch.tensor(8.5), torch.tensor(1), torch.tensor(len(batch.labels)))
    return LxmertOutput(
        None, None, mlm, logits(N, 2), logits(N, R, OBJECTS), logits(N, R, ATTRIBUTES), 3 * logits(m, F),
        logits(N, ANSWERS),
    )  # fmt: skip


def _nll(logits: list[float], label: int) -> float:
    return math.log(sum(math.exp(x) for x in logits)) - logits[label]


def _reference(out: LxmertOutput, batch: VisionLanguageBatch, scope: str) -> dict[str, float]:
    """Means as LXMERT has them: the losses of regions over all regions, times 1 / 0.15."""
    regions = [(i, r) for i in range(N) for r in range(R) if batch.present[i, r]]
    masked = [divmod(int(place), R) for place in batch.masked_regions]
    labelled = [i for i in range(N) if batch.answers is not None and batch.answers[i] >= 0]
    result = {
        "mlm": 8.5 / len(batch.labels),
        "matching": sum(_nll(out.matching[i].tolist(), int(batch.matched[i])) for i in range(N)) / N,
        "answers": sum(_nll(out.answers[i].tolist(), int(batch.answers[i])) for i in labelled) / max(1, len(labelled)),
    }
    for name, logits, ids, scores in (
        ("objects", out.objects, batch.object_ids, batch.object_scores),
        ("attributes", out.attributes, batch.attribute_ids, batch.attribute_scores),
    ):
        total = 0.0
        for i, r in regions:
            if scope == "all" or (i, r) in masked:
                total += float(scores[i, r]) * _nll(logits[i, r].tolist(), int(ids[i, r]))
        result[name] = total / len(regions) / 0.15
    total = 0.0
    for row, (i, r) in enumerate(masked):
        for k in range(F):
            d = abs(float(out.features[row, k].detach()) - float(batch.features[i, r, k]))
            total += (d * d / 2 if d < 1 else d - 0.5) / F
    result["features"] = total / len(regions) / 0.15
    return result


def _means(out: LxmertOutput, batch: VisionLanguageBatch, section: ObjectivesSection) -> dict[str, float]:
    by = divisors(torch.tensor(Counts.of(batch), dtype=torch.float64), section.region_rate)
    return {name: float(each.loss.detach()) / float(by[name]) for name, each in loss_sums(out, batch, section).items()}


@pytest.mark.parametrize("scope", ["all", "masked"])
def test_every_loss_is_its_equation(scope: str) -> None:
    batch = _batch()
    out = _output(batch)
    means = _means(out, batch, ObjectivesSection(region_scope=scope, answers=1.0))
    expected = _reference(out, batch, scope)
    assert means.keys() == expected.keys()
    for name, value in expected.items():
        assert means[name] == pytest.approx(value, rel=1e-6), name  # the confidences are fp32
        assert value > 0.01


def test_the_scope_is_a_part_of_the_regions() -> None:
    batch = _batch()
    out = _output(batch)
    everywhere, masked = (_means(out, batch, ObjectivesSection(region_scope=scope)) for scope in ("all", "masked"))
    for name in ("objects", "attributes"):
        assert 0 < masked[name] < everywhere[name]
    assert masked["features"] == everywhere["features"]


def test_without_any_answer_the_loss_is_zero_and_has_a_gradient() -> None:
    """A mean over no question would be NaN, and NaN everywhere after the step."""
    batch = _batch(answers=torch.full((N,), -100))
    out = _output(batch)
    section = ObjectivesSection(answers=1.0)
    assert _means(out, batch, section)["answers"] == 0.0
    loss_sums(out, batch, section)["answers"].loss.backward()
    assert out.answers is not None
    assert float(out.answers.grad.abs().sum()) == 0.0


def test_nothing_masked_is_no_loss() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    batch = _batch(masked_regions=empty, masked=empty, labels=empty)
    means = _means(_output(batch), batch, ObjectivesSection(region_scope="masked"))
    assert (means["features"], means["objects"], means["attributes"]) == (0.0, 0.0, 0.0)


def test_right_predictions_are_counted_where_there_is_a_label() -> None:
    batch = _batch()
    out = _output(batch)
    sums = loss_sums(out, batch, ObjectivesSection())
    assert int(sums["matching"].correct) == int((out.matching.argmax(1) == batch.matched).sum())
    assert int(sums["answers"].correct) == sum(int(out.answers[i].argmax() == batch.answers[i]) for i in (1, 3))
    assert sums["objects"].correct is None


@pytest.mark.parametrize("scope", ["all", "masked"])
@pytest.mark.parametrize("valid", range(N + 1))
def test_rows_that_fill_up_a_batch_count_for_nothing(valid: int, scope: str) -> None:
    """Sums and counts of the first rows and of the others make those of all of them."""
    batch = _batch()
    out = _output(batch)
    section = ObjectivesSection(region_scope=scope)
    first = only_first(batch, valid)
    kept = torch.isin(batch.masked_regions, first.masked_regions)
    of_first = out._replace(features=out.features[kept])
    sums = loss_sums(of_first, first, section)
    rest = _only_last(batch, valid)
    of_rest = loss_sums(out._replace(features=out.features[~kept]), rest, section)
    for name, whole in loss_sums(out, batch, section).items():
        if name != "mlm":  # summed by the head
            torch.testing.assert_close(sums[name].loss + of_rest[name].loss, whole.loss)
    together = [a + b for a, b in zip(Counts.of(first), Counts.of(rest), strict=True)]
    assert together == list(Counts.of(batch))
    assert (first.labels >= 0).sum() == sum(int(place) < valid * L for place in batch.masked)


def _only_last(batch: VisionLanguageBatch, start: int) -> VisionLanguageBatch:
    changes = vars(batch).copy()
    changes["matched"] = torch.where(torch.arange(N) < start, -100, batch.matched)
    changes["answers"] = torch.where(torch.arange(N) < start, -100, batch.answers)
    changes["labels"] = torch.where(batch.masked < start * L, -100, batch.labels)
    changes["masked_regions"] = batch.masked_regions[batch.masked_regions >= start * R]
    return VisionLanguageBatch(**changes)


def test_logits_in_half_precision_are_summed_in_single() -> None:
    batch = _batch(features=_batch().features.float())
    out = _output(batch)
    halves = LxmertOutput(*(x.bfloat16() if isinstance(x, Tensor) else x for x in out))
    for name, each in loss_sums(halves, batch, ObjectivesSection()).items():
        if name != "mlm":
            assert each.loss.dtype == torch.float32


def test_what_the_noise_leaves_of_the_features() -> None:
    zeroed = torch.zeros(N, R, dtype=torch.bool)
    zeroed[4, 0] = True
    batch = _batch(zeroed=zeroed)
    noisy = batch.corrupted_features()
    assert (noisy[4, 0] == 0).all()
    assert torch.equal(noisy[2, 0], batch.replacements[0].double())
    untouched = torch.ones(N, R, dtype=torch.bool)
    untouched[4, 0] = untouched[2, 0] = False
    assert torch.equal(noisy[untouched], batch.features[untouched])
    assert not torch.equal(noisy, batch.features), "the originals stay"


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, set()),
        ({"answers": torch.full((N,), -100)}, {"answers"}),
        ({"answers": None}, {"answers"}),
        ({"labels": torch.full((4,), -100)}, {"mlm"}),
        ({"masked_regions": torch.zeros(0, dtype=torch.long)}, {"features"}),
        ({"matched": torch.full((N,), -100)}, {"matching", "objects", "attributes", "features"}),
    ],
)
def test_what_a_step_does_not_hold_is_known_by_its_divisor(changes: dict[str, Any], missing: set[str]) -> None:
    """Its sum over infinity is 0, and no value of it may be written down."""
    batch = _batch(**changes)
    by = divisors(torch.tensor(Counts.of(batch), dtype=torch.float64), 0.15)
    assert {name for name, value in by.items() if value.isinf()} == missing
    for name, each in loss_sums(_output(batch), batch, ObjectivesSection(answers=1.0)).items():
        if name in missing and name not in ("mlm", "features"):  # whose sums come from the model's output here
            assert float(each.loss.detach()) == 0.0
    masked_only = divisors(torch.tensor(Counts.of(batch), dtype=torch.float64), 0.15, "masked")
    assert masked_only["objects"].isinf() == by["features"].isinf()

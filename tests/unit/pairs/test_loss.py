"""Effect of a source's own settings on the loss of a step: own negatives alone, a temperature, duplicates."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from capt.pretrain.pairs.config import PairContrast
from capt.pretrain.pairs.distillation_config import PairDistillation
from capt.pretrain.pairs.loss import PairTerm
from capt.pretrain.pairs.views import PairViews, Part


def _views(**changes: object) -> PairViews:
    torch.manual_seed(0)
    s, d, h = (normalize(torch.randn(n, 6, dtype=torch.float64), dim=1) for n in (4, 4, 5))
    given = {"negatives": h, "negative_ids": torch.arange(10, 15), "owners": torch.tensor([0, 0, 1, 2, 3])}
    return PairViews(s, d, torch.arange(4), 0.2, **{**given, **changes})  # type: ignore[arg-type]


def _by_definition(views: PairViews, seen: list[tuple[list[int], list[int]]]) -> float:
    """InfoNCE of each query against some documents and some hard negatives."""
    assert views.negatives is not None
    losses = []
    for i, (documents, hard) in enumerate(seen):
        keys = torch.cat([views.s_hat[i : i + 1], views.s_hat[documents], views.negatives[hard]])
        losses.append(-torch.log_softmax(keys @ views.s[i] / views.temperature, 0)[0])
    return float(torch.stack(losses).mean())


def test_a_query_sees_all_documents_and_the_hard_negatives_of_all() -> None:
    views = _views()
    expected = _by_definition(views, [([j for j in range(4) if j != i], list(range(5))) for i in range(4)])
    assert abs(float(PairTerm(PairContrast(), 6, 4).loss(views, step=0)) - expected) < 1e-12


def test_a_source_without_negatives_in_the_batch_sees_its_own_alone() -> None:
    views = _views(parts=(Part("contrast", 1.0, (0,), own_alone=True),))
    expected = _by_definition(views, [([], [0, 1]), ([], [2]), ([], [3]), ([], [4])])
    for section in (PairContrast(), PairContrast(directions="gte"), PairContrast(queue=8, queue_share=1.0)):
        assert abs(float(PairTerm(section, 6, 4).loss(views, step=0)) - expected) < 1e-12


def test_what_is_the_same_is_no_negative_wherever_it_comes_from() -> None:
    """Samples 0 and 1 show the same thing, and hard negative 4 is the document of sample 2."""
    ids = torch.tensor([7, 7, 2, 3])
    views = _views(negative_ids=torch.tensor([10, 11, 12, 13, 2]))
    views = PairViews(views.s, views.s_hat, ids, 0.2, None, views.negatives, views.negative_ids, views.owners)
    seen = [([2, 3], list(range(5))), ([2, 3], list(range(5))), ([0, 1, 3], [0, 1, 2, 3]), ([0, 1, 2], list(range(5)))]
    assert abs(float(PairTerm(PairContrast(), 6, 4).loss(views, step=0)) - _by_definition(views, seen)) < 1e-12


def test_each_part_of_a_step_counts_by_its_share() -> None:
    """A contrast at temperatures of its sources, a scored source, and a teacher of one of them, against definitions."""
    torch.manual_seed(1)
    s, d, h = (normalize(torch.randn(n, 6, dtype=torch.float64), dim=1) for n in (8, 8, 3))
    sources = torch.tensor([0, 1, 2, 2, 1, 0, 2, 2])
    owners, teacher = torch.tensor([0, 0, 5]), torch.tensor([1.0, 0.5, -1.0])
    taught = torch.tensor([2.0, *[torch.nan] * 4, 0.3, torch.nan, torch.nan])
    scores = torch.tensor([0.0, 0, 1, 3, 0, 0, 2, 2])
    parts = (Part("contrast", 0.5, (0, 1), taught=0.25), Part("cosent", 0.5, (2,), temperature=0.1))
    taus = torch.tensor([0.2, 0.3, 9, 9, 0.3, 0.2, 9, 9])
    views = PairViews(
        s, d, torch.arange(8), 9.0, negatives=h, negative_ids=torch.arange(20, 23), owners=owners, parts=parts,
        sources=sources, temperatures=taus, scores=scores, teacher=taught, negative_teacher=teacher,
    )  # fmt: skip
    rows = [0, 1, 4, 5]
    contrast = torch.stack([
        -torch.log_softmax(torch.cat([d[i : i + 1], d[[j for j in rows if j != i]], h]) @ s[i] / taus[i], 0)[0]
        for i in rows
    ]).mean()  # fmt: skip
    cosines = (s * d).sum(1)
    terms = [(cosines[i] - cosines[j]) / 0.1 for i in (2, 3, 6, 7) for j in (2, 3, 6, 7) if scores[i] < scores[j]]
    cosent = torch.stack([*terms, torch.zeros(())]).logsumexp(0)
    divergences = []
    for i, own in ((0, [0, 1]), (5, [2])):
        p = torch.log_softmax(torch.cat([taught[i : i + 1], teacher[own]]) / 2.0, 0)
        r = torch.log_softmax(torch.cat([d[i : i + 1], h[own]]) @ s[i] / taus[i], 0)
        divergences.append((p.exp() * (p - r)).sum())
    distilled = torch.stack(divergences).mean()
    term = PairTerm(PairContrast(queue=16), 6, 8, PairDistillation(weight=0.7, temperature=2.0))
    expected = 0.5 * contrast + 0.5 * cosent + 0.7 * 0.25 * distilled
    assert float(term.loss(views, step=0)) == pytest.approx(float(expected), rel=1e-6)
    reported = {name: float(value) for name, value in term.take_losses().items()}
    said = {"loss/pairs": contrast, "loss/cosent": cosent, "loss/distillation": distilled}
    assert reported == pytest.approx({name: float(value) for name, value in said.items()}, rel=1e-6)
    assert term.queue is not None
    kept = term.queue.negatives([d])[term.queue.ids >= 0].double()
    assert torch.allclose(kept.sort(0).values, d[rows].sort(0).values, atol=1e-6), "documents of the contrast alone"


def test_the_queue_holds_documents_alone() -> None:
    term = PairTerm(PairContrast(queue=8), 6, 4)
    views = _views()
    term.loss(views, step=0)
    assert term.queue is not None
    assert len(term.queue) == 4
    rows, _ = term.queue.negatives([views.s_hat]), term.queue.ids
    assert torch.allclose(rows[:4].double().sort(0).values, views.s_hat.sort(0).values, atol=1e-6)

"""Effect of a source's own settings on the loss of a step: own negatives alone, a temperature, duplicates."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from capt.pretrain.contrast.precisions import VectorPrecision, precision_rows
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


def test_everything_at_once_is_the_sum_that_the_definitions_say() -> None:
    """Precisions at two widths, hard negatives, a queue and a teacher's scores: the loss and its gradient, in loops."""
    torch.manual_seed(2)
    precisions: tuple[VectorPrecision, ...] = ("float", "int8", "binary")
    of_precisions, widths, of_widths = (1.0, 0.5, 2.0), (6, 3), (1.0, 0.25)
    section = PairContrast(
        queue=8, mask_duplicates=True, precisions=precisions, precision_weights=of_precisions, matryoshka=widths,
        matryoshka_weights=of_widths,
    )  # fmt: skip
    term = PairTerm(section, section.columns(6), 4, PairDistillation(weight=0.7, temperature=2.0))
    queries, documents, hard, *earlier = (torch.randn(n, 6, dtype=torch.float64) for n in (4, 4, 5, 4, 4))
    owners, ids, queued_ids, tau = [0, 0, 1, 2, 3], [0, 1, 2, 3], [20, 2, 21, 22], 0.2
    taught, taught_hard = torch.randn(4), torch.randn(5)

    def views(pooled: list[torch.Tensor], names: list[int], shift: int) -> PairViews:
        s, d, h = (precision_rows(rows, precisions) for rows in pooled)
        return PairViews(
            s, d, torch.tensor(names), tau, negatives=h, negative_ids=torch.arange(10, 15) + shift,
            owners=torch.tensor(owners), parts=(Part("contrast", 1.0, (0,), taught=1.0),), teacher=taught,
            negative_teacher=taught_hard,
        )  # fmt: skip

    term.loss(views([earlier[1], earlier[0], hard], queued_ids, 30), step=0)
    pooled = [rows.clone().requires_grad_() for rows in (queries, documents, hard)]
    loss = term.loss(views(pooled, ids, 0), step=1)
    loss.backward()

    expected, gradients = 0.0, [torch.zeros_like(rows) for rows in pooled]
    rounded = {
        "float": lambda x: (x, torch.ones_like(x)),
        "int8": lambda x: ((127 * x.tanh()).round(), 127 * (1 - x.tanh() ** 2)),
        "binary": lambda x: (torch.where(x > 0, 1.0, -1.0).double(), 1 - x.tanh() ** 2),
    }
    for precision, of_precision in zip(precisions, of_precisions, strict=True):
        values, slopes = zip(*(rounded[precision](rows) for rows in (queries, documents, hard)), strict=True)
        leaves = [each.clone().requires_grad_() for each in values]
        total = torch.zeros((), dtype=torch.float64)
        for width, of_width in zip(widths, of_widths, strict=True):
            s, d, h = (normalize(rows[:, :width], dim=1) for rows in leaves)
            q = normalize(rounded[precision](earlier[0])[0][:, :width], dim=1)
            for i in range(4):
                others = [d[j] for j in range(4) if j != i]
                old = [q[j] for j in range(4) if queued_ids[j] != ids[i]]
                logits = torch.stack([d[i], *others, *h, *old]) @ s[i] / tau
                contrast = logits.exp().sum().log() - logits[0]
                own = [j for j in range(5) if owners[j] == i]
                r = torch.log_softmax(torch.stack([d[i], *h[own]]) @ s[i] / tau, 0)
                p = torch.softmax(torch.stack([taught[i], *taught_hard[own]]).double() / 2.0, 0)
                total = total + of_precision * of_width * (contrast + 0.7 * (p * (p.log() - r)).sum()) / 4
        total.backward()
        expected += float(total.detach())
        for sum_, leaf, slope in zip(gradients, leaves, slopes, strict=True):
            sum_ += leaf.grad * slope
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)  # the queue and the teacher's scores are in fp32
    for rows, gradient in zip(pooled, gradients, strict=True):
        torch.testing.assert_close(rows.grad, gradient, rtol=1e-5, atol=1e-6)


def test_the_queue_holds_documents_alone() -> None:
    term = PairTerm(PairContrast(queue=8), 6, 4)
    views = _views()
    term.loss(views, step=0)
    assert term.queue is not None
    assert len(term.queue) == 4
    rows, _ = term.queue.negatives([views.s_hat]), term.queue.ids
    assert torch.allclose(rows[:4].double().sort(0).values, views.s_hat.sort(0).values, atol=1e-6)

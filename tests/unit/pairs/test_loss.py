"""What a source's own settings do to the loss of a step: own negatives alone, a temperature, duplicates."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from capt.pretrain.contrastive.views import Views
from capt.pretrain.pairs.config import PairContrast
from capt.pretrain.pairs.loss import PairTerm


def _views(**changes: object) -> Views:
    torch.manual_seed(0)
    s, d, h = (normalize(torch.randn(n, 6, dtype=torch.float64), dim=1) for n in (4, 4, 5))
    given = {"negatives": h, "negative_ids": torch.arange(10, 15), "owners": torch.tensor([0, 0, 1, 2, 3])}
    return Views(s, d, torch.arange(4), 0.2, **{**given, **changes})  # type: ignore[arg-type]


def _by_definition(views: Views, seen: list[tuple[list[int], list[int]]]) -> float:
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
    views = _views(own_alone=True)
    expected = _by_definition(views, [([], [0, 1]), ([], [2]), ([], [3]), ([], [4])])
    for section in (PairContrast(), PairContrast(directions="gte"), PairContrast(queue=8, queue_share=1.0)):
        assert abs(float(PairTerm(section, 6, 4).loss(views, step=0)) - expected) < 1e-12


def test_what_is_the_same_is_no_negative_wherever_it_comes_from() -> None:
    """Samples 0 and 1 show the same thing, and hard negative 4 is the document of sample 2."""
    ids = torch.tensor([7, 7, 2, 3])
    views = _views(negative_ids=torch.tensor([10, 11, 12, 13, 2]))
    views = Views(views.s, views.s_hat, ids, 0.2, None, views.negatives, views.negative_ids, views.owners)
    seen = [([2, 3], list(range(5))), ([2, 3], list(range(5))), ([0, 1, 3], [0, 1, 2, 3]), ([0, 1, 2], list(range(5)))]
    assert abs(float(PairTerm(PairContrast(), 6, 4).loss(views, step=0)) - _by_definition(views, seen)) < 1e-12


def test_the_queue_holds_documents_alone() -> None:
    term = PairTerm(PairContrast(queue=8), 6, 4)
    views = _views()
    term.loss(views, step=0)
    assert term.queue is not None
    assert len(term.queue) == 4
    rows, _ = term.queue.negatives([views.s_hat]), term.queue.ids
    assert torch.allclose(rows[:4].double().sort(0).values, views.s_hat.sort(0).values, atol=1e-6)

"""The oracle itself: the dense form equals the paper's equations written out term by term."""

from __future__ import annotations

import pytest
import torch

from tests.unit.contrast.reference import capt_gradient_by_terms, capt_loss_by_terms, capt_loss_dense, info_nce_dense
from tests.unit.contrast.support import near, relative, unit


@pytest.mark.parametrize("queued", [0, 7])
@pytest.mark.parametrize("temperature", [0.5, 0.1])
def test_dense_form_is_equation_4(temperature: float, queued: int) -> None:
    s, s_hat, queue = unit(4, 6, seed=0), unit(4, 6, seed=1), unit(queued, 6, seed=2)
    assert torch.allclose(
        capt_loss_dense(s, s_hat, temperature, queue), capt_loss_by_terms(s, s_hat, temperature, queue), rtol=1e-13
    )


def test_equation_2_counts_the_positive_once_and_never_the_anchor_itself() -> None:
    """Two samples in two dimensions, by hand: s_1 = s_hat_1 = (1,0), s_2 = s_hat_2 = (0,1), tau = 1."""
    s = torch.eye(2, dtype=torch.float64)
    per_anchor = torch.log(torch.tensor((torch.e + 2) / torch.e, dtype=torch.float64))
    assert torch.allclose(capt_loss_by_terms(s, s, 1.0, s[:0]), 4 * per_anchor)


def test_gradient_of_the_dense_form_is_equation_5() -> None:
    s, s_hat = unit(5, 6, seed=3), unit(5, 6, seed=4)
    for i in range(5):
        anchor = s[i : i + 1].clone().requires_grad_()
        others = torch.arange(5) != i
        keys = torch.cat([s_hat[others], s[others]])
        loss = info_nce_dense(anchor, s_hat[i : i + 1], keys, torch.ones(1, 8, dtype=torch.bool), 0.3).sum()
        (gradient,) = torch.autograd.grad(loss, anchor)
        assert relative(gradient[0], capt_gradient_by_terms(s, s_hat, 0.3, i)) < 1e-12


def test_equal_ids_are_no_negatives() -> None:
    s, s_hat, queue = unit(3, 6, seed=5), unit(3, 6, seed=6), unit(2, 6, seed=7)
    ids, queue_ids = torch.tensor([4, 9, 5]), torch.tensor([9, 1])
    masked = capt_loss_dense(s, s_hat, 0.2, queue, ids, queue_ids)
    plain = capt_loss_dense(s, s_hat, 0.2, queue)
    first_of_queue_only_for_others = sum(
        info_nce_dense(a[i : i + 1], b[i : i + 1], keys, torch.ones(1, len(keys), dtype=torch.bool), 0.2).sum()
        for a, b in ((s, s_hat), (s_hat, s))
        for i in range(3)
        for keys in [torch.cat([s[torch.arange(3) != i], s_hat[torch.arange(3) != i], queue[queue_ids != ids[i]]])]
    )
    assert torch.allclose(masked, torch.as_tensor(first_of_queue_only_for_others), rtol=1e-13)
    assert masked < plain


def test_saturated_rows_keep_their_digits() -> None:
    """With p+ = 1 - 1e-40 the loss is 1e-40 and not 0: the literal form, log(numerator / denominator), is 0 here."""
    s = unit(4, 64, seed=8)
    s_hat = near(s, 1e-4, seed=9)
    literal, exact = (f(s, s_hat, 0.01, s[:0]) for f in (capt_loss_by_terms, capt_loss_dense))
    assert abs(float(literal)) < 1e-13
    assert 0 < float(exact) < 1e-20

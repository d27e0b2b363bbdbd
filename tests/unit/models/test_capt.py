from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from capt.pretrain.models.heads import take_rows
from tests.unit.models.support import assert_same, batch, gradients, small_model


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("padded", [False, True])
def test_one_pass_equals_two(pooling: str, padded: bool) -> None:
    """The step's single forward pass over both views against each view encoded in full, by hand."""
    model = small_model(pooling=pooling).eval()
    tokens, corrupted, positions, labels = batch(padded=padded)
    out = model(tokens, corrupted, positions, labels, padded=padded)

    hidden, hidden_hat = (model.encode(x, padded) for x in (tokens, corrupted))
    if pooling == "cls":
        pools = hidden[:, 0], hidden_hat[:, 0]
    else:
        real = (tokens != 1).unsqueeze(-1)
        pools = tuple((h * real).sum(1) / real.sum(1) for h in (hidden, hidden_hat))
    s, s_hat = (F.normalize(model.aggregation.outer(F.gelu(model.aggregation.inner(x))), dim=1) for x in pools)
    logits = model.mlm.logits(take_rows(hidden_hat, positions))
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    torch.testing.assert_close(out.s, s, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(out.s_hat, s_hat, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(out.mlm_loss_sum, loss, rtol=1e-12, atol=0)
    assert (int(out.mlm_count), int(out.mlm_correct)) == (14, int((logits.argmax(-1) == labels).sum()))
    torch.testing.assert_close(model.embed(tokens, padded), s, rtol=1e-11, atol=1e-12)

    weight = torch.randn_like(s)
    ours = gradients(model, out.mlm_loss_sum + (out.s * weight).sum() + (out.s_hat * weight.flip(0)).sum())
    theirs = gradients(model, loss + (s * weight).sum() + (s_hat * weight.flip(0)).sum())
    assert_same(ours, theirs, 1e-10)
    assert all(bool(g.any()) for g in ours.values()), "every parameter takes part in training"


def test_without_contrast_only_the_corrupted_view_counts() -> None:
    model = small_model(contrast=False).eval()
    tokens, corrupted, positions, labels = batch()
    out = model(tokens, corrupted, positions, labels)
    assert out.s is None
    assert out.s_hat is None
    assert not any("aggregation" in name for name in model.state_dict())
    again = model(torch.zeros_like(tokens), corrupted, positions, labels)
    assert torch.equal(out.mlm_loss_sum, again.mlm_loss_sum)
    both = small_model(contrast=True).eval()
    both.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(both(tokens, corrupted, positions, labels).mlm_loss_sum, out.mlm_loss_sum)
    torch.testing.assert_close(
        model.embed(tokens, False), F.normalize(model.encode(tokens, False)[:, 0], dim=1).float()
    )


def test_documents_reach_both_views() -> None:
    model = small_model().eval()
    tokens, corrupted, positions, labels = batch()
    documents = torch.tensor([[0] * 6 + [1] * 7] * 5)
    first = model(tokens, corrupted, positions, labels, documents)
    tokens[:, 6:], corrupted[:, 6:] = 50, 51
    second = model(tokens, corrupted, positions, labels, documents)
    assert torch.equal(first.s, second.s)
    assert torch.equal(first.s_hat, second.s_hat)


def test_views_are_dropped_out_independently() -> None:
    model = small_model(contrast=True).train()
    tokens, _, positions, labels = batch()
    out = model(tokens, tokens, positions, labels)
    assert not torch.allclose(out.s, out.s_hat)


def test_seed_decides() -> None:
    a, b = small_model(), small_model()
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    results = []
    for model in (a, b):
        torch.manual_seed(5)
        results.append(model.train()(*batch()))
    assert torch.equal(results[0].mlm_loss_sum, results[1].mlm_loss_sum)
    assert torch.equal(results[0].s, results[1].s)


def test_bf16_autocast_is_close() -> None:
    model = small_model(dtype=torch.float32).eval()
    with torch.no_grad():
        exact = model(*batch())
        with torch.autocast("cpu", torch.bfloat16):
            low = model(*batch())
    assert low.s.dtype == low.mlm_loss_sum.dtype == torch.float32
    assert float((low.s - exact.s).norm() / exact.s.norm()) < 0.03
    assert float(low.mlm_loss_sum) == pytest.approx(float(exact.mlm_loss_sum), rel=0.01)

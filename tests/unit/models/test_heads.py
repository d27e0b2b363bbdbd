from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from capt.pretrain.models.heads import AggregationHead, MLMHead
from tests.unit.models.support import VOCABULARY


def test_aggregation_is_equation_1() -> None:
    torch.manual_seed(0)
    head = AggregationHead(32, 56).double()
    x = torch.randn(6, 32, dtype=torch.float64)
    y = head.outer(F.gelu(head.inner(x)))
    assert head.inner.out_features == 56
    torch.testing.assert_close(head(x), y / y.norm(dim=1, keepdim=True), rtol=1e-12, atol=1e-12)


def test_aggregation_normalises_in_fp32() -> None:
    head = AggregationHead(32, 56)
    with torch.autocast("cpu", torch.bfloat16):
        s = head(torch.randn(6, 32))
    assert s.dtype == torch.float32
    torch.testing.assert_close(s.norm(dim=1), torch.ones(6), rtol=1e-6, atol=0)
    assert AggregationHead(32, 56).bfloat16()(torch.randn(2, 32).bfloat16()).dtype == torch.float32


def test_language_model_head_is_tied() -> None:
    word = nn.Embedding(VOCABULARY, 32)
    head = MLMHead(word, VOCABULARY, 1e-5)
    assert head.weight is word.weight
    hidden, labels = torch.randn(2, 3, 32), torch.randint(5, VOCABULARY, (2, 3))
    loss, correct, used = head(hidden, labels)
    logits = head.logits(hidden)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
    assert int(correct) == int((logits.argmax(-1) == labels).sum())
    assert int(used) == 6
    loss.backward()
    assert word.weight.grad is not None


def test_a_head_near_the_identity_scores_words_by_the_normalised_state() -> None:
    torch.manual_seed(0)
    word = nn.Embedding(VOCABULARY, 64)
    head = MLMHead(word, VOCABULARY, 1e-5)
    hidden = F.layer_norm(torch.randn(200, 64), (64,))
    literal = F.layer_norm(hidden, (64,)) @ word.weight[:VOCABULARY].T

    def error() -> float:
        return float(((head.logits(hidden) - literal).norm() / literal.norm()).detach())

    before, embeddings = error(), word.weight.clone()
    head.begin_near_identity()
    assert before > 0.5
    assert error() < 0.03
    assert torch.equal(word.weight, embeddings)


def test_rows_without_a_label_change_nothing() -> None:
    """They are left out on a CPU: sums and gradients are those of the rows with a label, also where there is none."""
    head = MLMHead(nn.Embedding(VOCABULARY, 32), VOCABULARY, 1e-5).double()
    hidden, labels = torch.randn(4, 5, 32, dtype=torch.float64), torch.randint(5, VOCABULARY, (4, 5))
    for unused in (torch.rand(4, 5) < 0.5, torch.ones(4, 5, dtype=torch.bool)):
        given = hidden.clone().requires_grad_()
        loss, _, used = head(given, labels.masked_fill(unused, -100))
        loss.backward()
        rows = hidden[~unused].requires_grad_()
        expected = F.cross_entropy(head.logits(rows), labels[~unused], reduction="sum")
        torch.testing.assert_close(loss, expected)
        assert int(used) == int((~unused).sum())
        assert given.grad is not None
        assert not given.grad[unused].any()
        if len(rows):
            torch.testing.assert_close(given.grad[~unused], torch.autograd.grad(expected, rows)[0])

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capt.pretrain.models import cross_entropy
from capt.pretrain.models.cross_entropy import in_blocks, masked_cross_entropy

ROWS, CLASSES, H = 11, 53, 8


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in ((ROWS, H), (CLASSES, H), (CLASSES,)))
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    labels[[2, 7]] = -100
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


@pytest.mark.parametrize("rows_a_block", [1, 4, 1000])
def test_is_cross_entropy(rows_a_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_BLOCK_BYTES", {"cpu": 4 * CLASSES * rows_a_block})
    x, weight, bias, labels = _inputs()
    logits = F.linear(x, weight, bias)
    reference = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    loss, correct, used = masked_cross_entropy(x, weight, bias, labels)
    torch.testing.assert_close(loss, reference, rtol=1e-13, atol=0)
    assert (int(correct), int(used)) == (int((logits.argmax(1) == labels).sum()), ROWS - 2)
    ours = torch.autograd.grad(0.37 * loss, (x, weight, bias))
    theirs = torch.autograd.grad(0.37 * reference, (x, weight, bias))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_counts_correct_rows() -> None:
    x = torch.eye(4)
    labels = torch.tensor([0, 1, 3, -100])
    _, correct, used = masked_cross_entropy(x, torch.eye(4), torch.zeros(4), labels)
    assert (int(correct), int(used)) == (2, 3)


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_used(rows: int) -> None:
    x = torch.randn(rows, H, requires_grad=True)
    weight = torch.randn(CLASSES, H, requires_grad=True)
    loss, correct, used = masked_cross_entropy(x, weight, torch.zeros(CLASSES), torch.full((rows,), -100))
    assert (float(loss.detach()), int(correct), int(used)) == (0, 0, 0)
    loss.backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_no_gradient_work_in_evaluation() -> None:
    x, weight, bias, labels = _inputs()
    with torch.no_grad():
        loss, _, _ = masked_cross_entropy(x, weight, bias, labels)
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(
        float(F.cross_entropy(F.linear(x, weight, bias), labels, reduction="sum").detach())
    )


def test_autocast_bf16_stays_close_and_returns_fp32() -> None:
    x, weight, bias, labels = _inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, _ = masked_cross_entropy(x, weight, bias, labels)
    reference = F.cross_entropy(F.linear(x, weight, bias), labels, reduction="sum")
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(reference.detach()), rel=1e-2)
    for a, b in zip(
        torch.autograd.grad(loss, (x, weight, bias)), torch.autograd.grad(reference, (x, weight, bias)), strict=True
    ):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 1e-2


def _plain(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, weight).float() + bias
    return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()


@pytest.mark.parametrize("blocked", [False, True])
def test_fp16_keeps_the_tail_of_a_large_vocabulary(blocked: bool) -> None:
    """Most probabilities of 50,000 classes are below fp16's smallest normal number; the gradient must keep them."""
    generator = torch.Generator().manual_seed(1)
    x = (0.05 * torch.randn(4, 16, generator=generator)).half().requires_grad_()
    weight = torch.randn(50_000, 16, generator=generator).half().requires_grad_()
    bias = torch.zeros(50_000, requires_grad=True)
    labels = torch.arange(4)
    loss = (in_blocks(_plain, x, weight, bias, labels) if blocked else masked_cross_entropy(x, weight, bias, labels))[0]
    _, dweight = torch.autograd.grad(1024.0 * loss, (x, weight))
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    reference = F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum")
    _, expected = torch.autograd.grad(1024.0 * reference, exact)
    tail = slice(4, None)
    assert float((dweight[tail].double() - expected[tail]).norm() / expected[tail].norm()) < 2e-3

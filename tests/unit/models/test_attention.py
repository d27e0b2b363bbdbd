from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from capt.pretrain.models import layers
from capt.pretrain.models.layers import SelfAttention, attend, attend_within, document_runs
from tests.unit.models.support import small_config

B, HEADS, QUERIES, KEYS, SIZE = 3, 2, 4, 7, 5


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shape = {"dtype": torch.float64, "requires_grad": True}
    return (
        torch.randn(B, HEADS, QUERIES, SIZE, **shape),
        torch.randn(B, HEADS, KEYS, SIZE, **shape),
        torch.randn(B, HEADS, KEYS, SIZE, **shape),
    )


def _mask(kind: str) -> Tensor | None:
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(B, 1, 1 if kind == "keys" else QUERIES, KEYS, generator=generator) > 0.4
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("kind", ["none", "keys", "pairs"])
def test_dropped_attention_is_the_formula(
    qkv: tuple[Tensor, Tensor, Tensor], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = (torch.rand(B * HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(2)) > 0.3).double()
    monkeypatch.setattr(layers, "keep_mask", lambda shape, p, dtype: (keep.view(shape).clone(), 1 / 0.7))
    mask = _mask(kind)

    q, k, v = qkv
    scores = q @ k.transpose(-1, -2) / SIZE**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    reference = (torch.softmax(scores, -1) * keep.view(B, HEADS, QUERIES, KEYS) / 0.7) @ v
    ours = attend(q, k, v, mask, 0.3)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(reference)
    for a, b in zip(torch.autograd.grad(ours, qkv, weight), torch.autograd.grad(reference, qkv, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_dropout_keeps_the_mean(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    torch.manual_seed(3)
    q, k, v = (x.detach()[:1] for x in qkv)
    many = (x.expand(6000, -1, -1, -1) for x in (q, k, v))
    mean = attend(*many, None, 0.2).mean(0)
    assert float((mean - F.scaled_dot_product_attention(q, k, v)[0]).abs().max()) < 0.05


def test_nothing_to_look_at_is_finite(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    mask = torch.zeros(B, 1, 1, KEYS, dtype=torch.bool)
    for p in (0.0, 0.1):
        assert bool(attend(*qkv, mask, p).isfinite().all())


@pytest.mark.parametrize("training", [True, False])
def test_module_under_autocast(training: bool) -> None:
    module = SelfAttention(small_config()).train(training)
    x = torch.randn(2, 6, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, x, None)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert module.key_value.weight.grad is not None
    assert module.key_value.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("longest", [1, 3, 15, 16, 17, 40, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_within_runs_is_that_under_a_mask(longest: int, dtype: torch.dtype) -> None:
    """Output and gradients, for runs of any lengths in windows that need not end together."""
    generator = torch.Generator().manual_seed(longest)
    b, length, heads, e = 3, 90, 2, 8
    ends = torch.randint(1, longest + 1, (b, length), generator=generator).cumsum(1)
    documents = torch.stack([torch.bucketize(torch.arange(length), row, right=True) for row in ends])
    runs = document_runs(documents, b + int((documents.diff(dim=1) != 0).sum()))
    inputs = [torch.randn(b, length, heads, e, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    weight = torch.randn(b, length, heads, e, generator=generator).to(dtype)
    mask = (documents[:, :, None] == documents[:, None, :]).unsqueeze(1)
    dense = attend(*(x.transpose(1, 2) for x in inputs), mask, 0.0).transpose(1, 2)
    blocks = attend_within(*inputs, runs, 0.0)
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(blocks, dense, rtol=bound, atol=bound)
    theirs = torch.autograd.grad(dense, inputs, weight)
    for ours, other in zip(torch.autograd.grad(blocks, inputs, weight), theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=bound, atol=bound)


def test_dropout_within_runs_keeps_the_mean() -> None:
    torch.manual_seed(4)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2]])
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    many = [x.expand(3000, -1, -1, -1) for x in (q, k, v)]
    mean = attend_within(*many, document_runs(documents.expand(3000, -1), 9000), 0.2).mean(0)
    whole = attend_within(q, k, v, document_runs(documents, 3), 0.0)[0]
    assert float((mean - whole).abs().max()) < 0.1


@pytest.mark.parametrize(
    ("dtype", "e", "flash"),
    [(torch.bfloat16, 64, True), (torch.float16, 20, True), (torch.float16, 64, False), (torch.float32, 64, True)],
)
def test_a_gpu_is_asked_for_one_kernel_of_its_own(dtype: torch.dtype, e: int, flash: bool) -> None:
    """By shapes alone: the kernels need a GPU. Nothing among the operators makes the host wait."""
    called: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = (torch.empty(96, 4, e, dtype=dtype, device="meta", requires_grad=True) for _ in range(3))
    runs = layers.Runs(torch.empty(7, dtype=torch.int32, device="meta"), 48, flash)
    with Calls():
        y = layers._attend_by_kernel(q, k, v, runs, 0.1)
        assert (y.shape, y.dtype) == (q.shape, dtype)
        gradients = torch.autograd.grad(y.sum(), (q, k, v))
    assert all(gradient.shape == q.shape for gradient in gradients)
    kernel = "flash" if flash and dtype != torch.float32 else "efficient"
    assert [name.split(".")[1] for name in called if "attention" in name] == [
        f"_{kernel}_attention_forward", f"_{kernel}_attention_backward",
    ]  # fmt: skip
    assert not any(name in text for text in called for name in ("_local_scalar_dense", "nonzero"))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["none", "keys"])
def test_one_product_of_queries_keys_and_values(kind: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; it has the same output and the same gradients of both matrices."""
    torch.manual_seed(0)
    module, mask = SelfAttention(small_config()), _mask(kind)
    x = torch.randn(B, KEYS, small_config().hidden)
    found = []
    for together in (False, True):
        monkeypatch.setattr(layers, "prefers_one_product", lambda x, together=together: together)
        module.zero_grad()
        torch.manual_seed(1)  # of dropout
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = module(x, x, mask)
            y.float().square().sum().backward()
        found.append([y.detach().float(), *(p.grad for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if autocast else 1e-5, atol=2e-2 if autocast else 1e-6)

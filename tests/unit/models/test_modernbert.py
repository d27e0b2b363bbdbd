"""ModernBERT's attention against the literal mask, and what its encoder promises."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.models.capt import CaptModel
from capt.pretrain.models.heads import MLMHead
from capt.pretrain.models.modernbert import attention
from capt.pretrain.models.modernbert.attention import Sequences, lay_out, rotate, rotation, run_offsets
from capt.pretrain.models.modernbert.config import ModernBertConfig
from tests.unit.models.support import assert_same, gradients

PAD, VOCABULARY = 1, 97


def _config(**fields: Any) -> ModernBertConfig:
    sizes = {"size": "custom", "layers": 4, "hidden": 24, "heads": 2, "ffn": 40, "local_attention": 8}
    return ModernBertConfig.model_validate({**sizes, "vocab_size": VOCABULARY, "max_positions": 512, **fields})


def _model(dtype: torch.dtype = torch.float64, contrast: bool = False, **fields: Any) -> CaptModel:
    torch.manual_seed(0)
    model = CaptModel(_config(**fields), contrast).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(5, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def _documents(lengths: list[list[int]]) -> tuple[Tensor, int]:
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return torch.stack(rows), sum(map(len, lengths))


def _literal(qkv: Tensor, seen: Tensor) -> Tensor:
    q, k, v = qkv.permute(1, 2, 0, 3)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


LENGTHS = [[7], [1, 1, 1], [13, 2, 40, 1], [64, 64], [100, 31, 5], [17] * 9]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 2, 6, 7, 16, 99])
@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "as on a GPU"])
def test_attention_is_the_literal_mask(lengths: list[int], window: int | None, known: bool) -> None:
    """Output and gradient; runs shorter and longer than the window, of one length and of several."""
    generator, n = torch.Generator().manual_seed(sum(lengths)), sum(lengths)
    qkv = torch.randn(n, 3, 2, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    run = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    expected = _literal(qkv, (run[:, None] == run) & (distance <= (n if window is None else window)))
    ours = Sequences((1, n), offsets, lengths if known else None, None).attend(qkv, window, 0.0)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    (theirs,) = torch.autograd.grad(expected, qkv, weight)
    torch.testing.assert_close(torch.autograd.grad(ours, qkv, weight)[0], theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rotation_is_a_product_of_complex_numbers(dtype: torch.dtype) -> None:
    qkv = torch.randn(9, 3, 2, 6, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    positions = torch.tensor([0, 1, 2, 3, 700, 5, 6, 8000, 8])
    angles = positions[:, None].double() * 100.0 ** -(torch.arange(0, 6, 2).double() / 6)
    first, second = qkv.double().chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None, None]
    expected = torch.cat([turned.real, turned.imag], -1)
    expected = torch.cat([expected[:, :2], qkv[:, 2:].double()], 1)
    ours = rotate(qkv, rotation(positions, 6, 100.0))
    bound = 2e-3 if dtype == torch.float64 else 3e-2  # angles of 8,000 have four digits behind the point in fp32
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=bound)
    weight = torch.randn(qkv.shape, dtype=torch.float64)
    (theirs,) = torch.autograd.grad(expected, qkv, weight)
    torch.testing.assert_close(torch.autograd.grad(ours, qkv, weight.to(dtype))[0], theirs, rtol=0, atol=2 * bound)


@pytest.mark.parametrize("side", ["right", "left"])
def test_packed_documents_are_padded_ones(side: str) -> None:
    """Loss and gradient of documents in two windows, and of the same documents in a row each."""
    lengths = [[30, 1, 17, 12], [3, 41, 16]]
    documents, runs = _documents(lengths)
    packed = _tokens(2, 60)
    flat = [row for window, row in zip(packed, lengths, strict=True) for row in window.split(row)]
    padded = torch.full((runs, max(map(len, flat))), PAD)
    places = torch.zeros_like(padded, dtype=torch.bool)
    for number, row in enumerate(flat):
        where = slice(0, len(row)) if side == "right" else slice(padded.shape[1] - len(row), None)
        padded[number, where], places[number, where] = row, True
    model = _model()
    labels = _tokens(120, seed=1)
    one = model.mlm(model.encoder(packed, documents=documents, runs=runs).flatten(0, 1), labels).loss_sum
    other = model.mlm(model.encoder(padded, padded=True)[places], labels).loss_sum
    torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    assert_same(gradients(model, one), gradients(model, other), 1e-10)
    again = model.mlm(model.encoder(packed, documents=documents).flatten(0, 1), labels).loss_sum
    torch.testing.assert_close(again, one, rtol=1e-14, atol=0)


@pytest.mark.parametrize("padded", [False, True])
def test_rows_alone_are_those_of_all(padded: bool) -> None:
    model, tokens = _model(), _tokens(3, 40)
    if padded:
        tokens[1, 20:], tokens[2, :] = PAD, PAD
    rows = torch.tensor([[0, 39, 3], [0, 19, 7], [0, 1, 2]])
    whole = model.encoder(tokens, padded=padded)
    chosen = model.encoder(tokens, padded=padded, rows=rows)
    real = tokens.gather(1, rows) != PAD if padded else torch.ones_like(rows, dtype=torch.bool)
    expected = whole.gather(1, rows[..., None].expand(-1, -1, 24))
    torch.testing.assert_close(chosen[real], expected[real], rtol=1e-12, atol=1e-12)
    assert bool(chosen.isfinite().all())


def test_a_batch_of_padding_alone_is_finite() -> None:
    assert bool(_model().encoder(torch.full((2, 9), PAD), padded=True).isfinite().all())


def test_long_sequences_make_no_mask_of_their_square() -> None:
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
            return out

    length = 2048
    model = _model(torch.float32, max_positions=length, local_attention=32)
    with Sizes():
        model.encoder(_tokens(1, length)).sum().backward()
    assert largest < length * length / 8


def test_a_gpu_is_asked_for_one_kernel_with_the_window() -> None:
    """By shapes alone: the kernel needs a GPU. Nothing among the operators makes the host wait."""
    calls: list[tuple[str, Any]] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append((str(func), args))
            return func(*args, **(kwargs or {}))

    qkv = torch.empty(96, 3, 2, 12, dtype=torch.bfloat16, device="meta", requires_grad=True)
    offsets = torch.empty(7, dtype=torch.int32, device="meta")
    with Calls():
        for window in (None, 64):
            y = attention.by_kernel(qkv, offsets, 48, window)
            assert (y.shape, y.dtype) == ((96, 24), torch.bfloat16)
            assert torch.autograd.grad(y.sum(), qkv)[0].shape == qkv.shape
    kernels = [args for name, args in calls if "_varlen_attn.default" in name]
    assert [list(args[9]) for args in kernels] == [[-1, -1], [64, 64]]
    assert all(args[0].shape == (96, 2, 16) and args[8] == 12**-0.5 for args in kernels)
    assert not any(word in name for name, _ in calls for word in ("_local_scalar_dense", "nonzero"))


def test_runs_are_found_without_waiting() -> None:
    """The host says how many offsets there are, whatever rows of padding there are; an absent run has no rows."""
    real = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    assert run_offsets(real, 6).tolist() == [0, 2, 4, 8, 9, 12, 12]
    assert run_offsets(real, None).tolist() == [0, 2, 4, 8, 9, 12]
    sequences = Sequences((3, 4), run_offsets(real, 6), None, None)
    assert sequences.positions.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 0, 0, 1, 2]
    here = lay_out(torch.where(real, 7, PAD), PAD, True, None, None)
    assert (here.lengths, here.positions.tolist()) == ([2, 4, 1], [0, 1, 0, 1, 2, 3, 0])


@pytest.mark.parametrize("kind", ["full", "offload"])
def test_activation_checkpointing_changes_nothing(kind: str) -> None:
    results = []
    for each in ("none", kind):
        model = _model(torch.float32, activation_checkpointing=each, dropout=0.1, output_dropout=0.2).train()
        torch.manual_seed(3)
        model.encoder(_tokens(2, 30)).square().sum().backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(("length", "seen"), [(5, None), (17, None), (100, None), (90, 30)])
def test_flops_count_the_keys_in_the_window(length: int, seen: int | None) -> None:
    config, read = _config(layers=5), 7
    whole, h = seen or length, config.hidden
    distance = (torch.arange(whole)[:, None] - torch.arange(whole)).abs()
    local = float((distance <= config.window).sum()) / whole
    keys = 2 * whole + 3 * local  # layers 0 and 3 of 5 are global
    row = 2 * h * h + 6 * h * config.ffn
    expected = length * (5 * 6 * h * h + 4 * h * keys) + (4 * length + read) * row
    assert config.flops(float(length), float(read), None if seen is None else float(seen)) == pytest.approx(
        expected, rel=1e-12
    )


def test_flops_are_what_runs() -> None:
    """Global layers alone, with dropout, for then the attention is spelt out in products."""
    model = _model(torch.float32, global_every=1, attention_dropout=0.1).train()
    rows = torch.arange(6).expand(3, -1)
    with FlopCounterMode(display=False) as counter:
        model.encoder(_tokens(3, 32), rows=rows).sum().backward()
    assert counter.get_total_flops() == pytest.approx(3 * 3 * model.config.flops(32.0, 6.0), rel=1e-6)


def test_weights_begin_as_in_transformers() -> None:
    from transformers import ModernBertConfig as HFConfig
    from transformers import ModernBertForMaskedLM

    from capt.pretrain.models.hf_map import to_hf

    torch.manual_seed(0)
    model = CaptModel(_config(hidden=128, ffn=192, layers=8, vocab_size=500), contrast=False)
    hf = model.config.to_hf(bos_id=0, eos_id=2)
    theirs = dict(ModernBertForMaskedLM(HFConfig(**hf)).named_parameters())
    ours = to_hf(model.state_dict(), model.config)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        torch.testing.assert_close(value.std(correction=0), other.std(correction=0), rtol=0.03, atol=1e-8)
        assert float(value.abs().max()) <= float(other.detach().abs().max()) * 1.05
        assert float(value.mean().abs()) < 1e-3 or bool((value == 1).all())


def test_what_it_cannot_be_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"heads of 5 features: rotary positions need an even number"):
        _config(hidden=10, heads=2)
    with pytest.raises(ConfigError, match=r"mlm\.head=identity: .* has no bias"):
        MLMHead(torch.nn.Embedding(5, 4), 5, 1e-5, bias=False).begin_near_identity()


@pytest.mark.parametrize("seed", range(3))
def test_a_job_may_change_positions_and_nothing_else_of_init(seed: int) -> None:
    theirs = _config(max_positions=1024)
    longer = {"max_positions": 8192, "global_rope_theta": 10_000.0 * random.Random(seed).randint(2, 90)}
    job = ModernBertConfig.model_validate({"init": "a/b", **longer})
    completed = job.with_sizes_of(theirs, "a/b")
    assert completed.max_positions == 8192
    assert completed.fixed_by_weights() == theirs.fixed_by_weights() | longer
    with pytest.raises(CheckpointError, match=r"a/b: model\.local_attention is 8 there but 16 in this job"):
        ModernBertConfig.model_validate({"init": "a/b", "local_attention": 16}).with_sizes_of(theirs, "a/b")

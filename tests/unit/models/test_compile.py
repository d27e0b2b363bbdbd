"""Compiled layers, each test in a process of its own: dynamo cannot trace the shape checks that pytest weaves in."""

from __future__ import annotations

import functools
import shutil
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from capt.pretrain.models import layers, roberta
from capt.pretrain.models.config import RobertaConfig
from capt.pretrain.models.layers import dropout
from capt.pretrain.models.modernbert.config import ModernBertConfig
from tests.support import run_ranks
from tests.unit.models.support import Family, assert_same, small_config, small_model, train_step

FAMILIES = pytest.mark.parametrize("family", [RobertaConfig, ModernBertConfig])

TRACED = functools.partial(torch.compile, backend="aot_eager")
"""Dynamo and AOT autograd without code generation, which takes minutes and is torch's business."""


def _compare_with_eager(checkpointing: str, autocast: bool, family: Family) -> None:
    fields = {"dropout": 0.0, "attention_dropout": 0.0, "dtype": torch.float32 if autocast else torch.float64}
    fields["family"] = family
    expected = train_step(small_model(**fields), autocast, padded=True)
    with mock.patch.object(torch, "compile", TRACED):
        model = small_model(compile=True, activation_checkpointing=checkpointing, **fields)
        got = train_step(model, autocast, padded=True)
    assert_same(got, expected, 0.02 if autocast else 1e-10)


@pytest.mark.parametrize(("checkpointing", "autocast"), [("none", False), ("full", False), ("full", True)])
@FAMILIES
def test_compiled_layers_equal_eager_ones(checkpointing: str, autocast: bool, family: Family) -> None:
    run_ranks(_compare_with_eager, 1, checkpointing, autocast, family)


def _compare_dropout_with_torch() -> None:
    compiled = torch.compile(lambda x: dropout(x, 0.5, training=True), backend="eager", fullgraph=True)
    torch.manual_seed(5)
    ours = compiled(torch.ones(100))
    torch.manual_seed(5)
    assert torch.equal(ours, F.dropout(torch.ones(100), 0.5))


def test_compiled_code_draws_torchs_masks() -> None:
    run_ranks(_compare_dropout_with_torch, 1)


def _compare_recomputation() -> None:
    fields = {"dtype": torch.float32, "compile": True, "layers": 1}  # each layer is compiled anew
    plain = train_step(small_model(**fields))
    assert_same(train_step(small_model(activation_checkpointing="full", **fields)), plain, 1e-5)


def _pass_in_every_mode(limit: int, family: Family) -> list[float]:
    """The difference of each pair of passes, without and with a graph, that draw the same random numbers."""
    from tests.unit.models.support import batch

    differences = []
    captured = functools.partial(torch.compile, backend="eager")
    with mock.patch.object(torch, "compile", captured), mock.patch.object(layers, "_GRAPHS", limit):
        model = small_model(family=family, dtype=torch.float32, dropout=0.2, attention_dropout=0.2, compile=True)
    for n, padded, length in ((5, False, 13), (5, True, 13), (3, False, 13), (2, True, 11)):
        for training in (True, False):
            model.train(training)
            tokens, corrupted, positions, labels = (x[:n] for x in batch(padded=padded))
            inputs = tokens[:, :length], corrupted[:, :length], positions.clamp(max=length - 1), labels
            seen = []
            for graph in (False, True) if training else (False,):
                torch.manual_seed(1)
                with torch.set_grad_enabled(graph):
                    out = model(*inputs, padded=padded)
                seen.append(out.s.detach())
            differences += [float((seen[0] - seen[-1]).abs().max())]
    return differences


@FAMILIES
def test_both_passes_of_the_cached_contrast_drop_the_same(family: Family) -> None:
    """Over training, validation, padded windows and other sizes, as an epoch has them: all of it stays compiled."""
    (differences,) = run_ranks(_pass_in_every_mode, 1, layers._GRAPHS, family)
    assert differences == [0.0] * len(differences)


def _trace_the_kernels_of_a_gpu() -> int:
    """An encoder by shapes alone, whose windows have another number of documents in every batch; its graphs."""
    for module in (layers, roberta):
        module.autocast_dtype = lambda x: None  # type: ignore[attr-defined]  # a device of shapes has no autocast
    layers._attend_by_length, layers.prefers_runs = layers._attend_by_kernel, lambda *_: True  # type: ignore[assignment]
    with mock.patch.object(torch, "compile", TRACED), torch.device("meta"):
        for dtype in (torch.bfloat16, torch.float32):
            model = roberta.RobertaEncoder(small_config(hidden=64, compile=True, layers=3)).train().to(dtype)
            for runs in (7, 9, 12):
                tokens = torch.empty(2, 13, dtype=torch.int64)
                model(tokens, documents=tokens, runs=runs).sum().backward()
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_attention_within_documents_is_one_graph_for_any_number_of_runs() -> None:
    """A graph for a first number, one for all others, in each precision."""
    assert run_ranks(_trace_the_kernels_of_a_gpu, 1)[0] <= 4


def _beyond_the_limit(family: Family) -> str:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    try:
        _pass_in_every_mode(2, family)
    except FailOnRecompileLimitHit as error:
        return str(error)
    return ""


@FAMILIES
def test_a_graph_too_many_is_an_error(family: Family) -> None:
    """Eager code in its place would draw other dropout masks than the compiled pass before it."""
    assert "fullgraph" in run_ranks(_beyond_the_limit, 1, family)[0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_recomputation_draws_the_compiled_masks() -> None:
    run_ranks(_compare_recomputation, 1, timeout=280)

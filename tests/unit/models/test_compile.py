"""Compiled layers, each test in a process of its own: dynamo cannot trace the shape checks that pytest weaves in."""

from __future__ import annotations

import functools
import shutil
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from capt.pretrain.models.layers import dropout
from tests.support import run_ranks
from tests.unit.models.support import assert_same, small_model, train_step

TRACED = functools.partial(torch.compile, backend="aot_eager")
"""Dynamo and AOT autograd without code generation, which takes minutes and is torch's business."""


def _compare_with_eager(checkpointing: str, autocast: bool) -> None:
    fields = {"dropout": 0.0, "attention_dropout": 0.0, "dtype": torch.float32 if autocast else torch.float64}
    expected = train_step(small_model(**fields), autocast, padded=True)
    with mock.patch.object(torch, "compile", TRACED):
        model = small_model(compile=True, activation_checkpointing=checkpointing, **fields)
        got = train_step(model, autocast, padded=True)
    assert_same(got, expected, 0.02 if autocast else 1e-10)


@pytest.mark.parametrize(("checkpointing", "autocast"), [("none", False), ("full", False), ("full", True)])
def test_compiled_layers_equal_eager_ones(checkpointing: str, autocast: bool) -> None:
    run_ranks(_compare_with_eager, 1, checkpointing, autocast)


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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_recomputation_draws_the_compiled_masks() -> None:
    run_ranks(_compare_recomputation, 1, timeout=280)

"""Under torch.compile the loss is one graph, few of them serve all sizes and temperatures, and no digit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from capt.pretrain.contrast import ShardedQueue, capt_loss
from tests.support import run_ranks
from tests.unit.contrast.support import unit

STEPS = [(6, 0.1), (6, 0.2), (7, 0.3), (9, 0.25), (12, 0.05), (8, 0.5), (5, 0.07), (70, 0.1)]
"""Samples and temperature of each step."""
ONE_GRAPH = torch.__version__ >= "2.13"
"""An older torch computes the loss outside the graphs, where its gradients would be 0."""
MOST = 3
"""Graphs: torch takes what it sees first for constant, then the temperature for variable, then the sizes."""


def _steps(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[list[bool], int]:
    """Compare loss and gradients of each step with those without a compiler; count the graphs."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(capt_loss, backend=counter, fullgraph=ONE_GRAPH)
    queue = ShardedQueue(64, 8, dtype=dtype, drift=options.pop("drift", "none"))
    equal = []
    for step, (n, temperature) in enumerate(STEPS):
        views = [unit(n, 8, seed=2 * step + view, dtype=dtype) for view in (0, 1)]
        ids = torch.arange(n) // 2
        results = []
        for function in (compiled, capt_loss):
            s, s_hat = (view.clone().requires_grad_() for view in views)
            loss = function(s, s_hat, queue, temperature=temperature, ids=ids, **options)
            loss.backward()
            results.append((loss.detach(), s.grad, s_hat.grad))
        equal.append(all(torch.equal(one, other) for one, other in zip(*results, strict=True)))
        queue.enqueue(*views, ids=ids)
    return equal, counter.frame_count


def _steps_of(options: dict[str, Any]) -> tuple[list[bool], int]:
    return _steps(**options)


def _tensor_temperatures() -> tuple[list[bool], int]:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(capt_loss, backend=counter, fullgraph=ONE_GRAPH)
    s, s_hat = unit(6, 8, seed=0), unit(6, 8, seed=1)
    equal, graphs = [], []
    for tau in (0.1, 0.2, 0.05):
        temperature = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
        (found,) = torch.autograd.grad(compiled(s, s_hat, temperature=temperature), temperature)
        (expected,) = torch.autograd.grad(capt_loss(s, s_hat, temperature=temperature), temperature)
        equal.append(torch.equal(found, expected))
        graphs.append(counter.frame_count)
    return equal, graphs[-1] - graphs[0]


# In processes of their own, which do not check the annotations of each call: a compiler cannot trace that.


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, {}),
        pytest.param(1, {"impl": "dense", "drift": "moments", "queue_share": 1.0}, marks=pytest.mark.slow),
        pytest.param(1, {"hardness": 2.0, "in_batch": "local"}, marks=pytest.mark.slow),
        pytest.param(1, {"dtype": torch.float64}, marks=pytest.mark.slow),
        pytest.param(1, {"precision": "bf16x3"}, marks=pytest.mark.slow),
        pytest.param(2, {"equal_rows": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_graph_for_all_sizes_and_temperatures(world: int, options: dict[str, Any]) -> None:
    for equal, graphs in run_ranks(_steps_of, world, options):
        assert all(equal), equal
        assert graphs <= MOST or not ONE_GRAPH


def test_a_temperature_tensor_is_variable_from_the_start() -> None:
    (result,) = run_ranks(_tensor_temperatures, 1)
    assert result == ([True] * 3, 0)  # nothing is compiled after the first call

"""capt_loss on one process: exact in value and gradient, at every temperature, in bounded memory."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast import CaptLoss, ContrastOptions, ContrastStats, ShardedQueue, capt_loss, info_nce
from capt.pretrain.contrast.temperature import Learned
from tests.unit.contrast.reference import effective_negatives_by_terms
from tests.unit.contrast.support import TEMPERATURES, Problem, clustered, near, relative, unit

N, D, K = 5, 123, 507


def _queue(pushed: int, dtype: torch.dtype = torch.float64, ids: Tensor | None = None) -> ShardedQueue:
    queue = ShardedQueue(K, D, dtype=dtype)
    queue.enqueue(unit(pushed, D, seed=7, dtype=dtype), ids=ids)
    return queue


def _run(
    s: Tensor, s_hat: Tensor, queue: ShardedQueue | None, temperature: float | Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    s, s_hat = s.clone().requires_grad_(), s_hat.clone().requires_grad_()
    loss = capt_loss(s, s_hat, queue, temperature=temperature, **options)
    d_s, d_s_hat = torch.autograd.grad(loss, (s, s_hat))
    return loss.detach(), d_s, d_s_hat


def _problem(s: Tensor, s_hat: Tensor, queue: ShardedQueue, temperature: float, **options: Any) -> Problem:
    return Problem(s, s_hat, torch.zeros(len(s), dtype=torch.int64), queue.rows, temperature, **options)


@pytest.mark.parametrize("impl", ["chunked", "dense"])
@pytest.mark.parametrize("pushed", [0, 250, 800], ids=["empty", "half-filled", "wrapped"])
@pytest.mark.parametrize("noise", [10.0, 0.05], ids=["random", "saturated"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_exact_in_float64(temperature: float, noise: float, pushed: int, impl: str) -> None:
    s = unit(N, D, seed=0)
    s_hat, queue = near(s, noise, seed=1), _queue(pushed)
    for reduction in ("mean", "sum"):
        loss, d_s, d_s_hat = _run(s, s_hat, queue, temperature, reduction=reduction, impl=impl)
        expected = _problem(s, s_hat, queue, temperature).solve(reduction)
        assert abs(float(loss) - expected[0]) <= 1e-12 * max(expected[0], 1.0)
        assert relative(d_s, expected[1]) < 1e-10
        assert relative(d_s_hat, expected[2]) < 1e-10


@pytest.mark.parametrize("noise", [10.0, 0.05, 0.001], ids=["random", "saturated", "nearly equal"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_float32_keeps_its_digits_even_where_the_positive_has_won(temperature: float, noise: float) -> None:
    s = unit(N, D, seed=0, dtype=torch.float32)
    s_hat, queue = near(s, noise, seed=1), _queue(800, torch.float32)
    loss, *gradients = _run(s, s_hat, queue, temperature)
    expected_loss, *expected, _ = _problem(s, s_hat, queue, temperature).solve()
    assert abs(float(loss) - expected_loss) < 1e-5 * expected_loss
    for actual, wanted in zip(gradients, expected, strict=True):
        assert relative(actual, wanted) < 1e-5
        rows = (actual.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert float(rows.max()) < 1e-5


def test_float32_autograd_of_cross_entropy_does_not() -> None:
    """The negative control of the test above: p+ - 1 has no digits left once p+ rounds to 1."""
    s = unit(N, D, seed=0, dtype=torch.float32).requires_grad_()
    s_hat, queue = near(s.detach(), 0.05, seed=1), _queue(800, torch.float32)
    logits = torch.cat([s @ s_hat.T, s @ queue.rows.T], 1) / 0.02
    F.cross_entropy(logits, torch.arange(N)).backward()
    q = s.detach().clone().requires_grad_()
    exact = torch.cat([q.double() @ s_hat.double().T, q.double() @ queue.rows.double().T], 1) / 0.02
    F.cross_entropy(exact, torch.arange(N)).backward()
    assert s.grad is not None
    assert q.grad is not None
    assert relative(s.grad, q.grad) > 1e-3


@pytest.mark.parametrize("temperature", [0.5, 0.1, 0.05, 0.02])
def test_float32_among_hard_negatives(temperature: float) -> None:
    s = clustered(32, 64, seed=2).float()
    s_hat = near(s, 0.1, seed=3)
    queue = ShardedQueue(4096, 64)
    queue.enqueue(clustered(5000, 64, seed=4).float())
    _, d_s, d_s_hat = _run(s, s_hat, queue, temperature)
    _, wanted_s, wanted_s_hat, _ = _problem(s, s_hat, queue, temperature).solve()
    assert max(relative(d_s, wanted_s), relative(d_s_hat, wanted_s_hat)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperatures_below_the_range_of_exp(dtype: torch.dtype) -> None:
    """At 1/tau = 2000 the exponential of a logit overflows even float64: the running maximum keeps it in range."""
    s, s_hat, queue = unit(N, D, seed=0, dtype=dtype), unit(N, D, seed=1, dtype=dtype), _queue(800, dtype)
    loss, d_s, _ = _run(s, s_hat, queue, 0.0005)
    expected_loss, wanted, _, _ = _problem(s, s_hat, queue, 0.0005).solve()
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    assert abs(float(loss) - expected_loss) < tolerance * expected_loss
    assert relative(d_s, wanted) < tolerance


@pytest.mark.parametrize("temperature", [0.3, 0.05, 0.001])
def test_gradient_of_a_learned_temperature(temperature: float) -> None:
    s, s_hat, queue = unit(N, D, seed=0), unit(N, D, seed=1), _queue(300)
    tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    capt_loss(s, s_hat, queue, temperature=tau).backward()
    assert tau.grad is not None
    assert tau.grad.item() == pytest.approx(_problem(s, s_hat, queue, temperature).solve()[3], rel=1e-10)
    learned = Learned(start=0.3)
    capt_loss(s, s_hat, queue, temperature=learned(0)).backward()
    assert learned.log_temperature.grad is not None
    expected = 0.3 * _problem(s, s_hat, queue, 0.3).solve()[3]
    assert learned.log_temperature.grad.item() == pytest.approx(expected, rel=1e-6)


def test_gradients_scale_with_what_comes_in_and_survive_an_enqueue() -> None:
    """The queue changes between loss and backward in every training step; the gradient must not."""
    queue = _queue(400)
    untouched = copy.deepcopy(queue)
    s, s_hat = unit(N, D, seed=0).requires_grad_(), unit(N, D, seed=1)
    loss = 3 * capt_loss(s, s_hat, queue, temperature=0.1)
    for seed in range(20):
        queue.enqueue(unit(50, D, seed=seed))
    loss.backward()
    _, wanted, _ = _run(s.detach(), s_hat, untouched, 0.1)
    assert s.grad is not None
    assert relative(s.grad, 3 * wanted) < 1e-12


def test_ids_take_copies_out_of_the_negatives() -> None:
    ids, queue_ids = torch.tensor([3, 3, 8, 1, 2]), torch.arange(300) % 9
    s, s_hat, queue = unit(N, D, seed=0), unit(N, D, seed=1), _queue(300, ids=queue_ids)
    loss, d_s, d_s_hat = _run(s, s_hat, queue, 0.1, ids=ids)
    expected = _problem(s, s_hat, queue, 0.1, ids=ids, queue_ids=queue.ids).solve()
    assert float(loss) == pytest.approx(expected[0], rel=1e-12)
    assert max(relative(d_s, expected[1]), relative(d_s_hat, expected[2])) < 1e-10
    without = _run(s, s_hat, queue, 0.1)[0]
    assert float(loss) < float(without) - 0.01
    assert float(_run(s, s_hat, _queue(300), 0.1, ids=torch.arange(N))[0]) == pytest.approx(float(without), rel=1e-12)


def test_alone_in_the_batch_without_negatives_the_loss_is_zero() -> None:
    loss, d_s, d_s_hat = _run(unit(1, D, seed=0), unit(1, D, seed=1), None, 0.1)
    assert float(loss) == 0.0
    assert not d_s.any()
    assert not d_s_hat.any()


def _margin(s: torch.Tensor, s_hat: torch.Tensor, queue: ShardedQueue) -> float:
    """Literally: over both views, the positive's cosine less the highest of the other samples' and the queue's."""
    total = 0.0
    for own, other in ((s, s_hat), (s_hat, s)):
        for i, anchor in enumerate(own):
            rest = [j for j in range(len(s)) if j != i]
            negatives = torch.cat([own[rest], other[rest], queue.rows.to(own.dtype)])
            total += float(anchor @ other[i] - (negatives @ anchor).max())
    return total / (2 * len(s))


def test_stats() -> None:
    s = unit(6, D, seed=0)
    s_hat = s.clone()
    s_hat[[0, 1]] = s[[1, 0]]
    stats = ContrastStats()
    loss = capt_loss(s, s_hat, _queue(50), temperature=0.05, stats=stats)
    assert float(loss) == pytest.approx(float(capt_loss(s, s_hat, _queue(50), temperature=0.05)), rel=1e-12)
    assert stats.top1 == pytest.approx(4 / 6)
    assert stats.positive_probability == pytest.approx(4 / 6, abs=1e-3)
    assert stats.margin == pytest.approx(_margin(s, s_hat, _queue(50)), abs=1e-6)
    capt_loss(s[2:], s_hat[2:], temperature=0.05, stats=stats)
    assert (stats.anchors, stats.top1) == (20, pytest.approx(16 / 20))


@pytest.mark.parametrize("impl", ["chunked", "dense"])
@pytest.mark.parametrize("temperature", [0.5, 0.05, 0.005])
@pytest.mark.parametrize("share", [None, 0.4])
def test_effective_negatives_are_those_of_the_literal_sums(impl: str, temperature: float, share: float | None) -> None:
    s, s_hat, queue = unit(6, D, seed=0), unit(6, D, seed=1), _queue(50)
    stats = ContrastStats()
    capt_loss(s, s_hat, queue, temperature=temperature, queue_share=share, impl=impl, stats=stats)
    held = len(queue.rows)
    weights = torch.ones(12, 12 + held, dtype=torch.float64)
    weights[:, 12:] = 1.0 if share is None else share * 12 / held
    problem = Problem(s, s_hat, torch.zeros(6, dtype=torch.int64), queue.rows, temperature)
    rows = torch.cat([s, s_hat])
    numbers = effective_negatives_by_terms(
        rows, torch.cat([rows, queue.rows]), problem.is_negative(), temperature, weights
    )
    assert stats.effective_negatives == pytest.approx(sum(numbers) / 12, rel=1e-10)


def test_effective_negatives_of_one_point_are_all_and_of_one_hard_negative_one() -> None:
    same, hard = ContrastStats(), ContrastStats()
    point = unit(1, D, seed=0).expand(6, D)
    capt_loss(point, point, temperature=0.05, stats=same)
    assert same.effective_negatives == pytest.approx(10)
    axes = torch.eye(9, D, dtype=torch.float64)
    queue = ShardedQueue(9, D, dtype=torch.float64)
    queue.enqueue(axes)
    info_nce(axes[:1], axes[1:2], queue=queue, temperature=0.02, in_batch="none", stats=hard)
    assert hard.effective_negatives == pytest.approx(1)


def test_one_overflowed_row_makes_the_loss_nan_and_no_error() -> None:
    s = unit(N, D, seed=0, dtype=torch.float32)
    s[2] = torch.nan
    assert capt_loss(s, unit(N, D, seed=1, dtype=torch.float32), temperature=0.1).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rows_are_computed_in_float32(dtype: torch.dtype) -> None:
    s, s_hat, queue = unit(N, D, seed=0).to(dtype), unit(N, D, seed=1).to(dtype), _queue(300, torch.bfloat16)
    loss, d_s, _ = _run(s, s_hat, queue, 0.05)
    expected_loss, wanted, _, _ = _problem(s, s_hat, queue, 0.05).solve()
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(expected_loss, rel=1e-6)
    assert d_s.dtype == dtype
    assert relative(d_s, wanted) < 5e-3


def test_autocast_does_not_touch_it() -> None:
    s, s_hat, queue = (unit(N, D, seed=i, dtype=torch.float32) for i in (0, 1, 2))
    held = ShardedQueue(K, D)
    held.enqueue(queue)
    plain = _run(s, s_hat, held, 0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = _run(s, s_hat, held, 0.05)
    for a, b in zip(plain, inside, strict=True):
        assert torch.equal(a, b)


class _LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation allocated (views of existing storage are not counted)."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.name = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in before:
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                if elements > self.elements:
                    self.elements, self.name = elements, str(func)
        return out


def _largest(n: int, d: int, k: int, impl: str, **options: Any) -> _LargestTensor:
    queue = ShardedQueue(k, d)
    queue.enqueue(unit(k, d, seed=7, dtype=torch.float32))
    s, s_hat = (unit(n, d, seed=i, dtype=torch.float32).requires_grad_() for i in (0, 1))
    with _LargestTensor() as largest:
        capt_loss(s, s_hat, queue, temperature=0.05, **options, impl=impl).backward()
    return largest


@pytest.mark.parametrize(("n", "d", "k"), [(5, 123, 507), (64, 96, 4096), (300, 64, 8000)])
@pytest.mark.parametrize("with_ids", [False, True])
def test_no_tensor_near_anchors_times_queue_or_as_large_as_the_queue(n: int, d: int, k: int, with_ids: bool) -> None:
    largest = _largest(n, d, k, "chunked", ids=torch.arange(n) if with_ids else None)
    assert 0 < largest.elements < min(2 * n * k / 4, k * d), largest.name


def test_the_measure_above_sees_the_dense_logits() -> None:
    assert _largest(64, 96, 4096, "dense").elements >= 2 * 64 * 4096


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be a positive number, got 0.0"),
        ({"temperature": float("nan")}, "positive number, got nan"),
        ({"temperature": torch.tensor(-1.0)}, "positive number, got -1.0"),
        ({"impl": "fused"}, "impl must be one of chunked, dense"),
        ({"in_batch": "none"}, "leaves only the queue"),
        ({"ids": torch.zeros(N, dtype=torch.int32)}, "int64"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    arguments = {"temperature": 0.1, **options}
    with pytest.raises(ConfigError, match=message):
        capt_loss(unit(N, D, seed=0), unit(N, D, seed=1), **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_batch": "gobal"}, "in_batch must be one of global, local, none, got 'gobal'"),
        ({"reduction": "max"}, "reduction must be one of mean, sum, got 'max'"),
        ({"grad_reduction": "none"}, "grad_reduction must be one of mean, sum"),
    ],
)
def test_bad_choices(options: dict[str, str], message: str) -> None:
    """Asked of the check itself: in tests the annotations of the class refuse them even earlier."""
    unchecked: Any = SimpleNamespace(**{**vars(ContrastOptions()), **options})
    with pytest.raises(ConfigError, match=message):
        ContrastOptions.__post_init__(unchecked)


def test_rows_that_are_not_unit_or_do_not_fit() -> None:
    s = unit(N, D, seed=0)
    with pytest.raises(ConfigError, match="positives must have unit norm"):
        capt_loss(s, 1.1 * s, temperature=0.1)
    with pytest.raises(ConfigError, match="queue holds rows of 7 features, the anchors have 123"):
        capt_loss(s, s, ShardedQueue(8, 7), temperature=0.1)


@pytest.mark.parametrize("drift", ["none", "mean"])
def test_a_queue_of_rows_that_are_not_unit_is_refused(drift: str) -> None:
    """Their logits would have no bound: rows of norm 20 make the loss infinite, without a word."""
    s = unit(N, D, seed=0)
    queue = ShardedQueue(8, D, drift=drift)
    queue.enqueue(s, torch.full_like(s, math.nan))  # an overflow is no mistake
    capt_loss(s, s, queue, temperature=0.1)
    queue.enqueue(20 * s)
    with pytest.raises(ConfigError, match=r"the queue was given rows without unit norm: .* before queue.enqueue"):
        capt_loss(s, s, queue, temperature=0.1)


class _Sentences(nn.Module):
    """The interface of a SentenceTransformer: features in, a mapping with the representations out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(unit(20, D, seed=3) * 2)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**features, "sentence_embedding": self.table[features["rows"]]}


def test_the_module_for_pairs_of_texts_is_the_loss_and_fills_the_queue_in_training_alone() -> None:
    model, queue = _Sentences(), ShardedQueue(K, D, dtype=torch.float64)
    loss = CaptLoss(model, queue, temperature=0.1, queue_share=1.0)
    columns = [{"rows": torch.arange(5)}, {"rows": torch.arange(5, 10)}]
    for step in range(3):
        s, s_hat = (F.normalize(model.table[column["rows"]], dim=-1) for column in columns)
        expected = capt_loss(s, s_hat, queue, temperature=0.1, queue_share=1.0)
        with torch.no_grad():
            assert loss(iter(columns)) == expected
        assert len(queue) == 10 * step
        assert loss(columns, labels=torch.zeros(5)) == expected
        assert len(queue) == 10 * (step + 1)
    with pytest.raises(ConfigError, match="two columns of texts, this one has 3"):
        loss([*columns, columns[0]])


def test_a_queue_that_may_weigh_nothing_is_seen_neither_by_the_loss_nor_by_the_diagnostics() -> None:
    s, s_hat = unit(6, D, seed=0), unit(6, D, seed=1)
    queue = ShardedQueue(K, D, dtype=torch.float64)
    queue.enqueue(s, s_hat)  # the anchors themselves: nearer than any live row
    found = []
    for negatives, share in ((queue, 0.0), (None, None)):
        stats = ContrastStats()
        loss = capt_loss(s, s_hat, negatives, temperature=0.1, queue_share=share, hardness=1.0, stats=stats)
        whole = stats.over_ranks()
        figures = whole.top1, whole.margin, whole.positive_probability, whole.effective_negatives
        found.append((loss.item(), whole.anchors, *figures))
    assert found[0] == found[1]

"""The validation numbers against loops over the definitions, closed forms, and one process against many."""

from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from capt.pretrain.base.errors import DataError
from capt.pretrain.contrast import capt_loss, metrics
from capt.pretrain.contrast.metrics import (
    MaskedTokenAccumulator,
    PairAccumulator,
    RowSample,
    alignment,
    contrastive_loss,
    first_direction,
    noise_invariance,
    retrieval_accuracy,
    uniformity,
)
from capt.pretrain.contrastive.metrics import contrast_metrics, token_metrics
from tests.support import run_ranks
from tests.unit.contrast.reference import capt_loss_by_terms

N, D = 23, 7


def pairs(n: int = N, d: int = D, noise: float = 0.8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, d, generator=generator)
    return z, z + noise * torch.randn(n, d, generator=generator)


def unit_pairs(n: int = N, d: int = D, noise: float = 0.8, seed: int = 0) -> tuple[Tensor, Tensor]:
    z, z_hat = pairs(n, d, noise, seed)
    return F.normalize(z, dim=1), F.normalize(z_hat, dim=1)


def normalised(z: Tensor) -> Tensor:
    return z / z.norm(dim=1, keepdim=True)


def token_sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    correct = (logits.argmax(1) == targets).sum()
    return F.cross_entropy(logits.double(), targets, reduction="sum"), correct, torch.tensor(len(targets))


def test_contrastive_loss_is_the_papers_and_the_training_loss() -> None:
    s, s_hat = (normalised(x.double()) for x in pairs())
    for tau in (0.05, 0.5):
        terms = capt_loss_by_terms(s, s_hat, tau, s.new_zeros(0, D)) / N
        found = contrastive_loss(s, s_hat, tau)
        assert found == pytest.approx(float(terms), rel=1e-12)
        assert found == pytest.approx(float(capt_loss(s, s_hat, temperature=tau)), rel=1e-10)


def test_contrastive_loss_at_chance() -> None:
    s = F.normalize(torch.ones(N, D), dim=1)
    assert contrastive_loss(s, s, 0.05) == pytest.approx(2 * math.log(2 * N - 1), rel=1e-12)


def test_retrieval_is_the_share_of_first_places() -> None:
    s, s_hat = (normalised(x.double()) for x in pairs())
    hits = sum(int((s[i] @ s_hat.T).argmax()) == i for i in range(N))
    assert 0 < hits < N
    assert retrieval_accuracy(s, s_hat) == hits / N


def test_retrieval_of_a_collapsed_encoder_is_chance_and_duplicates_share() -> None:
    s = F.normalize(torch.ones(N, D), dim=1)
    assert retrieval_accuracy(s, s) == pytest.approx(1 / N, rel=1e-12)
    s, _ = unit_pairs(4)
    s[3] = s[0]
    assert retrieval_accuracy(s, s) == pytest.approx((1 + 1 + 0.5 + 0.5) / 4, rel=1e-12)


def test_alignment_and_uniformity_are_wang_and_isola() -> None:
    s, s_hat = (normalised(x.double()) for x in pairs())
    assert alignment(s, s_hat) == pytest.approx(float((s - s_hat).pow(2).sum(1).mean()), rel=1e-12)
    assert uniformity(s) == pytest.approx(float(torch.pdist(s).pow(2).mul(-2).exp().mean().log()), rel=1e-12)


def test_uniformity_of_the_sphere_has_its_closed_form() -> None:
    d = 768
    s = F.normalize(torch.randn(2000, d, generator=torch.Generator().manual_seed(3)), dim=1)
    assert uniformity(s) == pytest.approx(-4 + 16 / (2 * d), abs=5e-4)
    assert uniformity(F.normalize(torch.ones(5, d), dim=1)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("n", "d"), [(N, D), (D, N), (5, 5)])
def test_first_direction_is_the_largest_singular_values_share(n: int, d: int) -> None:
    s, _ = unit_pairs(n, d)
    squares = torch.linalg.svdvals(s.double()).square()
    assert first_direction(s) == pytest.approx(float(squares[0] / squares.sum()), rel=1e-6)


def test_first_direction_of_a_point_of_a_line_and_of_the_sphere() -> None:
    point = F.normalize(torch.ones(6, D), dim=1)
    assert first_direction(point) == pytest.approx(1)
    assert first_direction(torch.cat([point, -point])) == pytest.approx(1)
    assert first_direction(torch.eye(D)) == pytest.approx(1 / D)


@pytest.mark.parametrize(
    "function", [uniformity, first_direction, lambda s: alignment(s, s), lambda s: retrieval_accuracy(s, s)]
)
def test_rows_without_unit_norm_are_refused(function) -> None:
    with pytest.raises(ValueError, match="unit L2 norm"):
        function(3 * unit_pairs()[0])
    with pytest.raises(ValueError, match="at least two rows"):
        function(unit_pairs()[0][:1])


def test_noise_invariance_is_its_definitions() -> None:
    z, z_hat = (x.double() + 2 for x in pairs())  # an offset: the anisotropy that centring removes
    off = [(i, j) for i in range(N) for j in range(N) if i != j]

    def gap(a: Tensor, b: Tensor) -> float:
        a, b = normalised(a), normalised(b)
        own = sum(float(a[i] @ b[i]) for i in range(N)) / N
        return own - sum(float(a[i] @ b[j]) for i, j in off) / len(off)

    mean = torch.cat((z, z_hat)).mean(0)
    own = sum(float((z[i] - z_hat[i]) @ (z[i] - z_hat[i])) for i in range(N)) / N
    random = sum(float((z[i] - z_hat[j]) @ (z[i] - z_hat[j])) for i, j in off) / len(off)
    c, c_hat = normalised(z - mean), normalised(z_hat - mean)
    hits = sum(int((a[i] @ b.T).argmax()) == i for a, b in ((c, c_hat), (c_hat, c)) for i in range(N))
    found = noise_invariance(z, z_hat)
    assert found["cosine_gap"] == pytest.approx(gap(z, z_hat), rel=1e-10)
    assert found["centred_gap"] == pytest.approx(gap(z - mean, z_hat - mean), rel=1e-10)
    assert found["drift"] == pytest.approx(own / random, rel=1e-10)
    assert found["top1"] == pytest.approx(hits / (2 * N), rel=1e-12)


def test_noise_invariance_sees_through_scale_and_anisotropy() -> None:
    z, z_hat = pairs(200, 32)
    plain = noise_invariance(z, z_hat)
    moved = noise_invariance(0.01 * z + 5, 0.01 * z_hat + 5)
    assert moved["cosine_gap"] < 1e-3 < plain["cosine_gap"]
    for name in ("centred_gap", "drift", "top1"):
        assert moved[name] == pytest.approx(plain[name], abs=1e-3)


def test_noise_invariance_at_its_ends() -> None:
    z, _ = pairs(50, 16)
    same = noise_invariance(z, z)
    assert same["drift"] == 0
    assert same["top1"] == 1
    assert same["centred_gap"] == pytest.approx(1, abs=0.05)
    unrelated = noise_invariance(z, z.roll(1, dims=0))
    assert unrelated["drift"] == pytest.approx(1, abs=0.1)
    assert unrelated["centred_gap"] == pytest.approx(0, abs=0.1)
    assert unrelated["top1"] == 0
    constant = noise_invariance(torch.ones(50, 16), torch.ones(50, 16))
    assert constant == pytest.approx({"cosine_gap": 0, "centred_gap": 0, "drift": 1, "top1": 1 / 50}, abs=1e-9)


def test_more_noise_is_worse_in_every_number() -> None:
    little, much = (noise_invariance(*pairs(300, 24, noise)) for noise in (0.5, 1.5))
    assert little["drift"] < much["drift"]
    for name in ("cosine_gap", "centred_gap", "top1"):
        assert little[name] > much[name]


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_blocks_bound_memory_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    s, s_hat = unit_pairs(150)
    whole = contrast_metrics(s, s_hat, 0.1)
    monkeypatch.setattr(metrics, "_MAX_SIMILARITIES", 2500)
    with _Largest() as largest:
        blocked = contrast_metrics(s, s_hat, 0.1)
    assert blocked == pytest.approx(whole, abs=1e-12)
    assert largest.numel < 150 * 150 / 8


def test_masked_tokens_weigh_equally_over_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(30, 11, generator=generator), torch.randint(11, (30,), generator=generator)
    tokens = MaskedTokenAccumulator()
    for part in (slice(0, 3), slice(3, 3), slice(3, 30)):
        tokens.update(*token_sums(logits[part], targets[part]))
    found = token_metrics(*tokens.totals())
    assert found["loss/mlm"] == pytest.approx(float(F.cross_entropy(logits.double(), targets)), rel=1e-6)
    assert found["accuracy/mlm"] == pytest.approx(float((logits.argmax(1) == targets).double().mean()), rel=1e-12)


def test_empty_accumulators_are_data_errors() -> None:
    with pytest.raises(DataError, match="no masked token"):
        MaskedTokenAccumulator().totals()
    pairs_ = PairAccumulator()
    with pytest.raises(DataError, match="two sequences"):
        pairs_.gather()
    pairs_.update(torch.ones(1, 3), torch.ones(1, 3))
    with pytest.raises(DataError, match="got 1"):
        pairs_.gather()


def _accumulated(counts: list[list[int]]) -> dict[str, float]:
    """Feed this rank its batches of the same global rows; ``counts[rank]`` are its batch sizes."""
    z, z_hat = pairs()
    logits = 3 * torch.randn(N, 11, generator=torch.Generator().manual_seed(5))
    flat = [size for sizes in counts for size in sizes]
    parts = torch.arange(N).split(flat)
    mine = sum(len(sizes) for sizes in counts[: metrics.rank()])
    rows, tokens = PairAccumulator(), MaskedTokenAccumulator()
    for index in parts[mine : mine + len(counts[metrics.rank()])]:
        rows.update(z[index], z_hat[index])
        tokens.update(*token_sums(logits[index], index % 11))
    z, z_hat = rows.gather()
    unit = F.normalize(z, dim=1), F.normalize(z_hat, dim=1)
    return {**contrast_metrics(*unit, 0.05), **noise_invariance(z, z_hat), **token_metrics(*tokens.totals())}


@pytest.mark.parametrize("counts", [[[5, 5], [5, 8]], [[10], [], [13], []], [[3], [4], [7, 2], [7]]])
def test_one_process_equals_many(counts: list[list[int]]) -> None:
    alone = _accumulated([[9, 14]])
    for found in run_ranks(_accumulated, len(counts), counts):
        assert found == pytest.approx(alone, rel=1e-9, abs=1e-9)


def _sampled(counts: list[int], batch: int, overflowed: int | None) -> tuple[dict[str, float], int]:
    """The figures of a sample of this rank's rows, given in batches, and how many it holds."""
    s, _ = unit_pairs(sum(counts), D)
    if overflowed is not None:
        s[overflowed] = torch.inf
    first = sum(counts[: metrics.rank()])
    sample = RowSample()
    for rows in s[first : first + counts[metrics.rank()]].split(batch):
        sample.update(rows)
    return sample.compute(), sum(map(len, sample._rows))


@pytest.mark.parametrize(
    ("counts", "held"), [([200], [200]), ([300], [256]), ([200, 90], [128, 90]), ([2, 0, 60, 100], [2, 0, 60, 64])]
)
def test_a_sample_of_a_step_is_the_first_rows_of_each_rank(counts: list[int], held: list[int]) -> None:
    s, _ = unit_pairs(sum(counts), D)
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    kept = torch.cat([s[start : start + number] for start, number in zip(starts, held, strict=True)])
    expected = {"uniformity": uniformity(kept), "first_direction": first_direction(kept)}
    for rank, (found, number) in enumerate(run_ranks(_sampled, len(counts), counts, 32, None)):
        assert number == held[rank]
        assert found == pytest.approx(expected, rel=1e-6)


def test_rows_that_overflowed_are_left_out_of_a_sample() -> None:
    s, _ = unit_pairs(9)
    found, _ = _sampled([9], 4, 3)
    left = torch.cat([s[:3], s[4:]])
    assert found == pytest.approx({"uniformity": uniformity(left), "first_direction": first_direction(left)}, rel=1e-6)
    assert all(math.isnan(value) for value in _sampled([2], 4, 0)[0].values())


@pytest.mark.parametrize("world", [1, 3, 256, 1000])
def test_the_sample_of_a_step_does_not_grow_with_the_ranks(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, sampled = torch.randn(300, 2), 0
    monkeypatch.setattr(metrics, "world_size", lambda: world)
    for rank in range(world):
        monkeypatch.setattr(metrics, "rank", lambda rank=rank: rank)
        sample = RowSample()
        sample.update(rows)
        sampled += len(sample._rows[0])
    assert sampled == 256


def test_shapes_and_types_are_checked_in_tests() -> None:
    """By the option --jaxtyping-packages of pyproject.toml; the checker is in tests/conftest.py."""
    rows = torch.ones(3, D)
    with pytest.raises(TypeCheckError, match="s_hat"):
        alignment(rows, torch.ones(4, D))
    with pytest.raises(TypeCheckError, match="temperature"):
        contrastive_loss(rows, rows, "0.1")  # type: ignore[arg-type]

"""Masks by score, hardness of live rows and widths in the forms without directions; and what is refused.

The forms over pairs are compared with a literal loop in ``tests/distributed/test_contrast_pairs.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast import ContrastOptions, ContrastStats, capt_loss, info_nce
from capt.pretrain.contrast.info_nce import check_negatives
from tests.unit.contrast.reference import info_nce_dense
from tests.unit.contrast.support import near, relative, unit
from tests.unit.contrast.test_capt import _LargestTensor

N, D, TAU = 9, 12, 0.1
IDS = torch.arange(N) // 2


def _dense(q: Tensor, k: Tensor, views: list[Tensor], options: dict[str, Any]) -> Tensor:
    """The losses of all rows of ``q``, which are one or two views, against live ``views``."""
    keys = torch.cat(views)
    cosines, positive = (q @ keys.T).detach(), (q * k).sum(1).detach()
    limits = torch.full_like(positive, torch.inf)
    if "mask_margin" in options:
        limits = positive + options["mask_margin"]
    if "mask_relative" in options:
        limits = positive - positive.abs() * options["mask_relative"]
    negative = IDS.repeat(len(q) // N)[:, None] != IDS.repeat(len(views))[None, :]
    negative &= cosines <= limits[:, None]
    return info_nce_dense(q, k, keys, negative, TAU, (options.get("hardness_in_batch", 0.0) * cosines).exp()).sum()


def _expected(a: Tensor, p: Tensor, symmetric: bool, within_view: bool, options: dict[str, Any]) -> Tensor:
    widths = dict(zip(options.get("matryoshka", (D,)), options.get("matryoshka_weights", (1.0,)), strict=True))
    total = torch.zeros((), dtype=torch.float64)
    for width, weight in widths.items():
        s, t = (rows if width == D else normalize(rows[:, :width], dim=1) for rows in (a, p))
        loss = _dense(s, t, [s, t] if within_view else [t], options)
        if symmetric:
            loss = loss + _dense(t, s, [s, t] if within_view else [s], options)
        total = total + weight * loss / (N * (2 if symmetric else 1))
    return total


OPTIONS: list[dict[str, Any]] = [
    {"mask_margin": -0.2},
    {"mask_relative": 0.3},
    {"hardness_in_batch": 6.0},
    {"matryoshka": (D, 5), "matryoshka_weights": (1.0, 0.3)},
    {"mask_margin": 0.0, "hardness_in_batch": 6.0, "matryoshka": (7, D), "matryoshka_weights": (2.0, 1.0)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("within_view", [False, True])
@pytest.mark.parametrize("stats", [False, True], ids=["fixed", "running"])
def test_each_form_is_the_dense_one(options: dict[str, Any], symmetric: bool, within_view: bool, stats: bool) -> None:
    rows = [unit(N, D, seed=0), near(unit(N, D, seed=0), 0.3, seed=1)]
    results = []
    for ours in (True, False):
        a, p = (each.clone().requires_grad_() for each in rows)
        if ours:
            loss = info_nce(
                a, p, temperature=TAU, ids=IDS, symmetric=symmetric, within_view=within_view,
                stats=ContrastStats() if stats else None, **options,
            )  # fmt: skip
        else:
            loss = _expected(a, p, symmetric, within_view, options)
        results.append((loss.item(), *torch.autograd.grad(loss, (a, p))))
    (found, *gradients), (expected, *slopes) = results
    assert found == pytest.approx(expected, rel=1e-12)
    for actual, slope in zip(gradients, slopes, strict=True):
        assert relative(actual, slope) < 1e-11


def test_diagnostics_are_of_cosines_and_not_of_weighted_logits() -> None:
    """The margin to the nearest negative that counts, of the widest rows."""
    a, p = unit(N, D, seed=0), near(unit(N, D, seed=0), 0.3, seed=1)
    stats = ContrastStats()
    info_nce(a, p, temperature=TAU, stats=stats, hardness_in_batch=6.0, mask_margin=-0.2, matryoshka=(4, D))
    cosines, positive = a @ p.T, (a * p).sum(1)
    cosines = cosines.masked_fill((cosines > positive[:, None] - 0.2) | torch.eye(N, dtype=torch.bool), -torch.inf)
    assert stats.anchors == N
    assert stats.margin == pytest.approx(float((positive - cosines.amax(1)).mean()), rel=1e-12)


@pytest.mark.parametrize("form", ["gte", "qwen3"])
def test_memory_grows_with_the_rows_and_not_with_their_pairs(form: Any) -> None:
    largest = []
    for n in (128, 256):
        q, d, h = (unit(n, 16, seed=seed, dtype=torch.float32).requires_grad_() for seed in range(3))
        with _LargestTensor() as seen:
            info_nce(
                q, d, temperature=TAU, negatives=h, negative_owners=torch.arange(n), ids=torch.arange(n) // 2,
                negative_ids=torch.arange(n) // 3, directions=form, mask_margin=0.1, hardness_own=5.0,
                matryoshka=(16, 8),
            ).backward()  # fmt: skip
        largest.append(seen.elements)
    assert largest[1] <= 2 * largest[0]
    assert largest[1] < 256 * 256 / 4


def _pairs() -> dict[str, Any]:
    return {"negatives": unit(4, D, seed=2), "negative_owners": torch.tensor([0, 0, 3, 8]), "ids": torch.arange(N)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"negative_owners": None, "hard_negatives": "own"}, "hard_negatives=own asks whose hard negative"),
        ({"negative_owners": None, "directions": "gte"}, "direction d-d asks whose hard negative"),
        ({"negative_owners": None, "hardness_own": 5.0}, "hardness_own asks whose hard negative"),
        (
            {"negative_owners": torch.tensor([0, 0, 3, 9])},
            "rows of the anchors, 0 to 8, or -1 for nobody's, got 0 to 9",
        ),
        ({"negative_owners": torch.tensor([0, 0, 3, -2])}, "got -2 to 3"),
        ({"negative_ids": torch.arange(4), "ids": None}, "negative_ids are compared with the ids of the anchors"),
        ({"negatives": None}, "negative_owners is one int64 number for each of 0 negatives"),
        ({"in_batch": "none", "negatives": None, "negative_owners": None}, "in_batch=none leaves only the queue"),
        ({"directions": "gte", "symmetric": True}, "directions name the form"),
        ({"matryoshka": (D + 1,)}, f"rows have {D} features"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        info_nce(unit(N, D, seed=0), unit(N, D, seed=1), temperature=TAU, **{**_pairs(), **changes})


def test_one_number_for_each_hard_negative() -> None:
    """Asked of the check itself: in tests the annotations of the public function refuse wrong shapes even earlier."""
    rows, ids = unit(N, D, seed=0), torch.arange(N)
    with pytest.raises(ConfigError, match=r"negative_ids is one int64 number for each of 4 negatives, got \(3,\)"):
        check_negatives(rows, rows[:4], torch.arange(3), None, ids, ContrastOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": ("q-q",)}, "directions without q-d have no positive"),
        ({"directions": ("q-d", "q-d")}, "directions are different ones of q-d, q-q, d-q, d-d"),
        ({"directions": ("q-d", "q-q"), "partition": "per_direction"}, "needs the positive in each direction"),
        ({"directions": "gte", "partition": "joint"}, "partition is part of directions=gte"),
        ({"partition": "joint"}, "partition=joint divides directions"),
        ({"mask_margin": 0.1, "mask_relative": 0.1}, "two limits of one mask"),
        ({"mask_margin": float("nan")}, "mask_margin is a cosine"),
        ({"mask_relative": -0.1}, "mask_relative is a part of the positive's cosine"),
        ({"hardness_own": -1.0}, "hardness_own is a number of 0 or more"),
        ({"matryoshka": (8, 8)}, "matryoshka lists different widths"),
        ({"matryoshka": (0,)}, "matryoshka lists different widths of 1 or more"),
        ({"matryoshka": (8, 4), "matryoshka_weights": (1.0,)}, "one number for each of 2 widths"),
        ({"matryoshka": (8,), "matryoshka_weights": (-1.0,)}, "matryoshka_weights are numbers of 0 or more"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ContrastOptions(**options)


def test_capt_has_directions_of_its_own() -> None:
    rows = unit(N, D, seed=0)
    with pytest.raises(ConfigError, match=r"the directions of capt_loss are those of Eq\. 2-4"):
        capt_loss(rows, rows, temperature=TAU, directions="gte")

"""Parameter gradients of all objectives with CAPT under DeepSpeed equal those of one process given the same pairs.

Ranks and micro-batches hold different numbers of masked words, regions and answers here, so that a mean of means, or a
contrast of the wrong scale, cannot pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gradients import STEPS, gradients, relative
from tests.support import run_ranks
from tests.vision_language import vision_language_mapping


def _mapping(folder: Path, world: int, stage: int, precision: str, accumulation: int, **changes: Any) -> dict[str, Any]:
    rows = 4  # of a global micro-batch
    return vision_language_mapping(
        folder,
        batch={"global": rows * accumulation, "micro": rows // world},
        engine={"zero_stage": stage, "precision": precision},
        optimizer={"lr": 1e-9},  # the weights stay, so that every step compares gradients at the same point
        # BERT's 0.02 makes all first representations nearly equal: differences of equal rows are all rounding. So is
        # the gradient of LayerNorm at a region of zeros, which 1e-12 blows up a million times.
        model={"initializer_range": 0.2, "layer_norm_eps": 1e-5},
        **changes,
    )


_FP32 = [
    (2, "fp32", 0, 4),
    (2, "fp32", 1, 1),
    (2, "fp32", 2, 4),
    (2, "fp32", 3, 1),
    (4, "fp32", 2, 1),
    (4, "fp32", 3, 4),
]
"""Every stage on two ranks, and each accumulation on four; `test_language_gradients.py` has all of them on four."""
_MATCHED = ("fp32", 1, 4)
"""With mismatched pairs left out of the contrast: ranks hold different numbers of anchors."""
_LOSSES = ("", "/mlm", "/matching", "/objects", "/attributes", "/features", "/answers", "/capt")
_ACCURACIES = ("mlm", "matching", "answers")


def _all_gradients(mappings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several jobs in one set of processes: starting those costs more than the jobs."""
    return [gradients(mapping) for mapping in mappings]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gradients")


def _matched(folder: Path, world: int) -> dict[str, Any]:
    return _mapping(folder, world, *_MATCHED[1:2], *_MATCHED[:1], *_MATCHED[2:], contrast={"mismatched": False})


@pytest.fixture(scope="module")
def references(folder: Path) -> list[dict[str, Any]]:
    """A process at ZeRO 0: accumulation of 1, of 4, and the latter without mismatched pairs."""
    mappings = [_mapping(folder, 1, 0, "fp32", n) for n in (1, 4)]
    mappings.append(_matched(folder, 1))
    results: list[dict[str, Any]] = run_ranks(_all_gradients, 1, mappings)[0]
    return results


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[Any, list[dict[str, Any]]]:
    """Per (ranks, precision, stage, accumulation): what each of the ranks saw."""
    found = {}
    for world in (2, 4):
        keys = [key for key in _FP32 if key[0] == world]
        mappings = [_mapping(folder, world, stage, precision, n) for _, precision, stage, n in keys]
        matched = [_matched(folder, world)] if world == 2 else []
        ranks = run_ranks(_all_gradients, world, [*mappings, *matched])
        found |= {key: [rank[i] for rank in ranks] for i, key in enumerate([*keys, "matched"][: len(ranks[0])])}
    return found


def _assert_equal(ranks: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    for step in range(STEPS):
        assert relative(ranks[0]["gradients"][step], reference["gradients"][step]) < 1e-6
        for name in [*(f"loss{name}" for name in _LOSSES), *(f"accuracy/{name}" for name in _ACCURACIES)]:
            measured = {name in rank["losses"][step] for rank in ranks}
            assert measured == {name in reference["losses"][step]}, (step, name)
            if measured == {False}:  # the step asked nothing
                continue
            mean = np.mean([rank["losses"][step][name] for rank in ranks])
            assert mean == pytest.approx(reference["losses"][step][name], rel=1e-5), (step, name)


@pytest.mark.parametrize("key", _FP32, ids=str)
def test_fp32(references: Any, results: Any, key: tuple[int, str, int, int]) -> None:
    _assert_equal(results[key], references[key[3] == 4])


def test_contrast_of_matched_pairs_alone(references: Any, results: Any) -> None:
    _assert_equal(results["matched"], references[2])
    assert references[2]["losses"][0]["loss/capt"] != references[1]["losses"][0]["loss/capt"]


def test_the_bound_notices_losses_of_the_wrong_scale(folder: Path, references: Any) -> None:
    """Half of the weight of any loss, the contrast's (the 1/W error at W = 2) too, moves gradients beyond the bound."""
    names = ("mlm", "matching", "objects", "attributes", "features", "answers")
    mappings = [_mapping(folder, 1, 0, "fp32", 1, objectives={"answers": 1.0, name: 0.5}) for name in names]
    mappings.append(_mapping(folder, 1, 0, "fp32", 1, contrast={"queue": 41, "weight": 0.5}))
    for halved in run_ranks(_all_gradients, 1, mappings)[0]:
        moved = [relative(halved["gradients"][i], references[0]["gradients"][i]) for i in range(STEPS)]
        assert max(moved) > 1e-4


def test_without_a_contrast_the_accumulation_is_nothing_to_the_gradient(folder: Path) -> None:
    """Micro-batches with unlike numbers of words, regions and answers: the means are over those of the whole step."""
    plain = _mapping(folder, 1, 0, "fp32", 4, contrast={"weight": 0.0, "queue": 0})
    cut = [{**plain, "batch": {**plain["batch"], "micro": micro}} for micro in (16, 4, 1)]
    whole, *others = run_ranks(_all_gradients, 1, cut)[0]
    for other in others:
        for step in range(STEPS):
            assert relative(other["gradients"][step], whole["gradients"][step]) < 1e-6
            assert other["losses"][step]["loss"] == pytest.approx(whole["losses"][step]["loss"], rel=1e-6)

"""Parameter gradients of MLM + CAPT are those of one process with one micro-batch, for any micro-batch, ranks and ZeRO.

This is the test that the classic 1/world-size error of gathered contrastive losses cannot pass: the two losses would
then be mixed in another ratio on every world size. Nor can a contrast of each micro-batch alone. Dropout is on, with
masks that are drawn for each sample, so that they do not depend on where it is encoded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capt.pretrain.base.randomness import derive
from capt.pretrain.contrastive.term import ContrastTerm
from tests.gradients import STEPS, gradients, relative
from tests.language import language_mapping
from tests.support import run_ranks


def _draw_dropout_by_sample() -> None:
    """Masks of a sample's views by its number and by how often dropout was drawn before in this forward pass."""
    import capt.pretrain.models.layers
    import capt.pretrain.models.roberta
    from capt.pretrain.language.module import LanguageModule

    state: dict[str, Any] = {}
    forward = LanguageModule.forward

    def numbered(self: Any, tokens: torch.Tensor, *more: Any, **named: Any) -> Any:
        state.update(samples=[hash(tuple(row)) for row in tokens.tolist()], drawn=0)
        return forward(self, tokens, *more, **named)

    def dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        if not training or p == 0:
            return x
        state["drawn"] += 1
        n = len(state["samples"])
        assert len(x) == 2 * n
        masks = []
        for row in range(2 * n):
            seed = derive(state["samples"][row % n] % 2**31, "dropout", row // n, state["drawn"])
            masks.append(torch.rand(x.shape[1:], generator=torch.Generator().manual_seed(seed)) >= p)
        return x * torch.stack(masks) / (1 - p)

    LanguageModule.forward = numbered  # type: ignore[method-assign]
    for module in (capt.pretrain.models.layers, capt.pretrain.models.roberta):
        module.dropout = dropout  # type: ignore[attr-defined]


def _mapping(folder: Path, world: int, stage: int, precision: str, micro: int, **contrast: Any) -> dict[str, Any]:
    """``micro`` samples on all ranks together are a micro-batch."""
    return language_mapping(
        folder,
        batch={"global": _GLOBAL, "micro": max(1, micro // world)},
        engine={"zero_stage": stage, "precision": precision},
        optimizer={"lr": 1e-9},  # the weights stay, so that every step compares gradients at the same point
        # BERT's 0.02 makes all first representations nearly equal, and differences of equal rows are all rounding.
        model={"initializer_range": 0.2, "dropout": 0.1},
        contrast={"queue": 41, **contrast},
    )


_GLOBAL = 16
_FP32 = [
    (world, "fp32", stage, (1, 4, 16)[(stage + shift) % 3])
    for shift, world in enumerate((1, 2, 4))
    for stage in (0, 1, 2, 3)
]
"""Every two of ranks, stage and micro-batch meet."""
_BF16 = [(2, "bf16", 1, 4), (4, "bf16", 2, 16), (2, "bf16", 3, 4)]
_PURE = [(4, "bf16_pure", 1, 4), (2, "bf16_pure", 2, 16), (2, "bf16_pure", 3, 4)]


def _all_gradients(mappings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several jobs in one set of processes: starting those costs more than the jobs. Equal jobs are run once."""
    _draw_dropout_by_sample()
    keys = [json.dumps(mapping) for mapping in mappings]
    found = {key: gradients(mapping) for key, mapping in dict(zip(keys, mappings, strict=True)).items()}
    return [found[key] for key in keys]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gradients")


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, dict[str, Any]]:
    """A process at ZeRO 0, one micro-batch, its contrast with its graph."""
    precisions = ("fp32", "bf16")
    mappings = [_mapping(folder, 1, 0, precision, _GLOBAL, cached=False) for precision in precisions]
    return dict(zip(precisions, run_ranks(_all_gradients, 1, mappings)[0], strict=True))


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[Any, list[dict[str, Any]]]:
    """Per (ranks, precision, stage, micro-batch): what each of the ranks saw."""
    found = {}
    for world in (1, 2, 4):
        keys = [key for key in _FP32 + _BF16 + _PURE if key[0] == world]
        mappings = [_mapping(folder, world, stage, precision, micro) for _, precision, stage, micro in keys]
        ranks = run_ranks(_all_gradients, world, mappings)
        found |= {key: [rank[i] for rank in ranks] for i, key in enumerate(keys)}
    return found


@pytest.mark.parametrize("key", _FP32, ids=str)
def test_fp32(references: Any, results: Any, key: tuple[int, str, int, int]) -> None:
    reference, ranks = references["fp32"], results[key]
    for step in range(STEPS):
        assert relative(ranks[0]["gradients"][step], reference["gradients"][step]) < 1e-6
        for name in ("loss", "loss/mlm", "loss/capt", "accuracy/mlm"):
            mean = np.mean([rank["losses"][step][name] for rank in ranks])
            assert mean == pytest.approx(reference["losses"][step][name], rel=1e-5)


@pytest.mark.parametrize("key", _BF16, ids=str)
def test_bf16(references: Any, results: Any, key: tuple[int, str, int, int]) -> None:
    reference, ranks = references["bf16"], results[key]
    for step in range(STEPS):
        assert relative(ranks[0]["gradients"][step], reference["gradients"][step]) < 1e-2


@pytest.mark.parametrize("key", _PURE, ids=str)
def test_bf16_pure(references: Any, results: Any, key: tuple[int, str, int, int]) -> None:
    """Rounding of eight bits between the products; a stage that loses a gradient or scales it is far beyond."""
    reference, ranks = references["fp32"], results[key]
    for step in range(STEPS):
        assert relative(ranks[0]["gradients"][step], reference["gradients"][step]) < 5e-2


_OPTIONS: dict[str, dict[str, Any]] = {
    "drift": {"drift": "moments"},
    "hardness": {"hardness": 10.0},
    "share": {"queue_share": 0.25, "drift": "moments"},
    "loss of its own": {"queue_weight": 0.5, "drift": "mean", "temperature": {"type": "learned", "value": 0.1}},
}
_CUTS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "drift": ((2, 2, 4),),
    "hardness": ((2, 3, 4),),
    "share": ((1, 0, 4), (4, 3, 16)),
    "loss of its own": ((2, 2, 4), (4, 1, 16)),
}
"""Ranks, ZeRO stage and micro-batch at which each option is looked at."""
_ALONE = "without the cache"


@pytest.fixture(scope="module")
def optional(folder: Path) -> dict[Any, dict[str, Any]]:
    """By option and ranks what a rank saw; with 0 ranks: one process, one micro-batch, its contrast with its graph."""
    jobs = {
        (name, 0): _mapping(folder, 1, 0, "fp32", _GLOBAL, cached=False, **option) for name, option in _OPTIONS.items()
    }
    jobs["halved", 0] = _mapping(folder, 1, 0, "fp32", _GLOBAL, weight=0.5)
    for name, option in _OPTIONS.items():
        for world, stage, micro in _CUTS[name]:
            jobs[name, world] = _mapping(folder, world, stage, "fp32", micro, **option)
    for world in (1, 2):
        jobs[_ALONE, world] = _mapping(folder, world, 1, "fp32", 4, cached=False)
    found = {}
    for world in (1, 2, 4):
        keys = [key for key in jobs if max(key[1], 1) == world]
        found |= dict(zip(keys, run_ranks(_all_gradients, world, [jobs[key] for key in keys])[0], strict=True))
    return found


def test_the_bound_notices_a_contrastive_gradient_of_the_wrong_scale(references: Any, optional: Any) -> None:
    """Halving the contrastive weight (the 1/W error at W = 2) changes gradients by far more than the bound."""
    assert relative(optional["halved", 0]["gradients"][0], references["fp32"]["gradients"][0]) > 1e-2


@pytest.mark.parametrize("option", _OPTIONS)
def test_the_queue_is_corrected_and_weighted_alike(references: Any, optional: Any, option: str) -> None:
    """By the statistics of all rows of the step, by sums over all shards, whatever holds them; the bound notices it."""
    whole = optional[option, 0]["gradients"]
    assert relative(whole[2], references["fp32"]["gradients"][2]) > 1e-4
    for world, *_ in _CUTS[option]:
        for step in range(STEPS):
            assert relative(optional[option, world]["gradients"][step], whole[step]) < 1e-6


def test_without_the_cache_each_micro_batch_is_a_batch_of_its_own(references: Any, optional: Any) -> None:
    """The bound notices it; on two ranks it is the same as on one."""
    one, two = (optional[_ALONE, world]["gradients"][0] for world in (1, 2))
    assert relative(one, references["fp32"]["gradients"][0]) > 1e-2
    assert relative(two, one) < 1e-6


_UNEVEN = {3: [(0, 2), (3, 2)], 5: [(1, 4)]}
"""Ranks that cannot share a batch of 16 evenly: ZeRO stages, and the most samples of a rank's micro-batch."""


def test_any_number_of_ranks_gives_the_gradient_of_one(folder: Path) -> None:
    """Ranks and micro-batches of unlike numbers of samples. The queue holds all steps: of a full one each rank keeps
    its own newest rows."""

    def uneven(world: int, stage: int, micro: int, **contrast: Any) -> dict[str, Any]:
        mapping = _mapping(folder, world, stage, "fp32", _GLOBAL, **{"queue": 200, **contrast})
        return {**mapping, "batch": {"global": _GLOBAL, "micro": micro}}

    options: list[dict[str, Any]] = [{}, _OPTIONS["loss of its own"]]
    wholes = run_ranks(_all_gradients, 1, [uneven(1, 0, _GLOBAL, cached=False, **option) for option in options])[0]
    for world, cuts in _UNEVEN.items():
        cases = [(number % 2, *cut) for number, cut in enumerate(cuts)]
        ranks = run_ranks(_all_gradients, world, [uneven(world, *cut, **options[which]) for which, *cut in cases])
        for number, case in enumerate(cases):
            whole = wholes[case[0]]
            for step in range(STEPS):
                assert relative(ranks[0][number]["gradients"][step], whole["gradients"][step]) < 2e-6, (world, case)
                for name in ("loss", "loss/mlm", "loss/capt", "accuracy/mlm"):
                    mean = np.mean([rank[number]["losses"][step][name] for rank in ranks])
                    assert mean == pytest.approx(whole["losses"][step][name], rel=1e-5), (world, case, name)


def _of_single_samples(mappings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Jobs whose contrast is a mean of what each sample is alone."""
    ContrastTerm.loss = lambda self, views, **_: (views.s * views.s_hat).sum(1).mean()  # type: ignore[method-assign]
    return _all_gradients(mappings)


def test_without_the_cache_unlike_micro_batches_count_by_their_samples(folder: Path) -> None:
    """16 samples in micro-batches of 6, 5 and 5."""
    jobs = [_mapping(folder, 1, 0, "fp32", micro, cached=False, queue=0) for micro in (16, 6)]
    whole, cut = run_ranks(_of_single_samples, 1, jobs)[0]
    for step in range(STEPS):
        assert relative(cut["gradients"][step], whole["gradients"][step]) < 1e-6
        assert cut["losses"][step]["loss"] == pytest.approx(whole["losses"][step]["loss"], rel=1e-6)


def test_without_a_contrast_the_accumulation_is_nothing_to_the_gradient(folder: Path) -> None:
    """Micro-batches with unlike numbers of masked tokens: the mean is over those of the whole step."""
    mapping = _mapping(folder, 1, 0, "fp32", 4)
    mapping["model"]["dropout"] = 0.0
    plain = {**mapping, "contrast": {**mapping["contrast"], "weight": 0.0, "queue": 0}}
    cut = [{**plain, "batch": {**plain["batch"], "micro": micro}} for micro in (16, 4, 1)]
    whole, *others = run_ranks(_all_gradients, 1, cut)[0]
    for other in others:
        for step in range(STEPS):
            assert relative(other["gradients"][step], whole["gradients"][step]) < 1e-6
            assert other["losses"][step]["loss"] == pytest.approx(whole["losses"][step]["loss"], rel=1e-6)

"""LXMERT under all objectives and CAPT: gradients are those of one process with one micro-batch, for any micro-batch.

Dropout is on. Its masks are drawn for each pair, view and position, so that they do not depend on where the pair is
encoded. Pairs hold different numbers of words and regions; the contrast of each micro-batch alone cannot pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capt.pretrain.base.randomness import derive
from tests.gradients import STEPS, gradients, relative
from tests.support import run_ranks
from tests.vision_language import vision_language_mapping

_GLOBAL = 16
_DROPOUT = 0.1


def _all_gradients(mappings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    _draw_dropout_by_pair()
    return [gradients(mapping) for mapping in mappings]


def _draw_dropout_by_pair() -> None:
    """Masks of a pair's views by its number and by how often dropout was drawn before in this forward pass."""
    import capt.pretrain.models.layers
    import capt.pretrain.models.lxmert.layers
    from capt.pretrain.vision_language.module import VisionLanguageModule

    state: dict[str, Any] = {}
    forward = VisionLanguageModule.forward

    def numbered(self: Any, batch: Any, **named: Any) -> Any:
        state.update(batch=batch, numbers=batch.numbers.tolist(), drawn=0)
        return forward(self, batch, **named)

    def of_rows(count: int, length: int, h: int, part: str) -> Tensor:
        """``(count, length, h)``: of the last ``count`` views, originals before corruptions."""
        n, masks = len(state["numbers"]), []
        for row in range(2 * n - count, 2 * n):
            seed = derive(state["numbers"][row % n], part, row // n, state["drawn"])
            masks.append(torch.rand(length, h, generator=torch.Generator().manual_seed(seed)) >= _DROPOUT)
        return torch.stack(masks)

    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        assert training
        assert p == _DROPOUT
        state["drawn"] += 1
        n, h = len(state["numbers"]), x.shape[-1]
        (_, length), regions = state["batch"].tokens.shape, state["batch"].features.shape[1]
        if x.dim() == 3:
            mask = of_rows(len(x), x.shape[1], h, "rows")
        elif len(x) == 2 * n + len(state["batch"].masked):  # what the heads read of the last layer
            words = of_rows(2 * n, length, h, "words").flatten(0, 1)
            first = torch.arange(2 * n) * length
            mask = words[torch.cat([first, state["batch"].masked + n * length])]
        else:  # words, then regions
            pictures, rest = divmod(len(x) - 2 * n * length, regions)
            assert rest == 0
            assert pictures in (n, 2 * n)
            parts = of_rows(2 * n, length, h, "words"), of_rows(pictures, regions, h, "regions")
            mask = torch.cat([part.flatten(0, 1) for part in parts])
        return x * mask / (1 - p)

    VisionLanguageModule.forward = numbered  # type: ignore[method-assign]
    for module in (capt.pretrain.models.layers, capt.pretrain.models.lxmert.layers):
        module.dropout = dropout  # type: ignore[attr-defined]
    capt.pretrain.models.layers.prefers_packing = lambda _: False  # packed words are in no rows of their pairs


def _mapping(folder: Path, world: int, stage: int, micro: int, **contrast: Any) -> dict[str, Any]:
    """``micro`` pairs on all ranks together are a micro-batch."""
    return vision_language_mapping(
        folder,
        batch={"global": _GLOBAL, "micro": max(1, micro // world)},
        engine={"zero_stage": stage, "precision": "fp32"},
        optimizer={"lr": 1e-9},  # the weights stay, so that every step compares gradients at the same point
        # As in test_vision_language.py: rows that differ, and no LayerNorm of a region of zeros that blows up rounding.
        model={"initializer_range": 0.2, "layer_norm_eps": 1e-5, "dropout": _DROPOUT},
        contrast={"queue": 41, **contrast},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cached")


@pytest.fixture(scope="module")
def references(folder: Path) -> list[dict[str, Any]]:
    """A process at ZeRO 0, one micro-batch, its contrast with its graph: of all pairs, of matched ones alone, and (for
    the bound) of all pairs as four micro-batches without the cache."""
    whole = [_mapping(folder, 1, 0, _GLOBAL, cached=False, mismatched=every) for every in (True, False)]
    apart = _mapping(folder, 1, 0, 4, cached=False)
    found: list[dict[str, Any]] = run_ranks(_all_gradients, 1, [*whole, apart])[0]
    return found


_CASES = {
    1: [(0, 1, True), (3, 16, True), (0, 4, False)],
    2: [(0, 4, True), (1, 2, True), (2, 4, True), (3, 4, True), (1, 4, False)],
    4: [(2, 16, True), (3, 4, False)],
}
"""Per number of ranks: ZeRO stage, pairs of a micro-batch over all ranks, whether mismatched pairs are contrasted."""


@pytest.mark.parametrize("world", _CASES)
def test_the_micro_batch_is_nothing_to_the_gradient(folder: Path, references: Any, world: int) -> None:
    mappings = [_mapping(folder, world, stage, micro, mismatched=every) for stage, micro, every in _CASES[world]]
    ranks = run_ranks(_all_gradients, world, mappings)
    for number, case in enumerate(_CASES[world]):
        reference = references[0] if case[2] else references[1]
        for step in range(STEPS):
            assert relative(ranks[0][number]["gradients"][step], reference["gradients"][step]) < 3e-6, (case, step)
            for name in ("loss", "loss/mlm", "loss/matching", "loss/objects", "loss/answers", "loss/capt"):
                measured = {name in rank[number]["losses"][step] for rank in ranks}
                assert measured == {name in reference["losses"][step]}, (case, step, name)
                if measured == {False}:  # the step asked nothing
                    continue
                mean = np.mean([rank[number]["losses"][step][name] for rank in ranks])
                assert mean == pytest.approx(reference["losses"][step][name], rel=1e-5), (case, step, name)


def test_the_bound_notices_a_contrast_of_each_micro_batch(references: Any) -> None:
    """Mismatched pairs left out are noticed too."""
    whole, matched, apart = (reference["gradients"] for reference in references)
    assert relative(apart[0], whole[0]) > 1e-2
    assert relative(matched[0], whole[0]) > 1e-2

"""``contrast.momentum``: what is queued against a loop in float64, and what it leaves untouched.

On every rank a plain copy of the module in float64 is given the averages that a literal loop makes of the weights, and
encodes the rank's samples; the rows that the rank has pushed must be those.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.engines.base import Engine, averaged_weights
from capt.pretrain.engine.optim.optimizers import AVERAGE
from capt.pretrain.engine.task import Progress
from capt.pretrain.language.module import LanguageModule
from tests.language import language_mapping
from tests.momentum import DECAY, GLOBAL, built, momentum_mapping, whole_weights
from tests.support import emulate_fp16, run_ranks

_COMPARED = 5
"""Steps that are compared with the loop in float64."""


def _representations(module: LanguageModule, batch: list[Any], step: int) -> Tensor:
    """Originals of all micro-batches, then corruptions."""
    with torch.no_grad():
        views = [
            module(
                b.tokens, b.corrupted, b.positions, None, b.documents, padded=b.padded, runs=b.runs, step=step
            ).capt
            for b in batch
        ]  # fmt: skip
    return torch.cat([each.s for each in views] + [each.s_hat for each in views])


def _deviations(mappings: list[dict[str, Any]]) -> list[tuple[list[float], list[float]]]:
    """Per job and step: how far the rows pushed are from those of the averages in float64, and of the live weights."""
    found = []
    for mapping in mappings:
        task, engines = built(mapping)
        engine, progress = engines["model"], Progress()
        copy = LanguageModule(task.job, task.model_config).double()
        averages = whole_weights(engine)
        of_averages, of_live = [], []
        batches = task.build_batches(progress)
        for step in range(_COMPARED):
            batch = next(batches)
            live = whole_weights(engine)
            if step:
                averages = {name: DECAY * averages[name] + (1 - DECAY) * live[name] for name in live}
            task.step(engines, batch, progress)
            progress.step += 1
            assert task.contrast is not None
            assert task.contrast.queue is not None
            pushed = task.contrast.queue.state_dict()["rows"][-2 * GLOBAL // _world() :]
            for weights, into in ((averages, of_averages), (live, of_live)):
                copy.load_state_dict(weights, strict=False)  # a tied weight has one name
                into.append(float((pushed - _representations(copy, batch, step)).abs().max()))
        found.append((of_averages, of_live))
    return found


def _world() -> int:
    return torch.distributed.get_world_size()


_WORLDS = {
    1: [(0, 8, {}), (0, 2, {"cached": False}), (0, 2, {}), (1, 2, {}), (2, 8, {}), (3, 2, {})],
    2: [(0, 2, {}), (1, 4, {}), (2, 2, {}), (3, 2, {"cached": False}), (3, 4, {})],
    4: [(0, 2, {}), (2, 1, {}), (3, 1, {})],
}
"""ZeRO stage, samples of a micro-batch on a rank, keys of ``contrast``."""


@pytest.mark.parametrize("world", _WORLDS)
def test_queued_rows_are_those_of_the_averaged_encoder(tmp_path: Path, world: int) -> None:
    mappings = [momentum_mapping(tmp_path, stage, micro=micro, **contrast) for stage, micro, contrast in _WORLDS[world]]
    for rank in run_ranks(_deviations, world, mappings):
        for (of_averages, of_live), case in zip(rank, _WORLDS[world], strict=True):
            assert max(of_averages) < 1e-5, case
            assert of_live[0] < 1e-5, case  # the average starts at the first weights
            assert min(of_live[2:]) > 1e-3, case


def _losses_and_rows(mappings: list[dict[str, Any]]) -> list[tuple[list[float], np.ndarray]]:
    found = []
    for mapping in mappings:
        task, engines = built(mapping)
        progress, losses = Progress(), []
        batches = task.build_batches(progress)
        for step in range(4):
            torch.manual_seed(step)
            losses.append(float(task.step(engines, next(batches), progress)["loss"]))  # type: ignore[arg-type]
            progress.step += 1
        assert task.contrast is not None
        assert task.contrast.queue is not None
        found.append((losses, task.contrast.queue.rows.numpy().copy()))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_an_average_that_forgets_at_once_changes_no_bit(tmp_path: Path, world: int) -> None:
    """With decay 0 all is as without: the dropout of both passes, the live weights, the rows, at every ZeRO stage."""
    cases = [(0, 8 // world, False), (0, 2, True), (3, 2, True)]
    cases += [(1, 2, True), (2, 2, True)] if world > 1 else []
    jobs = []
    for stage, micro, cached in cases:
        for momentum in (None, 0.0):
            mapping = momentum_mapping(tmp_path, stage, micro=micro, cached=cached, momentum=momentum)
            mapping["model"] |= {"dropout": 0.1}
            jobs.append(mapping)
    jobs.append({**jobs[-1], "contrast": {**jobs[-1]["contrast"], "momentum": DECAY}})  # one that can be told apart
    for rank in run_ranks(_losses_and_rows, world, jobs):
        for number, case in enumerate(cases):
            (without, rows), (forgetful, same) = rank[2 * number : 2 * number + 2]
            assert forgetful == without, case
            np.testing.assert_array_equal(same, rows)
        assert np.abs(rank[-1][1] - rows).max() > 1e-3


def _bits(engine: Engine) -> list[np.ndarray]:
    """Weights that this rank holds: partitions at ZeRO 3, and what is whole now."""
    held = [p.detach() for p in engine.module.parameters()]
    if engine.zero_stage == 3:
        held += [p.ds_tensor for p in engine.module.parameters()]  # type: ignore[attr-defined]
    return [tensor.detach().float().cpu().numpy().copy() for tensor in held]


def _all_before_within_after(mappings: list[dict[str, Any]]) -> list[list[list[np.ndarray]]]:
    emulate_fp16()
    return [_before_within_after(mapping) for mapping in mappings]


def _before_within_after(mapping: dict[str, Any]) -> list[list[np.ndarray]]:
    task, engines = built(mapping)
    engine, progress = engines["model"], Progress()
    batches = task.build_batches(progress)
    for _ in range(3):
        batch = next(batches)
        task.step(engines, batch, progress)
        progress.step += 1
    found = [_bits(engine)]
    with averaged_weights(engine), torch.no_grad():
        found.append(_bits(engine))
        task.represent(engine, batch[0], 3)
    return [*found, _bits(engine)]


_KINDS = [(0, "fp32"), (0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16")]
_FP16 = [(1, "fp16"), (3, "fp16")]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[Any]]:
    """By stage and precision what each rank holds before, within and after the averages."""
    folder = tmp_path_factory.mktemp("held")
    found = {}
    for kinds in (_KINDS, _FP16):  # DeepSpeed keeps settings of other types in the process, which fp16 minds
        ranks = run_ranks(_all_before_within_after, 2, [momentum_mapping(folder, *kind) for kind in kinds])
        found |= {kind: [rank[i] for rank in ranks] for i, kind in enumerate(kinds)}
    return found


@pytest.mark.parametrize("kind", _KINDS + _FP16, ids=str)
def test_live_weights_come_back_bit_for_bit(held: Any, kind: tuple[int, str]) -> None:
    for before, within, after in held[kind]:
        assert len(before) == len(after)
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(a, b)
        assert sum(not np.array_equal(a, b) for a, b in zip(before, within, strict=True)) > 10


def _averages_over_skipped_updates(mapping: dict[str, Any]) -> tuple[list[bool], float]:
    """Updates that fp16 left out, and how far the averages are from a literal loop over the others in float64."""
    emulate_fp16()
    task, engines = built(mapping)
    engine, progress = engines["model"], Progress()

    def masters() -> list[Tensor]:
        zero = engine.zero_optimizer
        if engine.zero_stage == 0:
            return list(engine.module.parameters())
        found: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if engine.zero_stage == 3 else zero.single_partition_of_fp32_groups
        )
        return found

    batches, left_out = task.build_batches(progress), []
    expected = [weights.detach().double() for weights in masters()]
    for step in range(6):
        engine.load_loss_scale_state({"scale": 2.0 ** (60 if step in (0, 3) else 8)})
        task.step(engines, next(batches), progress)
        progress.step += 1
        left_out.append(engine.update_was_skipped())
        if not left_out[-1]:
            expected = [
                DECAY * before + (1 - DECAY) * weights.detach().double()
                for before, weights in zip(expected, masters(), strict=True)
            ]
    state = engine.base_optimizer.state
    pairs = zip(expected, masters(), strict=True)
    return left_out, max(float((before - state[weights][AVERAGE]).abs().max()) for before, weights in pairs)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_update_that_fp16_leaves_out_is_none(tmp_path: Path, stage: int) -> None:
    """Counted, it would draw the average to the weights once more: by 1e-4 and more after the first updates."""
    mapping = momentum_mapping(tmp_path, stage, "fp16", micro=2)
    ((left_out, deviation),) = run_ranks(_averages_over_skipped_updates, 1, mapping)
    assert left_out == [True, False, False, True, False, False]
    assert deviation < 1e-6


def test_momentum_needs_a_queue(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set contrast\.queue, or contrast\.momentum=null"):
        job_from_mapping(language_mapping(tmp_path, contrast={"queue": 0, "momentum": 0.99}), "test")
    job_from_mapping(language_mapping(tmp_path, contrast={"queue": 0, "momentum": 0.99, "weight": 0}), "test")

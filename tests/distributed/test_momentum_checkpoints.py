"""``contrast.momentum`` and checkpoints: resumed runs keep their averages; what is exported is the live model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.checkpoint import begin_save, load_engine, load_module_weights, read_metadata, verify
from capt.pretrain.engine.engines.base import Engine, averaged_weights
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.optim.optimizers import AVERAGE
from capt.pretrain.engine.task import Progress
from capt.pretrain.language.export import command
from capt.pretrain.language.load import load_hf, load_model
from capt.pretrain.language.task import LanguageTask
from tests.momentum import built, momentum_mapping, whole_weights
from tests.support import run_ranks


def _resumable(
    mapping: dict[str, Any], save_at: int | None, source: str | None, forget: bool = False
) -> tuple[list[float], np.ndarray]:
    """Losses of the steps done, and this rank's queue."""
    task, engines = _built_from(mapping, source) if source else built(mapping)
    engine, progress, losses = engines["model"], Progress(), []
    if source:
        progress = Progress(**read_metadata(Path(source)).progress.model_dump())
        task.load_state(Path(source), read_metadata(Path(source)).task)
        if forget:
            for state in engine.base_optimizer.state.items():
                state[1][AVERAGE].copy_(state[0])
    batches = task.build_batches(progress)
    while progress.step < 6:
        torch.manual_seed(progress.step)
        losses.append(float(task.step(engines, next(batches), progress)["loss"]))  # type: ignore[arg-type]
        progress.step += 1
        if progress.step == save_at:
            folder = Path(mapping["run"]["dir"])
            begin_save(folder, task.job, engines, task, progress, asynchronous=True).commit()
    assert task.contrast is not None
    assert task.contrast.queue is not None
    return losses, task.contrast.queue.state_dict()["rows"].numpy()


def _built_from(mapping: dict[str, Any], source: str) -> tuple[LanguageTask, dict[str, Engine]]:
    quiet_libraries(debug=False)
    verify(Path(source))
    job = job_from_mapping(mapping, "test")
    task = LanguageTask(job, Path(mapping["run"]["dir"]))
    modules = task.build_modules()
    load_module_weights(Path(source), "model", modules["model"])
    engines = build_engines(modules, job, task.optimizers())
    load_engine(Path(source), engines["model"], read_metadata(Path(source)).engines["model"])
    return task, engines


def _losses(ranks: list[tuple[list[float], np.ndarray]]) -> list[float]:
    return [float(np.mean(each)) for each in zip(*(losses for losses, _ in ranks), strict=True)]


def _rows(ranks: list[tuple[list[float], np.ndarray]]) -> np.ndarray:
    """Rows of the global queue, oldest first: the j-th row of rank r is row j W + r (no rank has dropped any)."""
    return np.stack([rows for _, rows in ranks], axis=1).reshape(-1, ranks[0][1].shape[1])


_CHANGES = [((2, 0), (1, 3)), ((2, 3), (4, 1)), ((4, 2), (2, 0))]
"""Ranks and ZeRO stage, before and after."""
_Ranks = list[tuple[list[float], np.ndarray]]


def _several(runs: list[tuple[Any, ...]]) -> _Ranks:
    return [_resumable(*run) for run in runs]


def _started_once_a_world(runs: dict[Any, tuple[int, tuple[Any, ...]]]) -> dict[Any, _Ranks]:
    """Results of each rank of each run; ``runs`` holds numbers of ranks and arguments, in their order."""
    found: dict[Any, _Ranks] = {}
    for world in sorted({world for world, _ in runs.values()}):
        keys = [key for key in runs if runs[key][0] == world]
        ranks = run_ranks(_several, world, [runs[key][1] for key in keys])
        found |= {key: [rank[i] for rank in ranks] for i, key in enumerate(keys)}
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, _Ranks]:
    """By change and kind: the whole run, the same continued from step 3, and continued elsewhere."""
    before: dict[Any, tuple[int, tuple[Any, ...]]] = {}
    after: dict[Any, tuple[int, tuple[Any, ...]]] = {}
    folder = tmp_path_factory.mktemp("changes")
    for number, change in enumerate(_CHANGES):
        (world, stage), (other, other_stage) = change
        mapping, moved = momentum_mapping(folder, stage), momentum_mapping(folder, other_stage)
        mapping["run"]["dir"] = moved["run"]["dir"] = str(folder / f"run-{number}")
        source = str(folder / f"run-{number}" / "checkpoints" / "step-00000003")
        before[change, "whole"] = (world, (mapping, 3, None))
        before[change, "same"] = (world, (mapping, None, source))
        after[change, "moved"] = (other, (moved, None, source))
    return _started_once_a_world(before) | _started_once_a_world(after)


@pytest.mark.parametrize("change", _CHANGES, ids=str)
def test_a_resumed_run_goes_on_with_its_average(resumed: Any, change: Any) -> None:
    """Averages are equal to the last bit, and to rounding at another number of ranks and stage."""
    whole, same, moved = (resumed[change, kind] for kind in ("whole", "same", "moved"))
    assert _losses(same) == _losses(whole)[3:]
    np.testing.assert_array_equal(_rows(same), _rows(whole))
    np.testing.assert_allclose(_losses(moved), _losses(whole)[3:], rtol=1e-5)
    np.testing.assert_allclose(_rows(moved), _rows(whole), atol=1e-4)


def test_the_bound_notices_a_resumed_run_that_forgot_its_average(tmp_path: Path) -> None:
    whole = run_ranks(_resumable, 1, momentum_mapping(tmp_path, 0), 3, None)
    source = str(tmp_path / "run" / "checkpoints" / "step-00000003")
    forgetful = run_ranks(_resumable, 1, momentum_mapping(tmp_path, 0), None, source, True)
    assert np.abs(_rows(forgetful) - _rows(whole)).max() > 1e-2


def test_a_run_without_averages_does_not_go_on_with_them(tmp_path: Path) -> None:
    """The other way round the averages are left out."""
    run_ranks(_resumable, 1, momentum_mapping(tmp_path, 0, momentum=None), 3, None)
    source = str(tmp_path / "run" / "checkpoints" / "step-00000003")
    with pytest.raises(
        AssertionError, match=r"has no averages of its weights.*contrast\.momentum or checkpoint\.ema; set that to null"
    ):
        run_ranks(_resumable, 1, momentum_mapping(tmp_path, 1), None, source)
    averaged = momentum_mapping(tmp_path, 0)
    averaged["run"]["dir"] = str(tmp_path / "averaged")
    run_ranks(_resumable, 1, averaged, 3, None)
    source = str(tmp_path / "averaged" / "checkpoints" / "step-00000003")
    assert len(_losses(run_ranks(_resumable, 1, momentum_mapping(tmp_path, 1, momentum=None), None, source))) == 3


def _saved(mapping: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The live weights and their averages by name, when the checkpoint of step 4 was written."""
    task, engines = built(mapping)
    engine, progress = engines["model"], Progress()
    batches = task.build_batches(progress)
    for _ in range(4):
        task.step(engines, next(batches), progress)
        progress.step += 1
    begin_save(Path(mapping["run"]["dir"]), task.job, engines, task, progress, asynchronous=False).commit()
    live = whole_weights(engine)
    with averaged_weights(engine):
        averages = whole_weights(engine)
    live, averages = ({n: p.float().numpy() for n, p in weights.items()} for weights in (live, averages))
    return live, averages


def _largest(state: dict[str, Tensor], weights: dict[str, np.ndarray]) -> float:
    """Difference of a model's weights from ``weights``, whose vocabulary may have rows of padding."""
    names = [name for name in state if f"capt.{name}" in weights]
    assert len(names) > 20
    return max(float(np.abs(state[n].numpy() - weights[f"capt.{n}"][: len(state[n])]).max()) for n in names)


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 1), (2, 3)])
def test_what_is_evaluated_and_exported_is_the_live_model(tmp_path: Path, world: int, stage: int) -> None:
    """Equal to the last bit: what `capt evaluate` loads of a checkpoint, and what `capt convert` writes."""
    live, averages = run_ranks(_saved, world, momentum_mapping(tmp_path, stage))[0]
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    command(checkpoint, tmp_path / "hf", to="hf")
    for trained in (load_model(checkpoint), load_hf(tmp_path / "hf")):
        state = trained.model.state_dict()
        assert _largest(state, live) == 0
        assert _largest(state, averages) > 1e-3

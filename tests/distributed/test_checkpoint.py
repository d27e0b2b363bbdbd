"""Checkpoints: exact resume, other world sizes and ZeRO stages, damage, full disks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.engine.checkpoint import (
    begin_save,
    load_engine,
    load_module_weights,
    read_metadata,
    read_weights,
    verify,
)
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.task import Progress
from tests.support import run_ranks, skip_without
from tests.toy.config import ToyJob
from tests.toy.task import ToyTask


def _job(stage: int, precision: str = "fp32", **optimizer: Any) -> ToyJob:
    return ToyJob.model_validate(
        {
            "task": {"type": "toy"},
            "batch": {"global": 8, "micro": 2},
            "engine": {
                "zero_stage": stage,
                "precision": precision,
                "offload_optimizer": optimizer.pop("offload", False),
            },
            "optimizer": {"lr": 1e-2, "clip": 0.5, "weight_decay": 0.1, **optimizer},
        }
    )


def _train(job: ToyJob, folder: str, steps: int, save_at: int | None, source: str | None) -> list[float]:
    quiet_libraries(debug=False)
    task = ToyTask(job, Path(folder))
    modules = task.build_modules()
    if source:
        for name, module in modules.items():
            load_module_weights(Path(source), name, module)
    engines = build_engines(modules, job, task.optimizers())
    progress = Progress()
    if source:
        state = read_metadata(verify_path(source))
        for name, engine in engines.items():
            load_engine(Path(source), engine, state.engines[name])
        progress = Progress(**state.progress.model_dump())
    batches, losses = task.build_batches(progress), []
    while progress.step < steps:
        losses.append(float(task.step(engines, next(batches), progress)["loss"]))
        progress.step += 1
        if progress.step == save_at:
            begin_save(Path(folder), job, engines, task, progress, asynchronous=True).commit()
    return losses


def verify_path(path: str) -> Path:
    verify(Path(path))
    return Path(path)


def _global(per_rank: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*per_rank, strict=True)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], tuple[Path, list[float]]]:
    """A checkpoint at step 3 of a 6-step run, per (world, stage), with the losses of the uninterrupted run."""
    made = {}
    for world, stage in [(2, 0), (2, 1), (2, 2), (2, 3), (1, 1), (4, 3)]:
        folder = tmp_path_factory.mktemp(f"w{world}-z{stage}")
        losses = _global(run_ranks(_train, world, _job(stage), str(folder), 6, 3, None))
        made[world, stage] = (folder / "checkpoints" / "step-00000003", losses)
    return made


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_same_world_resumes_to_the_last_digit(checkpoints: Any, tmp_path: Path, stage: int) -> None:
    source, losses = checkpoints[2, stage]
    resumed = _global(run_ranks(_train, 2, _job(stage), str(tmp_path), 6, None, str(source)))
    assert resumed == losses[3:]


_CHANGES = [((2, 0), (1, 3)), ((2, 1), (4, 2)), ((2, 2), (1, 0)), ((2, 3), (4, 1)), ((1, 1), (2, 3)), ((4, 3), (2, 0))]


@pytest.mark.parametrize(("before", "after"), _CHANGES, ids=str)
def test_other_world_and_stage_continue_the_same_run(
    checkpoints: Any, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    source, losses = checkpoints[before]
    world, stage = after
    resumed = _global(run_ranks(_train, world, _job(stage), str(tmp_path), 6, None, str(source)))
    torch.testing.assert_close(resumed, losses[3:], rtol=1e-5, atol=0)


def test_moments_matter(checkpoints: Any, tmp_path: Path) -> None:
    """The bound above is tight enough to notice a resume that forgot Adam's state."""
    source, losses = checkpoints[2, 1]
    forgetful = tmp_path / "step-00000003"
    forgetful.mkdir()
    for path in source.iterdir():
        (forgetful / path.name).write_bytes(path.read_bytes())
    state = (forgetful / "state.json").read_text()
    (forgetful / "state.json").write_text(state.replace('"optimizer_steps": 3', '"optimizer_steps": 1'))
    resumed = run_ranks(_train_unverified, 1, _job(1), str(tmp_path), 6, str(forgetful))[0]
    assert max(abs(a - b) / b for a, b in zip(resumed, losses[3:], strict=True)) > 1e-4


def _train_unverified(job: ToyJob, folder: str, steps: int, source: str) -> list[float]:
    globals()["verify"] = lambda path: {}
    return _train(job, folder, steps, None, source)


def test_whole_weights_do_not_depend_on_the_writer(checkpoints: Any) -> None:
    weights = [read_weights(checkpoints[key][0]) for key in ((2, 0), (2, 1), (2, 2), (2, 3))]
    for a, b in itertools.pairwise(weights):
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-7)
    assert weights[0]["tied.weight"] is weights[0]["first.weight"]
    assert weights[0]["scale"].shape == (1,)


@pytest.mark.parametrize(
    ("stage", "precision", "optimizer"),
    [
        (0, "fp16", {}),
        (1, "fp16", {}),
        (2, "bf16", {}),
        (1, "bf16_pure", {}),
        (3, "bf16_pure", {}),
        (3, "fp16", {}),
        (2, "fp32", {"offload": True}),
        (3, "fp32", {"offload": True}),
        (0, "fp32", {"type": "lamb"}),
    ],
)
def test_every_precision_and_optimizer_resumes_exactly(
    tmp_path: Path, stage: int, precision: str, optimizer: dict[str, Any]
) -> None:
    if stage:  # at ZeRO 0 it is torch's autocast, which every CPU has
        skip_without(precision)
    job = _job(stage, precision, **optimizer)
    losses = _global(run_ranks(_train, 2, job, str(tmp_path), 6, 3, None))
    source = tmp_path / "checkpoints" / "step-00000003"
    resumed = _global(run_ranks(_train, 2, job, str(tmp_path), 6, None, str(source)))
    assert resumed == losses[3:]


_OPTIMIZERS: dict[str, tuple[dict[str, Any], int, int]] = {
    "adagrad": ({"type": "adagrad"}, 1, 3),
    "adagrad without ZeRO": ({"type": "adagrad"}, 0, 2),
    "sgd": ({"type": "sgd", "lr": 1e-3}, 3, 1),
    "sgd with whole gradients": ({"type": "sgd", "lr": 1e-3}, 2, 0),
    "sgd without momentum": ({"type": "sgd", "lr": 1e-3, "momentum": 0.0}, 0, 3),
    "muon": ({"type": "muon"}, 1, 3),
    "muon without ZeRO": ({"type": "muon"}, 0, 2),
    "stable_adamw": ({"type": "stable_adamw"}, 2, 3),
    "table adagrad": ({"table": "adagrad"}, 0, 0),
    "table sparse_adam": ({"table": "sparse_adam"}, 0, 0),
}
"""Settings, and the ZeRO stages before and after."""
_ALSO_TO_MORE_RANKS = ("adagrad", "sgd with whole gradients", "muon", "table sparse_adam")


def _train_all(jobs: list[tuple[ToyJob, str, int | None, str | None]]) -> list[list[float]]:
    return [_train(job, folder, 6, save_at, source) for job, folder, save_at, source in jobs]


def test_every_optimizer_goes_on_at_another_world_and_stage(tmp_path: Path) -> None:
    """From two ranks to one, and some back, over other ZeRO stages; and at the same world to the last digit."""

    def job(name: str, after: bool) -> ToyJob:
        settings, *stages = _OPTIMIZERS[name]
        optimizer = {key: value for key, value in settings.items() if key != "table"}
        made = _job(stages[after], **optimizer)
        return made.model_copy(update={"table": settings.get("table", "none")})

    def folder(*parts: object) -> str:
        return str(tmp_path / "-".join(map(str, parts)).replace(" ", "_"))

    for world, other, names in ((2, 1, tuple(_OPTIMIZERS)), (1, 2, _ALSO_TO_MORE_RANKS)):
        first = [(job(name, False), folder(name, world), 3, None) for name in names]
        sources = [f"{where}/checkpoints/step-00000003" for _, where, *_ in first]
        same = [(made, folder("same", i), None, sources[i]) for i, (made, *_) in enumerate(first)] if world > 1 else []
        results = [_global(list(each)) for each in zip(*run_ranks(_train_all, world, first + same), strict=True)]
        losses = dict(zip(names, results, strict=False))
        for name, again in zip(names, results[len(first) :], strict=False):
            assert again == losses[name][3:], name
        moved = [(job(name, True), folder("moved", name), None, s) for name, s in zip(names, sources, strict=True)]
        per_rank = run_ranks(_train_all, other, moved)
        for name, *resumed in zip(names, *per_rank, strict=True):
            torch.testing.assert_close(_global(resumed), losses[name][3:], rtol=1e-5, atol=0, msg=name)


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    run_ranks(_train, 1, _job(1), str(tmp_path), 1, 1, None)
    source = str(tmp_path / "checkpoints" / "step-00000001")
    with pytest.raises(AssertionError, match=r"no optimizer state sum, which optimizer\.type adagrad needs"):
        run_ranks(_train, 1, _job(1, type="adagrad"), str(tmp_path), 2, None, source)

"""The compiled step against the same steps one operator at a time, in a process without woven-in shape checks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pretrain.base.errors import ConfigError
from pretrain.config.load import load_job
from pretrain.engine import distributed
from pretrain.engine.engines.build import build_engines
from pretrain.engine.quiet import quiet_libraries
from pretrain.engine.task import Progress
from pretrain.latent.config import LatentJob
from pretrain.latent.data.inputs import Inputs
from pretrain.latent.task import LatentTask
from pretrain.latent.training.compiled import CompiledUpdate
from pretrain.latent.training.steps import Updates
from tests.latent import PTB, plain
from tests.support import run_ranks

compile_ = torch.compile
SMALL = ("model.hidden=8", "critic.hidden=8", "critic.updates=2")  # each update is traced


def _traced(function: Any, *, options: dict[str, Any], **how: Any) -> Any:
    """Dynamo and AOT autograd without code generation, which takes a minute and is torch's business."""
    kept = {"guard_filter_fn": options["guard_filter_fn"]}
    return compile_(function, backend="aot_eager", options=kept, **how)


def _train(preset: str, folder: Path, steps: int, *more: str) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Reports, and every parameter and moment, after ``steps`` whose learning rate falls."""
    job = load_job(PTB.parent / f"{preset}.yaml", ["optimizer.lr=1e-3", "critic.lr=1e-3", f"run.dir={folder}", *more])
    task = LatentTask(job, folder)
    assert isinstance(task.job, LatentJob)
    engines = build_engines(task.build_modules(), task.job, task.optimizers())
    progress = Progress()
    batches, reports = task.build_batches(progress), []
    for step in range(steps):
        for engine in engines.values():
            engine.set_learning_rate(1e-3 / (1 + step))
        reports.append(plain(task.step(engines, next(batches), progress)))
        progress.step += 1
    tensors = {}
    for name, engine in engines.items():
        for key, parameter in engine.module.named_parameters():
            state = engine.base_optimizer.state[parameter]
            tensors[f"{name}.{key}"] = [x.detach().numpy() for x in (parameter, *state.values())]
    return reports, tensors


def _both(preset: str, folder: Path, steps: int) -> Any:
    quiet_libraries(debug=False)
    distributed.initialize(1)
    return [_train(preset, folder, steps, f"model.compile={on}", *SMALL) for on in ("false", "true")]


def _both_traced(preset: str, folder: Path, steps: int) -> Any:
    with mock.patch.object(torch, "compile", _traced):
        return _both(preset, folder, steps)


def _assert_equal(results: Any, tolerance: float) -> None:
    (reports, tensors), (compiled_reports, compiled_tensors) = results
    for report, compiled in zip(reports, compiled_reports, strict=True):
        assert compiled == pytest.approx(report, rel=tolerance, abs=tolerance)
    for name, expected in tensors.items():
        for ours, theirs in zip(compiled_tensors[name], expected, strict=True):
            torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("preset", ["clusters_k4", "clusters_k4_code", "clusters_k4_ivae", "clusters_k4_vae"])
def test_traced_steps_equal_plain_ones(preset: str, tmp_path: Path) -> None:
    (results,) = run_ranks(_both_traced, 1, preset, tmp_path, 4)
    _assert_equal(results, 1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_steps_equal_plain_ones(tmp_path: Path) -> None:
    (results,) = run_ranks(_both, 1, "clusters_k4", tmp_path, 4, timeout=280)
    _assert_equal(results, 1e-4)


def _another_job(folder: Path) -> Any:
    """Two jobs in one process: a graph of the first must not serve the second."""
    quiet_libraries(debug=False)
    distributed.initialize(1)
    with mock.patch.object(torch, "compile", _traced):
        _train("clusters_k4", folder, 3, *SMALL)
        changed = (*SMALL, "model.hidden=9", "critic.hidden=7", "contrast.temperature=0.5", "critic.clamp=3")
        return [_train("clusters_k4", folder, 3, *changed, f"model.compile={on}") for on in ("false", "true")]


def test_another_job_has_a_graph_of_its_own(tmp_path: Path) -> None:
    (results,) = run_ranks(_another_job, 1, tmp_path)
    _assert_equal(results, 1e-5)


def test_without_a_compiler_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no-such-compiler.*model\.compile=false"):
        CompiledUpdate()


def test_a_graph_serves_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    done, inputs = Updates({}, None, []), mock.Mock(spec=Inputs)
    monkeypatch.setattr(torch, "compile", lambda function, **how: lambda *args: done)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    job, other = (load_job(PTB.parent / f"clusters_k{k}.yaml") for k in (4, 8))
    compiled = CompiledUpdate()
    for _ in range(2):
        assert compiled(job, {}, inputs, 1.0) is done
    with pytest.raises(ValueError, match="another job's"):
        compiled(other, {}, inputs, 1.0)

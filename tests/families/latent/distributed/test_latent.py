"""Two ranks do what one rank does on the joined batch; and a resumed run does what an uninterrupted one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.task import Progress
from capt.pretrain.latent.objectives import circle_loss
from capt.pretrain.latent.task import LatentTask
from capt.pretrain.latent.training import CriticDivergedError
from tests.latent import plain, small_job, write_text
from tests.support import run_ranks

# Batches of 7 do not divide over two ranks, and small ones leave a rank without a row of its own.
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "vae": ("vae", ()),
    "clvae_plus": ("clvae_plus", ()),
    "clvae_plus_mi": ("clvae_plus_mi", ()),
    "clvae_plus_mi_paper": ("clvae_plus_mi_paper", ()),
    "mean_inside": (
        "clvae_plus_paper",
        ("critic.circle=mean_inside", "objective.critic_term=sum_inside", "contrast.queue=16"),
    ),
    "over_h": (
        "clvae",
        (
            "contrast.over=h",
            "contrast.queue=16",
            "objective.swap=0.3",
            "contrast.mask_duplicates=true",
            "contrast.temperature=0.2",
        ),  # at 0.05, near-duplicates among few words multiply float32's rounding
    ),
    "padded": ("clvae_plus_mi", ("batch.lengths=similar", "objective.swap=0.3", "contrast.mask_duplicates=true")),
    "sa_vae": ("sa_vae", ("objective.svi_steps=2",)),
    "lag_vae": ("lag_vae", ("objective.aggressive_updates=2",)),
}

# Its second derivatives are differences of gradients a thousandth apart, which leave three digits of float32.
DIFFERENCES = ("sa_vae",)


def _train_all(folder: Path, micro: int, steps: int) -> dict[str, Any]:
    quiet_libraries(debug=False)
    distributed.initialize(1)
    return {variant: _train(*VARIANTS[variant], folder, micro, steps) for variant in VARIANTS}


def _train(preset: str, more: tuple[str, ...], folder: Path, micro: int, steps: int) -> dict[str, Any]:
    """Some steps; the figures of each, the weights after them, and a validation."""
    job = small_job(preset, folder, folder / "run", *more, batch=8, micro=micro)
    task = LatentTask(job, folder / "run")
    modules = task.build_modules()
    if preset in DIFFERENCES:
        modules = {name: module.double() for name, module in modules.items()}
        accelerator = get_accelerator()
        types = [*accelerator.supported_dtypes(), torch.float64]
        accelerator.supported_dtypes = lambda: types  # DeepSpeed refuses to average float64 on CPU
    engines = build_engines(modules, task.job, task.optimizers())
    progress, figures = Progress(), []
    batches = task.build_batches(progress)
    gradients: dict[str, np.ndarray] = {}
    for name, engine in engines.items():
        engine.base_optimizer.register_step_pre_hook(_keeper(name, engine, gradients))
    for _ in range(steps):
        for name, engine in engines.items():
            if name != "critics":  # they keep their own
                engine.set_learning_rate(1e-3)
        report = plain(task.step(engines, next(batches), progress))
        values = distributed.gather_objects(report)
        figures.append({name: float(np.mean([row[name] for row in values])) for name in report})
        progress.step += 1
    weights = {
        f"{name}.{key}": parameter.detach().numpy().copy()
        for name, engine in engines.items()
        for key, parameter in engine.module.named_parameters()
    }
    for engine in engines.values():
        engine.eval()
    with torch.no_grad():
        validation = plain(task.validate(engines, progress))
    return {
        "figures": figures,
        "gradients": gradients,
        "weights": weights,
        "validation": validation,
        "samples": progress.samples,
    }


def _critic_losses(rows: np.ndarray) -> list[np.ndarray]:
    """Loss and gradient of this rank's share of critic values ``(2, 7)`` of posterior and prior, in fp32, by form."""
    mine = torch.from_numpy(rows)[:, distributed.rank() :: distributed.world_size()]
    results = []
    for form in ("code", "single_exp", "mean_inside"):
        values = mine.float().clone().requires_grad_()
        loss = circle_loss(values[:1], values[1:], rows.shape[1], form)
        loss.backward()
        assert values.grad is not None
        results += [loss.detach().numpy(), values.grad.numpy()]
    return results


def test_large_critic_values_weigh_the_same_on_two_ranks() -> None:
    """Beside exp(18) = 6.6e7, fp32 holds no unit: what is left of a difference of two such numbers would be wrong."""
    rows = np.stack([np.linspace(-1, 1, 7), np.full(7, 18.0)])
    first, second = run_ranks(_critic_losses, 2, rows)
    alone = _critic_losses(rows)
    for index, whole in enumerate(alone):
        if index % 2 == 0:
            np.testing.assert_allclose(first[index], whole, rtol=1e-6)
        else:  # the engine's average over the ranks halves them
            np.testing.assert_allclose(first[index], 2 * whole[:, ::2], rtol=1e-5)
            np.testing.assert_allclose(second[index], 2 * whole[:, 1::2], rtol=1e-5)
    code = alone[1][1] / np.exp(rows[1])
    assert float(code.sum()) == pytest.approx(1.0, rel=1e-4)


def _keeper(name: str, engine: Engine, kept: dict[str, np.ndarray]) -> Any:
    """A hook that keeps the gradients of the engine's first update."""

    def keep(*_: Any) -> None:
        for key, parameter in engine.module.named_parameters():
            if parameter.grad is not None:
                kept.setdefault(f"{name}.{key}", parameter.grad.numpy().copy())

    return keep


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """Every variant after 4 steps on one rank, and on each of two."""
    folder = write_text(tmp_path_factory.mktemp("text"))
    (one,) = run_ranks(_train_all, 1, folder, 8, 4)
    return one, run_ranks(_train_all, 2, folder, 4, 4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_train_as_one(variant: str, trained: tuple[Any, list[Any]]) -> None:
    one, (two, other) = trained[0][variant], [result[variant] for result in trained[1]]
    for ours, theirs in zip(one["figures"], two["figures"], strict=True):
        for name, value in ours.items():
            tolerance = 1e-5 if "norm" in name else 1e-6
            assert theirs[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    assert two["gradients"].keys() == one["gradients"].keys()
    for name, gradient in one["gradients"].items():
        atol = 1e-6 * max(1.0, float(np.abs(gradient).max()))
        np.testing.assert_allclose(two["gradients"][name], gradient, rtol=0, atol=atol, err_msg=name)
    assert two["samples"] == one["samples"]
    for name, weight in one["weights"].items():
        assert np.array_equal(two["weights"][name], other["weights"][name]), f"{name} differs between the ranks"
        np.testing.assert_allclose(two["weights"][name], weight, atol=2e-5, err_msg=name)
    for name, value in one["validation"].items():
        assert two["validation"][name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


def _diverge(folder: Path, lr: str) -> str:
    quiet_libraries(debug=False)
    distributed.initialize(1)
    job = small_job("clvae_plus", folder, folder / "run", f"critic.lr={lr}", batch=8, micro=4)
    task = LatentTask(job, folder / "run")
    engines = build_engines(task.build_modules(), task.job, task.optimizers())
    try:
        for batch in task.build_batches(Progress()):
            task.step(engines, batch, Progress())
    except CriticDivergedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("lr", "cause"), [("1e30", "gradient is no longer a number"), ("1", "above critic.clamp=20")])
def test_a_critic_that_runs_away_ends_the_run_on_all_ranks_with_its_name(lr: str, cause: str, tmp_path: Path) -> None:
    first, second = run_ranks(_diverge, 2, write_text(tmp_path), lr)
    assert first == second
    assert "the critics have diverged" in first
    assert cause in first
    assert "lower critic.lr" in first


def test_a_batch_in_parts_is_refused(tmp_path: Path) -> None:
    job = small_job("vae", write_text(tmp_path), tmp_path / "run", batch=8, micro=4)
    with pytest.raises(ConfigError, match=r"with 1 ranks set batch\.micro=8"):
        LatentTask(job, tmp_path / "run").build_modules()

"""The band of the recent past: spikes are found in it, healthy curves stay within it, its state is kept exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from capt.pretrain.engine.checkpoint.layout import SpikeState
from capt.pretrain.reliability.spikes import ENOUGH, WINDOW, Spike, SpikeWatch, limit

STEPS = 1200
Noise = Callable[[np.random.Generator, int], np.ndarray]
NOISES: dict[str, Noise] = {
    "normal": lambda draw, n: draw.normal(size=n),
    "laplace": lambda draw, n: draw.laplace(size=n),
    "lognormal": lambda draw, n: draw.lognormal(0, 0.5, size=n),
    "t with 6 degrees": lambda draw, n: draw.standard_t(6, size=n),
    "uniform": lambda draw, n: draw.uniform(-1, 1, size=n),
}


def curves(noise: np.ndarray) -> dict[str, np.ndarray]:
    """Losses of healthy runs, with ``noise`` of scale 1."""
    step = np.arange(len(noise))
    drop = 2 + 8 * np.exp(-step / 60)
    restarts = 2 + 0.4 * np.minimum(step % 500, 40) / 40 * np.exp(-(step % 500) / 300)
    return {
        "flat": 2 + 0.05 * noise,
        "warm-up drop": drop + 0.03 * drop * noise,
        "plateau, then drop": np.where(step < 400, 10, 3 + 7 * np.exp(-(step - 400) / 30)) + 0.02 * noise,
        "learning-rate restarts": restarts + 0.005 * noise,
        "slow rise": 1 + 0.001 * step + 0.01 * noise,
        "near zero": 1e-4 * (1 + np.exp(-step / 100)) * np.exp(0.3 * np.clip(noise, -4, 4)),
        "negative": -5 + 3 * np.exp(-step / 200) + 0.1 * noise,
        "hardly any noise": 2 + 1e-7 * noise + np.exp(-step / 50),
    }


def watched(values: Sequence[float], threshold: float = 10.0, norms: Sequence[float] | None = None) -> list[Spike]:
    watch = SpikeWatch(threshold)
    norms = np.ones(len(values)) if norms is None else norms  # type: ignore[assignment]
    found = (
        watch.look(step, {"loss": float(value), "grad_norm": float(norm)})
        for step, (value, norm) in enumerate(zip(values, norms, strict=True), start=1)
    )
    return [spike for spike in found if spike is not None]


@pytest.mark.parametrize(("seed", "kind"), list(enumerate(NOISES)))
def test_no_alarm_on_healthy_curves(kind: str, seed: int) -> None:
    noise = NOISES[kind](np.random.default_rng([seed, len(kind)]), STEPS)
    for name, curve in curves(np.clip(noise, -15, 15)).items():
        norms = np.exp(np.log(np.abs(curve)) + 0.3 * noise)
        assert not watched(curve, norms=norms), f"{name} with {kind} noise, as the loss and as the norm"


@pytest.mark.parametrize("kind", NOISES)
def test_a_spike_is_found_at_its_step_and_once(kind: str) -> None:
    """A loss of 2 with noise of 0.05 jumps to 6 for a step; a norm of 1 to 100."""
    noise = NOISES[kind](np.random.default_rng(len(kind)), 400)
    for at in (ENOUGH, 60, 399):
        loss, norms = 2 + 0.05 * noise, np.exp(0.2 * noise)
        loss[at] = 6
        (spike,) = watched(loss)
        assert (spike.step, spike.name, spike.value) == (at + 1, "loss", 6)
        assert 2 < spike.limit < 6
        norms[at] *= 100
        (spike,) = watched(np.full(400, 2.0), norms=norms)
        assert (spike.step, spike.name) == (at + 1, "grad_norm")
        assert spike.value == pytest.approx(norms[at])


def test_a_loss_that_blows_up_over_ten_steps_is_found_on_the_way() -> None:
    rise = np.linspace(2, 7, 11)[1:]
    values = np.concatenate([2 + 0.03 * np.random.default_rng(1).normal(size=300), rise])
    assert watched(values)[0].step <= 303


def test_a_new_level_is_a_spike_for_a_few_steps_only() -> None:
    values = np.concatenate([np.full(200, 2.0), np.full(200, 4.0)]) + 0.02 * np.random.default_rng(2).normal(size=400)
    assert [spike.step for spike in watched(values)] == [201, 202, 203, 204, 205]


def test_nothing_is_judged_without_a_past_and_nothing_that_is_not_finite() -> None:
    values = [2.0] * (ENOUGH - 1) + [50.0] + [2.0] * 50
    assert not watched(values)
    assert watched([2.0, *values])
    assert not watched([2.0, float("nan"), float("inf")] * 50)


def test_the_limit_is_the_equation() -> None:
    """Against numpy, over windows of every length."""
    draw = np.random.default_rng(3)
    for n in range(ENOUGH, WINDOW + 1):
        past = draw.normal(2, 0.5, size=n)
        middle = np.median(past)
        spread = 1.4826 * np.median(np.abs(past - middle))
        tail = (np.quantile(past, 0.95, method="lower") - middle) / 1.645
        expected = max(middle, np.median(past[-8:])) + 6 * max(spread, tail, 0.01 * abs(middle))
        assert limit(past.tolist(), 6.0, 0.01, relative=True) == pytest.approx((middle, expected))


def test_a_state_read_back_judges_as_if_nothing_had_happened() -> None:
    draw = np.random.default_rng(4)
    values = 2 + 0.1 * draw.normal(size=300)
    values[[150, 260]] = 9
    watch, whole = SpikeWatch(10.0), watched(values)
    found = []
    for step, value in enumerate(values, start=1):
        if step % 37 == 0:
            text = json.dumps(watch.state.model_dump())
            watch = SpikeWatch(10.0, SpikeState.model_validate(json.loads(text)))
        spike = watch.look(step, {"loss": float(value), "grad_norm": 1.0})
        found += [] if spike is None else [spike]
    assert found == whole
    assert len(whole) == watch.count == 2
    assert watch.last == 261
    watch.forget()
    assert watch.look(301, {"loss": 100.0}) is None

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast import build_temperature, inverted_triangle
from capt.pretrain.contrast.temperature import SCHEDULES, Learned


def test_equation_6_at_its_corners() -> None:
    assert inverted_triangle(0, 200_000) == pytest.approx(0.55, abs=1e-15)
    assert inverted_triangle(50_000, 200_000) == pytest.approx(0.30, abs=1e-15)
    assert inverted_triangle(100_000, 200_000) == pytest.approx(0.05, abs=1e-15)
    assert inverted_triangle(200_000, 200_000) == pytest.approx(0.55, abs=1e-15)
    assert inverted_triangle(1, 3) == pytest.approx(0.5 / 3 + 0.05, abs=1e-15)


@given(step=st.integers(-10, 2000), total=st.integers(1, 1000), minimum=st.floats(1e-3, 1.0))
def test_equation_6_is_a_v_within_its_range(step: int, total: int, minimum: float) -> None:
    tau = inverted_triangle(step, total, minimum)
    clamped = min(max(step, 0), total)
    assert minimum <= tau <= minimum + 0.5 + 1e-12
    assert tau == pytest.approx(inverted_triangle(total - clamped, total, minimum), abs=1e-12)


@pytest.mark.parametrize(
    ("type_", "parameters", "expected"),
    [
        ("inverted_triangle", {"total_steps": 10, "minimum": 0.1}, [0.6, 0.1, 0.6, 0.6]),
        ("constant", {"value": 0.2}, [0.2, 0.2, 0.2, 0.2]),
        ("linear", {"total_steps": 10, "start": 0.4, "end": 0.2}, [0.4, 0.3, 0.2, 0.2]),
        ("learned", {"start": 0.07}, [0.07] * 4),
    ],
)
def test_each_schedule(type_: str, parameters: dict[str, float], expected: list[float]) -> None:
    schedule = build_temperature(type_, parameters)
    assert [torch.as_tensor(schedule(step)).item() for step in (0, 5, 10, 15)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("type_", "parameters", "message"),
    [
        ("constant", {"value": 0.0}, "value must be a positive number, got 0.0"),
        ("constant", {"value": float("nan")}, "positive"),
        ("constant", {"valu": 1.0}, "valu"),
        ("linear", {"total_steps": 5, "end": -1.0}, "end must be a positive"),
        ("linear", {"total_steps": 0}, "1 step or more"),
        ("inverted_triangle", {"total_steps": 0}, "1 step or more"),
        ("inverted_triangle", {"total_steps": 5, "minimum": 0.0}, "minimum"),
        ("learned", {"start": 2.0}, "within 0.01 .. 1.0, got 2.0"),
        ("learned", {"minimum": 0.0}, "minimum"),
        ("triangle", {}, "unknown temperature schedule .triangle.; known are constant, inverted"),
    ],
)
def test_bad_input_is_one_clear_line(type_: str, parameters: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build_temperature(type_, parameters)
    assert "\n" not in str(error.value)


def test_every_schedule_is_covered_above() -> None:
    assert set(SCHEDULES) == {"inverted_triangle", "constant", "linear", "learned"}


def test_learned_temperature_is_bounded_and_can_come_back() -> None:
    learned = Learned(start=0.05, minimum=0.02, maximum=0.5)
    with torch.no_grad():
        learned.log_temperature.fill_(-10.0)
    optimizer = torch.optim.SGD(learned.parameters(), lr=50.0)
    assert learned(0).item() == pytest.approx(0.02, rel=1e-6)
    for _ in range(12):
        optimizer.zero_grad()
        (-learned(0)).backward()
        optimizer.step()
    assert learned(0).item() > 0.03

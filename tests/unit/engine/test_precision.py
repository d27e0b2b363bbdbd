"""A precision that the machine has no units for is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed.accelerator
import pytest
import torch

from capt.launcher.plan import Options
from capt.launcher.start import begin
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.engine.rank import check_precision


class _Device:
    """What DeepSpeed says of a device."""

    def __init__(self, name: str, fp16: bool | None) -> None:
        self._name, self._fp16 = name, fp16

    def device_name(self) -> str:
        return self._name

    def is_fp16_supported(self) -> bool | None:  # DeepSpeed answers None for a CPU without
        return self._fp16

    def is_bf16_supported(self) -> bool:
        return True


def _use(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: device)


def test_a_cpu_without_fp16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, _Device("cpu", None))
    check_precision("fp32")
    check_precision("bf16")
    with pytest.raises(ConfigError, match="fp16: this machine's CPU has no fp16 units; use fp32 or bf16"):
        check_precision("fp16")
    _use(monkeypatch, _Device("cpu", True))
    check_precision("fp16")


def test_a_gpu_that_emulates_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, _Device("cuda", True))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    check_precision("fp16")
    with pytest.raises(ConfigError, match="bf16: this machine's GPU has no bf16 units; use fp32 or fp16"):
        check_precision("bf16")


def test_a_local_launch_asks_before_it_makes_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _use(monkeypatch, _Device("cpu", None))
    overrides = ["engine.precision=fp16", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match="has no fp16 units"):
        begin("capt.pretrain", "capt_tiny", overrides, Options(launcher="local"), debug=False, show=None)
    assert not list(tmp_path.iterdir())

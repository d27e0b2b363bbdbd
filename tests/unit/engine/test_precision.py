"""A precision that the machine has no units for is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from capt.launcher.plan import Options
from capt.launcher.start import begin
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config import load_job
from capt.pretrain.engine.rank import check_precision, with_precision

NEEDS = {
    "mine": ["data.train=unread.csv", "model.init=unread"],
    "simcse_unsup": ["data.files=unread.jsonl"],
    "rte": ["data.path=unread", "model.init=unread"],
    "vqa": ["model.init=scratch"],
}


def _on_gpu(monkeypatch: pytest.MonkeyPatch, *, capability: int, bf16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)


def _on_cpu(monkeypatch: pytest.MonkeyPatch, *, fp16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: fp16)


def test_a_cpu_without_fp16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_cpu(monkeypatch, fp16=False)
    for precision in ("fp32", "auto", "bf16"):
        check_precision(precision)
    with pytest.raises(ConfigError, match="fp16: this machine's CPU has no fp16 units; use fp32 or bf16"):
        check_precision("fp16")
    _on_cpu(monkeypatch, fp16=True)
    check_precision("fp16")


def test_a_gpu_that_emulates_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_gpu(monkeypatch, capability=7, bf16=False)
    check_precision("fp16")
    with pytest.raises(ConfigError, match="bf16: this machine's GPU has no bf16 units; use fp32 or fp16"):
        check_precision("bf16")
    _on_gpu(monkeypatch, capability=6, bf16=False)
    with pytest.raises(ConfigError, match=r"has no fp16 units; use fp32$"):
        check_precision("fp16")


@pytest.mark.parametrize("name", ["capt_continue", "rte", "vqa", "mine", "simcse_unsup"])
def test_auto_is_bf16_where_a_gpu_has_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    job = load_job(name, NEEDS.get(name, []))
    assert job.engine.precision == "auto"
    _on_cpu(monkeypatch, fp16=True)
    assert with_precision(job).engine.precision == "fp32"
    _on_gpu(monkeypatch, capability=7, bf16=False)
    assert with_precision(job).engine.precision == "fp32"
    _on_gpu(monkeypatch, capability=9, bf16=True)
    assert with_precision(job).engine.precision == "bf16"
    assert job.engine.precision == "auto"  # what the run folder keeps: another machine may continue it


def test_a_precision_is_checked_without_deepspeed() -> None:
    script = "import sys; from capt.pretrain.engine.rank import check_precision; check_precision('bf16')"
    subprocess.run([sys.executable, "-c", f"{script}; assert 'deepspeed' not in sys.modules"], check=True)


def test_a_local_launch_asks_before_it_makes_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _on_cpu(monkeypatch, fp16=False)
    overrides = ["engine.precision=fp16", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match="has no fp16 units"):
        begin("capt.pretrain", "capt_tiny", overrides, Options(launcher="local"), debug=False, show=None)
    assert not list(tmp_path.iterdir())

"""A model is made only when the checkpoint bears out the sizes that its configuration claims."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.checkpoint import load_module, read_weights
from capt.pretrain.engine.checkpoint.save import write_weights_only
from capt.pretrain.registry import TASKS
from tests.toy.task import ToyModel

TASKS["toy"] = "tests.toy"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    job = job_from_mapping({"task": {"type": "toy"}}, "test")
    target = tmp_path / "checkpoints" / "step-00000000"
    return write_weights_only(target, job, {"model": ToyModel(13)}, {"width": 13})


class Drawn(nn.Module):
    def __init__(self, rows: int, made: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, 1 << 20))
        made.append(self.weight.device.type)
        nn.init.normal_(self.weight)


def test_the_weights_are_those_of_the_checkpoint(checkpoint: Path) -> None:
    model = load_module(checkpoint, "model", lambda: ToyModel(13))
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert float(model.scale.detach()) == 1.0


def test_a_configuration_alone_gets_no_memory(checkpoint: Path) -> None:
    """A terabyte, asked for by a configuration, and by a manifest whose tensors are not there."""
    made: list[str] = []
    with pytest.raises(CheckpointError, match=r"it has no parameter 'weight'; set model\.\*, .*\(model\.init\)"):
        load_module(checkpoint, "model", lambda: Drawn(1 << 18, made))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["modules"]["model"] = {"shapes": {"weight": [1 << 18, 1 << 20]}, "ties": {}}
    for name, record in manifest["files"].items():
        record["sha256"] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="the manifest has no such parameter"):
        load_module(checkpoint, "model", lambda: Drawn(1 << 18, made))
    assert made == ["meta", "meta"]


def test_looking_first_loads_no_compiler() -> None:
    """torch draws on the meta device by code that imports its compiler: seconds at the start of every evaluation."""
    code = """
import sys, torch
from torch import nn
from capt.pretrain.engine.checkpoint import load
with torch.device("meta"), load._Undrawn():
    nn.Embedding(4, 4)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("read", [lambda path: load_module(path, "model", lambda: ToyModel(13)), read_weights])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path, number: float, read: Any) -> None:
    model = ToyModel(13)
    with torch.no_grad():
        model.norm.bias[3] = number
    job = job_from_mapping({"task": {"type": "toy"}}, "test")
    checkpoint = write_weights_only(tmp_path / "checkpoints" / "step-00000000", job, {"model": model}, {"width": 13})
    with pytest.raises(CheckpointError, match=r"norm\.bias holds weights that are not finite"):
        read(checkpoint)

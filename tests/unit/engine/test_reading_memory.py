"""Memory that the files of a checkpoint take while its tensors are read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from capt.pretrain.engine.checkpoint import load
from capt.pretrain.engine.checkpoint.load import Index, TensorPiece

_TENSORS, _NUMEL = 8, 1 << 20
_NAME = "tables.safetensors"


def mapped(path: Path) -> int:
    """Bytes of a file that are memory of this process."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field = line.split()
        if not field[0].endswith(":"):
            inside = line.endswith(str(path))
        elif inside and field[0] == "Rss:":
            found += 1024 * int(field[1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")
@pytest.mark.parametrize("at_once", [_NUMEL // 4, 2 * _NUMEL])
def test_what_has_been_read_does_not_stay_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Two tables of a gigabyte would take two gigabytes more while they are read."""
    monkeypatch.setattr(load, "_AT_ONCE", at_once)
    stored = {f"weight/{i}@0": torch.full((_NUMEL,), float(i)) for i in range(_TENSORS)}
    save_file(stored, tmp_path / _NAME)
    pieces = {("weight", str(i)): [TensorPiece(0, _NUMEL, _NAME, f"weight/{i}@0")] for i in range(_TENSORS)}
    out = torch.empty(_NUMEL)
    kept = 0
    with Index(tmp_path, pieces).reader() as reader:
        for i in range(_TENSORS):
            reader.fill("weight", str(i), 0, out)
            assert bool((out == i).all())
            kept = max(kept, mapped(tmp_path / _NAME))
    assert kept <= 4 * at_once + (1 << 20), f"{kept >> 20} MiB"
    assert mapped(tmp_path / _NAME) == 0

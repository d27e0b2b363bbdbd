"""The room that local checkpoints leave to others."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capt.pretrain.reliability.local import storage

GIB = 1 << 30


@pytest.mark.parametrize(
    ("total", "free", "expected"),
    [
        (20 * GIB, 5 * GIB, 3 * GIB),  # a tenth of a small disk
        (1000 * GIB, 50 * GIB, 46 * GIB),  # a large one with less than a tenth free still has room
        (1000 * GIB, 3 * GIB, -1 * GIB),
    ],
)
def test_of_a_disk_a_tenth_and_at_most_four_gib_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, expected: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=free))
    monkeypatch.setattr(storage, "_is_memory", lambda path: False)
    assert storage.free_bytes(tmp_path / "not yet made") == expected


def test_of_memory_a_tenth_is_left_whatever_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = SimpleNamespace(total=1000 * GIB, free=150 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(storage, "_is_memory", lambda path: True)
    monkeypatch.setattr(storage, "available_memory", lambda: 80 * GIB)
    assert storage.free_bytes(tmp_path) == 50 * GIB

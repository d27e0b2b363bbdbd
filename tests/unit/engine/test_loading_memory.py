"""Memory that loader workers keep of batches that are done."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

_LOAD = """
import os, sys
from dataclasses import dataclass
from pathlib import Path
import torch
from capt.pretrain.config.schema import LoaderSection
from capt.pretrain.engine.rank import keep_freed_memory
from capt.pretrain.engine.loading import training_batches

@dataclass(frozen=True)
class Batch:
    values: torch.Tensor
    anonymous: int

def assemble(start):
    kept = [torch.ones(size, dtype=torch.uint8) for size in (3 << 20, 5 << 20, 4 << 20)]
    text = Path("/proc/self/smaps_rollup").read_text()
    found = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Anonymous:"))
    return [Batch(kept[start % 3], found)]

keep_freed_memory()  # as a rank does
found = [b.anonymous for step in training_batches(assemble, range(50), LoaderSection(workers=1)) for b in step]
print("grown by", max(found[10:]) - found[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")
def test_freed_batches_go_back_to_the_kernel() -> None:
    """Kept, they would be hundreds of megabytes in each of a rank's workers."""
    done = subprocess.run([sys.executable, "-c", _LOAD], capture_output=True, text=True, check=False, timeout=120)
    grown = re.search(r"grown by (-?\d+)", done.stdout)
    assert grown is not None, done.stderr
    assert int(grown[1]) < 60 << 10, f"{int(grown[1]) >> 10} MiB"

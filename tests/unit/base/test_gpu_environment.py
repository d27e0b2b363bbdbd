"""What torch reads from the environment on GPUs: set before it is used, and never over the user's word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from capt.pretrain.base import distributed


def test_what_is_set_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    monkeypatch.setattr(os, "environ", {})
    assert distributed.prepare_gpus(Path("/runs/a/collectives-rank-")) == {} or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    os.environ.update(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:128", TORCH_NCCL_DUMP_ON_TIMEOUT="0")
    chosen = distributed.prepare_gpus(Path("/runs/a/collectives-rank-"))
    assert chosen == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "/runs/a/collectives-rank-"}
    assert chosen.items() <= os.environ.items()
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert distributed.prepare_gpus(Path("/runs/b/collectives-rank-")) == {}
    monkeypatch.undo()
    assert dict(os.environ) == before

"""Variables that torch reads on GPUs: set before use, and never over the user's word."""

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


def test_weights_travel_between_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with GPUs do not use the hosts' network of their processors."""
    seen = []

    def broadcast(x: torch.Tensor, source: int) -> None:
        seen.append((x.device.type, source))
        raise InterruptedError

    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(distributed.dist, "broadcast", broadcast)
    with pytest.raises(InterruptedError):
        distributed.broadcast_tensor(torch.ones(3))
    assert seen == [("meta", 0)]

"""Limit of a process's open files."""

from __future__ import annotations

import os
import resource

import pytest
import torch

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.process import allow_open_files


def test_a_rank_may_have_a_connection_of_each_of_a_thousand_others() -> None:
    """Rank 0 has, where all meet. With the usual limit of 1,024 open files the last of 1,024 ranks waited in vain."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    files = []
    try:
        allow_open_files(1024)
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(300)]
        now = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert now == (1280 if hard == resource.RLIM_INFINITY else min(hard, 1280), hard)
        allow_open_files(2)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == now
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("rank", "gpu", "files", "refused"),
    [("0", True, 1024, True), ("9", True, 1024, False), ("9", False, 1024, True), ("0", True, 1200, False)],
)
def test_a_limit_that_a_thousand_ranks_would_reach_is_refused_before_they_meet(
    monkeypatch: pytest.MonkeyPatch, rank: str, gpu: bool, files: int, refused: bool
) -> None:
    """Else the last of them would wait until the time-out of the process group, and nothing would say why."""
    place = {"RANK": rank, "WORLD_SIZE": "1024", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "0"}
    for name, value in {**place, "MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    met: list[str] = []
    monkeypatch.setattr(distributed, "allow_open_files", lambda more: files)
    monkeypatch.setattr(distributed, "_join", lambda backend, *_, **__: met.append(backend))
    monkeypatch.setattr(distributed.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    if refused:
        with pytest.raises(ConfigError, match=f"1024 files open .*rank {rank} of 1024 needs 1088 at least: ulimit -n"):
            distributed.initialize(1.0)
    else:
        distributed.initialize(1.0)
    assert met == ([] if refused else ["nccl"])

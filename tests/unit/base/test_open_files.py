"""How many files a process may have open."""

from __future__ import annotations

import os
import resource

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

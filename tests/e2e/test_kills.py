"""Kills of any process of supervised jobs, saves included: nothing is lost (``make soak`` kills a thousand times)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import kill_at_random


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_lose_nothing(tmp_path: Path, kills: int) -> None:
    assert kill_at_random(tmp_path, kills, seed=1, parallel=2).total() >= kills

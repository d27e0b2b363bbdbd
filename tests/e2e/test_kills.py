"""Fifty kills of any process of supervised jobs, saves included: nothing is lost (``make soak`` kills a thousand)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import kill_at_random


@pytest.mark.timeout(600)
def test_fifty_kills_lose_nothing(tmp_path: Path) -> None:
    assert kill_at_random(tmp_path, 50, seed=1, parallel=2).total() >= 50

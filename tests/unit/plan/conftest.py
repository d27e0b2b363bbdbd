"""Steps that several tests of plans simulate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from capt.pretrain.plan import step


@pytest.fixture(scope="module", autouse=True)
def _simulated_once() -> Iterator[None]:
    """Equal steps of a file are simulated once: those of jobs that differ in their folder and schedule alone."""
    simulate, known = step._simulated_step, dict[str, step.RankStep]()

    def once(job: Any, world: int, *, gpu: bool) -> step.RankStep:
        key = f"{world} {gpu} {job.model_copy(update={'run': None, 'schedule': None})!r}"
        if key not in known:
            known[key] = simulate(job, world, gpu=gpu)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "_simulated_step", once)
        yield

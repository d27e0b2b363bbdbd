"""What the language task says before it trains."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pretrain.config.load import job_from_mapping
from pretrain.language.task import LanguageTask
from tests.language import language_mapping


@pytest.mark.parametrize(("queue", "short"), [(64, False), (63, True)])
def test_a_queue_of_less_than_a_step_is_noticed_under_accumulation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, queue: int, short: bool
) -> None:
    mapping = language_mapping(tmp_path, batch={"global": 32, "micro": 2}, contrast={"queue": queue})
    task = LanguageTask(job_from_mapping(mapping, "test"), tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        task.build_modules()
    assert ("holds less than one step, which pushes 64" in caplog.text) == short

"""A resumed run continues with the text that it began with, unless it is told to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.language.task import LanguageTask
from tests.language import language_mapping, write_corpus


def test_changed_text_is_refused_unless_allowed(tmp_path: Path) -> None:
    def task(**data: object) -> LanguageTask:
        mapping = language_mapping(tmp_path, tokenizer={"path": str(folder)} if folder else {})
        mapping["data"] |= data
        return LanguageTask(job_from_mapping(mapping, "test"), tmp_path / "run")

    folder: Path | None = None
    first = task()
    folder = first.prepared.tokenizer_folder
    state = first.save_state(tmp_path)
    task().load_state(tmp_path, state)

    write_corpus(tmp_path / "text.txt", seed=1)
    with pytest.raises(CheckpointError, match=r"trained on other text.*data\.allow_change=true continues") as raised:
        task().load_state(tmp_path, state)
    assert "\n" not in str(raised.value)
    task(allow_change=True).load_state(tmp_path, state)
    del state["text"]  # as an earlier version wrote it
    task().load_state(tmp_path, state)

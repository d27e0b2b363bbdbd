"""``rollbacks.json`` as a crash, a full disk or a hand leaves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.reliability.rollbacks import FILE, Rollback, note_rollback, read_rollbacks, resume_after


@pytest.mark.parametrize(
    "wrong", ["", '{"rollbacks": [{"step": 3', "[]", {"start": -1}, {"start": 288, "end": 200}, {"end": 1e3}]
)
def test_a_damaged_file_is_named_and_no_sample_comes_twice(tmp_path: Path, wrong: object) -> None:
    """With an end before its start the run would go back in its samples."""
    good = {"step": 3, "reason": "loss", "start": None, "end": 300}
    text = wrong if isinstance(wrong, str) else json.dumps({"rollbacks": [good, {**good, **wrong}]})  # type: ignore[dict-item]
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=FILE):
        resume_after(tmp_path, 288, newest=True)
    assert (tmp_path / FILE).read_text() == text


def test_two_that_are_noted_before_the_run_goes_back_leave_out_the_longer_part(tmp_path: Path) -> None:
    for end in (304, 320, 250):
        note_rollback(tmp_path, Rollback(step=end // 8, reason="loss", end=end))
    assert resume_after(tmp_path, 288, newest=True) == 32
    assert [each.start for each in read_rollbacks(tmp_path)] == [288, 288, 250]
    assert resume_after(tmp_path, 288, newest=True) == 32
    assert resume_after(tmp_path, 250, newest=True) == 0

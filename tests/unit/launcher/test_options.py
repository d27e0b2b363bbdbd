"""Parts of commands: progress where nobody sees a bar."""

from __future__ import annotations

import pytest

from capt.launcher.commands import options


def test_a_log_is_told_once_a_minute_what_is_done_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)

    def after(seconds: float, done: int, total: int) -> str:
        nonlocal now
        now += seconds
        assert progress is not None
        progress(done, total)
        said = capsys.readouterr()
        assert said.out == ""
        return said.err

    with options.progress_bar("encoding", lines=False) as nothing:
        assert nothing is None
    with options.progress_bar("preparing") as progress:
        assert progress is not None
        assert after(5, 400, 1000) == ""  # done by an earlier start
        assert after(50, 450, 1000) == ""
        assert after(10, 460, 1000) == "preparing: 46%, about 0:09:00 left\n"
        assert after(59, 500, 1000) == ""
        assert after(1, 520, 1000) == "preparing: 52%, about 0:08:00 left\n"
        assert after(60, 0, 50) == ""  # another count begins, and nothing of it is done
        assert after(60, 25, 50) == "preparing: 50%, about 0:01:00 left\n"
        assert after(60, 50, 50) == "preparing: 100%, about 0:00:00 left\n"


def test_what_is_short_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with options.progress_bar("preparing") as progress:
        assert progress is not None
        for done in range(100):
            progress(done, 100)
    assert capsys.readouterr().err == ""

"""Lines that `capt neighbors` searches: which, how many, and that there were more."""

from __future__ import annotations

from pathlib import Path

import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.retrieval.neighbors import candidates


def test_the_lines_that_are_searched_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"a line with the number {i} in it\n" for i in range(7)) + "short\n")
    caplog.set_level("INFO")
    assert len(candidates(None, [text], 5)) == 5
    assert (
        "searching 5 different lines of 20 characters or more, of the first 5 only: --lines takes more" in caplog.text
    )
    caplog.clear()
    assert len(candidates(None, [text], 7)) == 7
    assert "--lines" not in caplog.text


def test_the_column_of_a_table_is_named(tmp_path: Path) -> None:
    table = tmp_path / "articles.csv"
    table.write_text("title,body\na wing,a wing in the slipstream of a propeller\n")
    assert candidates(None, [table], 5, "body") == ["a wing in the slipstream of a propeller"]
    with pytest.raises(DataError, match=r"there is no 'text' .*--text-column of .* capt neighbors"):
        candidates(None, [table], 5)


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    line = "the first part of a line\u2028the second part of it\x0cthe third\x85and the last"
    (tmp_path / "text.txt").write_text(f"{line}\nanother line of that text\r\n")
    assert candidates(None, [tmp_path / "text.txt"], 5) == [line, "another line of that text"]

"""The one reader of ``metrics.jsonl``: typed rows, whatever a crash or somebody else left in the file."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.engine import metrics_file
from capt.pretrain.engine.metrics_file import MetricsRow, drop_rows_after, last_step_in, parse_row, read_metrics


def test_rows_are_typed_and_null_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "samples": 8, "tokens": 64, "loss": 2.5, "lr": 1, "note": "text", "flag": true}\n'
        '{"step": 2, "split": "validation", "accuracy": null, "loss": NaN, "huge": 1e999, "long": 1' + "0" * 400 + "}\n"
    )
    found = read_metrics(path)
    assert found.training == [MetricsRow(1, "train", {"loss": 2.5, "lr": 1.0}, tokens=64)]
    (row,) = found.validation
    assert [*row.figures] == ["accuracy", "loss", "huge", "long"]
    assert not any(map(math.isfinite, row.figures.values()))
    assert found.notes == []


@pytest.mark.parametrize(
    "line",
    [
        b"", b"[1]", b"3", b'{"loss": 1}', b'{"step": "1"}', b'{"step": true}', b'{"step": -1}', b'{"step": 1.0}',
        b'{"step": 9007199254740992}', b'{"step": 1, "split": 3}', b'{"step": 1, "lo', b"\xff\xfe", b"[" * 100_000,
        b'{"step": 1' + b"0" * 5000 + b"}",
        json.dumps({"step": 1} | {f"n{i}": 1 for i in range(3000)}).encode(),
    ],
    ids=lambda line: line[:24].decode(errors="replace"),
)  # fmt: skip
def test_what_is_no_row(line: bytes) -> None:
    assert parse_row(line) is None


def test_names_that_no_page_can_show_are_no_figures() -> None:
    row = parse_row(json.dumps({"step": 1, "a\nb": 1, "\x1b[2J": 1, "\u202eloss": 1, "n" * 300: 1, "ok": 1}).encode())
    assert row == MetricsRow(1, "train", {"ok": 1.0})


def test_a_torn_line_is_noted_and_an_over_long_one_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.write(b'{"step": 1, "loss": 1}\n')
        file.write(b'{"step": 1, "loss": 1, "x": "' + b"x" * (3 * metrics_file.LINE) + b'"}\n')
        file.write(b'{"step": 2, "loss": 1}\n{"step": 3, "lo')
    found = read_metrics(path)
    assert [row.step for row in found.training] == [1, 2]
    assert found.notes == ["damaged lines of metrics.jsonl were left out: 2, 4"]
    path.write_bytes(b"\n" + b"x\n" * 99)
    assert read_metrics(path).notes[0].endswith(": 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 89 more")


def test_what_is_no_file_of_rows_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    os.truncate(path, 8 << 30)  # sparse
    with pytest.raises(DataError, match=r"metrics\.jsonl: over 1,073,741,824 bytes"):
        read_metrics(path)
    with pytest.raises(DataError, match=r"metrics\.jsonl: no row in 1,073,741,824 bytes"):
        drop_rows_after(path, 1)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        read_metrics(path)
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "none")


def test_rows_that_will_be_done_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    drop_rows_after(path, 1)
    assert not path.exists()
    path.write_text('{"step": 1, "loss": 0.1}\nnoise\n{"step": 2, "loss": NaN}\nnoise\n{"step": 3}\n{"step": 4, "lo')
    drop_rows_after(path, 2)
    assert path.read_text() == '{"step": 1, "loss": 0.1}\nnoise\n{"step": 2, "loss": NaN}\n'
    path.write_text('{"step": 1, "loss": 0.1}')
    drop_rows_after(path, 1)
    assert path.read_text() == '{"step": 1, "loss": 0.1}\n', "killed between a row and its end"
    drop_rows_after(path, 0)
    assert path.read_text() == ""


def test_nothing_is_cut_off_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"step": 3}\n')
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="a link"):
        drop_rows_after(tmp_path / "metrics.jsonl", 1)
    assert (tmp_path / "elsewhere").read_text() == '{"step": 3}\n'


@pytest.mark.parametrize("block", [14, 40, 64, 1 << 20])
def test_rows_are_found_from_the_end_whatever_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(metrics_file, "LINE", block)
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}}}\n' for step in range(1, 30)]
    for last in (29, 17, 1):
        drop_rows_after(path, last)
        path.write_text("".join(lines[:last]) + "x" * 100 + "\n")
        assert last_step_in(path) == last
        drop_rows_after(path, last)
        assert path.read_text() == "".join(lines[:last])


def test_of_a_file_that_has_grown_for_a_week_only_the_end_is_read(tmp_path: Path) -> None:
    """A resume reads it, and so does each restart, twice."""
    path = tmp_path / "metrics.jsonl"
    path.touch()
    os.truncate(path, 10 << 30)  # sparse
    with path.open("a") as file:
        file.write('\n{"step": 8}\n{"step": 9}\n{"step": 10}\n')
    begun = time.process_time()
    assert last_step_in(path) == 10
    drop_rows_after(path, 8)
    assert last_step_in(path) == 8
    assert time.process_time() - begun < 2
    assert path.stat().st_size == (10 << 30) + 13

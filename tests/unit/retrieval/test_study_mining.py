"""The page of the study of mining is written from whatever rows there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from capt.pretrain.config.retrieval import METRICS
from tests.studies.mining import main, page, read_trials


def test_any_rows_make_a_page(tmp_path: Path) -> None:
    rows = [("bm25", 1, 0.35), ("pairs", 1, 0.2), ("pairs", 2, 0.22), ("mined", 1, 0.23), ("mined", 2, 0.24)]
    lines = [f"{arm},{seed}," + ",".join([str(value)] * len(METRICS)) for arm, seed, value in rows]
    (tmp_path / "trials.csv").write_text("\n".join([f"arm,seed,{','.join(METRICS)}", *lines]) + "\n")
    main(["--out", str(tmp_path), "--page", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    assert "| `pairs` | 2 | 21.00 ± 1.41 |" in text
    assert "| `mined` - `pairs` | +2.50 |" in text
    assert "2 of 2" in text
    assert "`mined` - `longer`" not in text.split("## Figures")[1]
    assert len(read_trials(tmp_path)) == 5
    with pytest.raises(SystemExit, match="no rows yet"):
        page([])

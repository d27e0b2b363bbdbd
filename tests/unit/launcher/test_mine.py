"""Messages of ``capt mine`` at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from capt.launcher.cli import app
from capt.launcher.commands import options


@pytest.mark.parametrize(("found", "few"), [(40, 0), (3, 19), (0, 20)])
def test_the_next_command_asks_for_negatives_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: int, few: int
) -> None:
    """Training refuses ``data.negatives`` where no row has any."""
    audit: dict[str, Any] = {
        "rows_read": 20, "rows_written": 20, "rows_with_too_few_negatives": few, "negative_scores": {"count": found},
        "removed": {"above --max-score": {"count": 60, "share": 0.3}},
    }  # fmt: skip
    monkeypatch.setattr(options, "carry_out", lambda *_, **__: audit)
    arguments = ["--pairs", "pairs.jsonl", "--model", "model", "--number", "2", "--short", "keep"]
    said = CliRunner().invoke(app, ["mine", *arguments, "--out", str(tmp_path / "mined")]).output
    assert "data.form=flagembedding" in said
    assert ("data.negatives=2" in said) == (found > 0)
    # A reranker learns from negatives alone.
    reranker = f"capt finetune rerank model.init=MODEL data.train={tmp_path / 'mined' / 'pairs.jsonl'}"
    assert (reranker in said) == (found > 0)
    assert ("no document passed the rules as a negative" in said) == (found == 0)
    assert (f"rows with fewer than 2 negatives: {few}" in said) == (few > 0)

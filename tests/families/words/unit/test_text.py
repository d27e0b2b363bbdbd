"""Text from which nothing could be learned is refused before the run begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from capt.pretrain.base.errors import UserError
from capt.pretrain.embeddings.task import EmbeddingTask
from tests.embeddings import small_job

WORDS = ("cat", "dog", "bird", "fish", "ox", "bee", "hen")


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        ("\n".join(WORDS), "data.min_count=1", r"data\.files: no line has two words that are kept"),
        ("\n".join(f"{a} rare{a} {a}x" for a in WORDS * 2), "data.lowercase=true", None),
        ("\n".join(f"{a} r{i}" for i, a in enumerate(WORDS * 2)), "data.min_count=2", "or lower data.min_count"),
        (" ".join(WORDS * 9), "data.subsample=1e-30", r"data\.subsample 1e-30 thins 63 words out to .*raise it"),
        (" ".join(WORDS * 9), "data.max_vocabulary=4", r"vocabulary of 4 words: .*raise data\.max_vocabulary"),
    ],
)
def test_text_without_pairs(text: str, override: str, message: str | None, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(text)
    job = small_job(tmp_path, tmp_path / "run", override)
    if message is None:
        EmbeddingTask(job, tmp_path / "run")
        return
    with pytest.raises(UserError, match=message):
        EmbeddingTask(job, tmp_path / "run")

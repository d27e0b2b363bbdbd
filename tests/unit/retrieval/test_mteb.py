"""Tasks of the package mteb, with a task whose data it makes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.retrieval import mteb_tasks as room
from capt.pretrain.retrieval.options import EncoderOptions
from tests.unit.retrieval.toy import ToyEncoder


def test_texts_keep_their_order_and_get_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter's own part, without the package: roles by prompt type, batches by length, scores by cosine."""
    monkeypatch.setattr(room, "TOKENS", {"cpu": 8, "cuda": 8})
    seen: list[tuple[str, int]] = []

    class Noting(ToyEncoder):
        def encode(self, texts: Any, role: Any) -> np.ndarray:
            seen.append((role, len(texts)))
            return super().encode(texts, role)

    adapter = object.__new__(room.MtebEncoder)
    adapter._encoder = Noting()
    texts = ["a", "b c d e f g", "h i", "j", "k l m"]
    batches = [{"text": texts[:2]}, {"text": texts[2:]}]
    for kind, role in (("query", "query"), ("document", "document"), (None, "text")):
        rows = adapter.encode(batches, prompt_type=kind, task_metadata=None)
        assert (rows == ToyEncoder().encode(texts, "text")).all()
        assert {name for name, _ in seen} == {role}
        assert len(seen) > 1
        seen.clear()
    scores = adapter.similarity(rows[:2], rows)
    assert scores.shape == (2, 5)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert np.allclose(scores, unit[:2] @ unit.T, atol=1e-6)
    assert np.allclose(adapter.similarity_pairwise(rows, rows), 1, atol=1e-6)


def test_a_task_gives_its_main_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mteb", reason="mteb is not installed")
    from mteb.mocks.mock_tasks.retrieval import MockRetrievalTask

    from capt.pretrain.engine.evaluations import read_sections

    monkeypatch.setattr(room, "load_text_encoder", lambda *_: ToyEncoder())
    result = room.evaluate_mteb(Path("toy"), [MockRetrievalTask()], EncoderOptions(), out=tmp_path / "out.json")
    (section,) = read_sections(tmp_path / "out.json")
    assert section.name == "MockRetrievalTask"
    assert set(section.metrics) == {"val", "test"}
    assert all(0 <= value <= 1 for value in section.metrics.values() if value is not None)
    assert "ndcg_at_10" in section.protocol
    assert "MockRetrievalTask" in room.as_text(result)
    with pytest.raises(ConfigError, match="--mteb SciFakt: no such task; did you mean"):
        room.evaluate_mteb(Path("toy"), ["SciFakt"], EncoderOptions())

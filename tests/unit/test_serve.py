"""The example of a service over an index answers as the index does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capt.pretrain.retrieval import index as room
from capt.pretrain.retrieval import index_build
from tests.unit.retrieval.toy import ToyEncoder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("fastapi", reason="fastapi is not installed: it is in no extra")
    pytest.importorskip("fastapi.testclient", reason="the http client of fastapi's test client is not installed")
    encoder = ToyEncoder()
    for module in (room, index_build):
        monkeypatch.setattr(module, "load_text_encoder", lambda *_: encoder)
    (tmp_path / "a.jsonl").write_text('{"_id": "x", "text": "a river", "year": 1}\n{"_id": "y", "text": "a stone"}\n')
    room.build_index([tmp_path / "a.jsonl"], "toy", tmp_path / "index")
    monkeypatch.setenv("CAPT_INDEX", str(tmp_path / "index"))
    monkeypatch.delenv("CAPT_PREDICT", raising=False)
    spec = importlib.util.spec_from_file_location("serve", ROOT / "docker" / "serve.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "serve", module)  # pydantic looks up names there
    spec.loader.exec_module(module)
    return module


def test_the_service_answers_as_the_index(service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi.testclient import TestClient

    client, found = TestClient(service.app), room.SearchIndex.open(tmp_path / "index")
    assert client.get("/health").json() == {"documents": 2}
    answer = client.post("/search", json={"query": "river", "top": 1}).json()
    assert answer == [hit.as_json() for hit in found.search(["river"], 1)[0]]
    answer = client.post("/search", json={"query": "river", "where": {"yaer": "1"}})
    assert (answer.status_code, answer.json()["detail"][:12]) == (422, "--where yaer")
    assert client.post("/search", json={"query": "river", "top": 0}).status_code == 422
    vectors = client.post("/embed", json={"texts": ["a river"], "role": "query"}).json()
    assert vectors == found.encoder.encode(["a river"], "query").tolist()
    assert client.post("/predict", json={"texts": ["a"]}).status_code == 404
    named = SimpleNamespace(_asdict=lambda: {"label": "good"})
    monkeypatch.setenv("CAPT_PREDICT", "folder")
    monkeypatch.setattr(service, "classifier", lambda: SimpleNamespace(predict=lambda texts: [named] * len(texts)))
    assert client.post("/predict", json={"texts": ["a", ["b", "c"]]}).json() == [{"label": "good"}] * 2

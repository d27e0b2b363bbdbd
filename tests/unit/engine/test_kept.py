"""Records of a run's first start are those of its newest checkpoint, which is verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from capt.pretrain.config.load import load_job
from capt.pretrain.engine import checkpoint
from capt.pretrain.engine.run_folder import kept_in_run


@pytest.mark.parametrize("damage", ["none", "flipped", "empty", "missing", "no folder"])
@pytest.mark.parametrize("name", ["tokenizer", "answers.json"])
def test_a_damaged_copy_is_made_anew(name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "checkpoints" / "step-00000002"
    file = source / name / "tokenizer.json" if name == "tokenizer" else source / name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"whole")
    (source / "manifest.json").write_text("{}")
    monkeypatch.setattr(checkpoint, "read_job", lambda path: load_job("capt_tiny"))
    kept = kept_in_run(tmp_path, name, lambda job: True)
    assert kept == tmp_path / name
    copy = kept / "tokenizer.json" if name == "tokenizer" else kept
    assert copy.read_bytes() == b"whole"
    if damage in ("flipped", "empty"):
        copy.write_bytes(b"whale" if damage == "flipped" else b"")
    elif damage == "missing":
        copy.unlink()
    elif damage == "no folder" and kept.is_dir():
        copy.unlink()
        kept.rmdir()
    assert kept_in_run(tmp_path, name, lambda job: True) == kept
    assert copy.read_bytes() == b"whole"
    assert file.read_bytes() == b"whole"

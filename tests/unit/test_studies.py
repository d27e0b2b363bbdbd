"""What the studies share: the steps of equal compute, and the refusal to go on with something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.studies import same_settings, steps_of_equal_compute


def run(folder: Path, seconds: list[float]) -> Path:
    folder.mkdir()
    rows = [json.dumps({"step": i, "seconds_per_step": each}) for i, each in enumerate(seconds)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_steps_follow_the_ratio_of_the_medians_and_stay(tmp_path: Path) -> None:
    slow, fast = run(tmp_path / "slow", [9.0, 0.3, 0.3, 5.0]), run(tmp_path / "fast", [9.0, 0.2, 0.1, 0.2])
    note = tmp_path / "compute.json"
    assert steps_of_equal_compute(note, 1000, {"slow": slow, "fast": fast}) == 1500, "the first step warms up"
    assert json.loads(note.read_text())["seconds_per_step"] == {"slow": 0.3, "fast": 0.2}
    (fast / "metrics.jsonl").unlink()
    assert steps_of_equal_compute(note, 1000, {"slow": slow, "fast": fast}) == 1500, "a resumed study keeps it"


def test_a_study_of_other_settings_is_refused(tmp_path: Path) -> None:
    same_settings(tmp_path / "out", {"steps": 100, "extra": []})
    same_settings(tmp_path / "out", {"steps": 100, "extra": []})
    with pytest.raises(SystemExit, match=r"begun with steps 100, this command has 200.*another --out"):
        same_settings(tmp_path / "out", {"steps": 200, "extra": []})

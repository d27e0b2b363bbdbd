"""What the studies share: the steps of equal compute, and the refusal to go on with something else; queues compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.studies.queue_tables import Trial, write_tables
from tests.studies.support import same_settings, steps_of_equal_compute


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


def trial(arm: str, queue: int, seed: int, loss: float) -> Trial:
    return Trial("books", arm, "triangle", queue, queue / 16, seed, 1.0, loss, *([0.5] * 10))


def test_a_longer_queue_is_compared_with_shorter_ones_of_its_guard(tmp_path: Path) -> None:
    """Against no queue alone a loss that rises with the length goes unseen."""
    losses = {0: 6.5, 64: 6.0, 256: 6.1, 1024: 6.3}
    trials = [
        trial("share" if queue else "none", queue, seed, loss + 0.1 * seed)
        for seed in (1, 2)
        for queue, loss in losses.items()
    ]
    write_tables(trials, tmp_path / "tables.md")
    text = (tmp_path / "tables.md").read_text()
    assert "| books | triangle | 1,024 | share | loss | -0.200 | -0.200 to -0.200 | 0 of 2 | 0.500 |" in text
    for against, difference in (("64", 0.3), ("256", 0.2)):
        assert f"| share | 1,024 | {against} | loss | +{difference:.3f} |" in text
    assert text.count("| share | 256 | 64 | loss |") == 1
    write_tables([one for one in trials if one.queue == 64], tmp_path / "tables.md")
    assert "\n\n" not in (tmp_path / "tables.md").read_text(), "no table without rows"

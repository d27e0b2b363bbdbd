"""Reports of pretraining say which objectives a row has, and call numbers from the microworld synthetic."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.studies.papers.__main__ import write_papers
from tests.unit.report.test_report import write_run


def a_run(folder: Path, **sections: object) -> Path:
    write_run(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump({"task": {"type": "capt_vl"}, **sections}))
    return folder


def test_rows_name_objectives_and_synthetic_data(tmp_path: Path) -> None:
    world = tmp_path / "world"
    (world / "pretraining").mkdir(parents=True)
    (world / "microworld.json").write_text("{}")
    made, real = str(world / "pretraining/train.json"), str(tmp_path / "elsewhere/train.json")
    runs = [
        a_run(tmp_path / "a", data={"source": "microworld"}, contrast={"weight": 1.0}, objectives={"mlm": 1.0}),
        a_run(tmp_path / "b", data={"train": [made]}, contrast={"weight": 0.0}, objectives={"answers": 1.0}),
        a_run(tmp_path / "c", data={"train": [real]}, contrast={"weight": 0.5}),
    ]
    write_papers(runs, tmp_path / "out")
    markdown = (tmp_path / "out/report.md").read_text()
    lines = [line for line in markdown.splitlines() if " QA" in line]
    rows = {line.split(" | ")[0].strip("| "): line for line in lines}
    assert "CAPT, without QA, on synthetic data" in rows[str(runs[0])]
    assert "LXMERT objectives, with QA, on synthetic data" in rows[str(runs[1])]
    assert "CAPT, without QA | 0" in rows[str(runs[2])]
    assert f"- synthetic data (microworld): {runs[0]}, {runs[1]}" in markdown

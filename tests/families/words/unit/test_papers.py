"""Word embeddings beside the paper: methods by its names, seeds as mean and deviation, Rare Word in its setting."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from capt.pretrain.embeddings.evaluate import command as evaluate
from capt.pretrain.report.runs import read_run
from tests.families.words.unit.runs import make_run, tables
from tests.studies.papers.words import method_of, run_sections


def test_methods_have_the_papers_names() -> None:
    config = {
        "negatives.sampler": "noise", "negatives.weights": "uniform", "objective.type": "nce", "model.init": None,
    }  # fmt: skip
    assert method_of(config) == "noise (nce)"
    assert method_of({**config, "negatives.weights": "self_adversarial"}) == "self-adversarial (nce)"
    assert method_of({**config, "negatives.sampler": "generator", "model.init": "v.txt"}) == "ACE (nce, fine-tuned)"
    assert method_of({**config, "negatives.sampler": "mixture"}) == "noise + ACE (nce)"


def test_a_run_with_one_row_of_metrics_is_seen_in_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "short", {"discriminator": tables(1)})
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 4.0}) + "\n")
    drawn: list[object] = []
    monkeypatch.setattr(Axes, "plot", lambda *_, **style: drawn.append(style["marker"]))
    assert run_sections([read_run(run)])[0].figures
    assert set(drawn) == {"."}


def test_report_of_two_seeds_and_another_method(tmp_path: Path) -> None:
    pairs = tmp_path / "sets/EN-FIVE.txt"
    pairs.parent.mkdir()
    pairs.write_text("king\tqueen\t9\nKing\tman\t6\nqueen\twoman\t7\nking\tsword\t1\nking\tdragon\t5\n")
    modules = [{"discriminator": tables(seed)} for seed in (1, 2, 3)]
    runs = [
        make_run(tmp_path / "a1", modules[0], overrides=("run.seed=1",)),
        make_run(tmp_path / "a2", modules[1], overrides=("run.seed=2",)),
        make_run(tmp_path / "b", modules[2], overrides=("negatives.weights=self_adversarial",)),
    ]
    results = [evaluate(run, word_similarity=pairs)["word_similarity"]["FIVE"] for run in runs]
    training, drop, zero, coverage = run_sections([read_run(run) for run in runs])
    assert [row[0] for row in training.tables[0].rows] == ["noise (sgns)", "self-adversarial (sgns)"]
    assert training.tables[0].rows[0][1:4] == ["2", "3", "2,000 ± 0"]
    assert training.figures[0].light.png.startswith(b"\x89PNG")
    mean, deviation = np.mean([r["drop"] for r in results[:2]]), np.std([r["drop"] for r in results[:2]], ddof=1)
    assert drop.tables[0].rows[0] == ["noise (sgns)", "2", f"{mean:.2f} ± {deviation:.2f}"]
    assert zero.tables[0].rows[1] == ["self-adversarial (sgns)", "1", f"{results[2]['zero']:.2f}"]
    assert coverage.tables[0].rows[0] == ["noise (sgns)", "8", "4 of 5"]


def test_the_papers_figures_stand_beside_runs_of_its_setting_alone(tmp_path: Path) -> None:
    """Table 2: the start, the method, 50 dimensions and all of Rare Word's pairs; any other run has an empty cell."""
    settings = {
        "fits": ("glove.6B.50d.txt", "mixture", 50, "EN-RW-STANFORD", 2034),
        "again": ("GloVe.txt", "mixture", 50, "rare_word", 2034),
        "cw": ("cw.50.txt", "generator", 50, "rw", 2034),
        "noise": ("glove.6B.50d.txt", "noise", 50, "EN-RW-STANFORD", 2034),
        "wide": ("glove.6B.300d.txt", "mixture", 300, "EN-RW-STANFORD", 2034),
        "part": ("glove.6B.50d.txt", "mixture", 50, "EN-RW-STANFORD", 2033),
        "other": ("vectors.txt", "mixture", 50, "EN-RW-STANFORD", 2034),
        "another set": ("glove.6B.50d.txt", "mixture", 50, "EN-WS-353-ALL", 2034),
    }
    runs = []
    for number, (name, (init, sampler, width, words, pairs)) in enumerate(settings.items(), 1):
        own = (f"model.init={init}", f"negatives.sampler={sampler}", f"run.seed={number}")
        runs.append(make_run(tmp_path / name, {"discriminator": tables(1)}, overrides=own))
        result = {"pairs": pairs, "covered": 2000, "drop": 40.0 + number, "zero": 30.0 + number}
        evaluation = {"words": 8, "dimensions": width, "word_similarity": {words: result}}
        (runs[-1] / "evaluation-step-00000000.json").write_text(json.dumps(evaluation))
    (section,) = [each for each in run_sections([read_run(run) for run in runs]) if "beside the paper" in each.title]
    assert section.tables[0].header == ["start", "method", "published", "ours, drop", "ours, zero"]
    assert section.tables[0].rows == [
        ["C&W", "before", "26.75", "", ""],
        ["C&W", "ACE", "32.86", "43.00", "33.00"],
        ["C&W", "noise + ACE", "37.69", "", ""],
        ["GloVe", "before", "33.94", "", ""],
        ["GloVe", "noise + ACE", "36.37", "41.50 ± 0.71", "31.50 ± 0.71"],
    ]
    assert "does not say how it counts" in section.remarks[0]
    other = run_sections([read_run(runs[-1])])
    assert not any("beside the paper" in each.title for each in other), "without Rare Word there is nothing to compare"

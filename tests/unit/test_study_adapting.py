"""The study of adapting: what is measured and damaged, and the tables of whatever trials are there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from capt.pretrain.base.overlap import same_text
from tests.studies.adapting import ARMS, FIRST, order
from tests.studies.adapting_sets import SHARE, MeasuredSet, damaged, measured_sets, training_text
from tests.studies.adapting_tables import write_tables


def test_the_telling_arms_come_first_and_none_is_forgotten() -> None:
    trials = order()
    assert len(trials) == len(set(trials)) == 4 + 5 * len(ARMS)
    assert {arm for arm, _ in trials[3:18]} == set(FIRST)


def test_sets_are_scored_by_hand() -> None:
    unit = np.eye(3, dtype=np.float32)
    pairs = MeasuredSet("pairs", False, ["a"] * 3, ["b"] * 3, np.array([1.0, 5.0, 3.0]))
    value, cosines = pairs.score(unit, np.array([[0.1, 0, 0], [0, 0.9, 0], [0, 0, 0.2]]))
    assert value == pytest.approx(100 * spearmanr([0.1, 0.9, 0.2], [1, 5, 3]).statistic)
    assert cosines.tolist() == pytest.approx([0.1, 0.9, 0.2])
    hits = MeasuredSet("hits", False, ["a", "b"], ["x", "y", "z"], [{1: 1}, {0: 1}])
    scores = np.array([[0.0, 3.0, 1.0], [1.0, 2.0, 0.0]])
    assert hits.score_ranks(scores)[0] == 50.0
    ranked = MeasuredSet("ranked", False, ["a"], ["x", "y", "z"], [{0: 1, 1: 2}])
    gained = (1 + 2 / np.log2(4)) / (2 + 1 / np.log2(3))  # x first, then z, then y
    assert ranked.score_ranks(np.array([[3.0, 1.0, 2.0]]))[0] == pytest.approx(100 * gained)


def test_a_fifth_of_the_words_is_damaged_the_same_way_every_time() -> None:
    texts = [" ".join(f"word{i}x{j}" for j in range(10)) for i in range(200)]
    for noise in ("dropped", "substituted", "misspelt"):
        new = damaged(texts, noise, ["other"])
        assert new == damaged(texts, noise, ["other"])
        kept = sum(len(set(old.split()) & set(text.split())) for old, text in zip(texts, new, strict=True)) / 2000
        assert 1 - kept == pytest.approx(SHARE, abs=0.03)
        assert ("other" in " ".join(new)) == (noise == "substituted")
    assert damaged(["one"], "dropped", [])[0] == "one", "no text is empty"


def _write(out: Path, arm: str, seed: int, value: float) -> None:
    figures = {"STS-B dev": {"clean": value}, "QNLI A": {"clean": value}, "captions": {"clean": value, "dropped": 1.0}}
    path = out / "trials" / f"{arm}-seed{seed}.json"
    path.write_text(json.dumps({"arm": arm, "seed": seed, "figures": figures}))
    items = np.full(50, value / 100, dtype=np.float32)
    items[:25] += 0.01
    np.savez(out / "items" / f"{arm}-seed{seed}.npz", **{"captions|clean": items, "captions|dropped": items})


def test_tables_are_of_whatever_is_there(tmp_path: Path) -> None:
    for name in ("trials", "items"):
        (tmp_path / name).mkdir()
    planned = [("start", 0), *((arm, seed) for arm in ("mlm", "capt-20") for seed in (1, 2))]
    write_tables(tmp_path, planned)
    assert (tmp_path / "tables.md").read_text().startswith("Missing of 5 trials: start seed 0, mlm seed 1")
    for arm, seed, value in (("start", 0, 50.0), ("mlm", 1, 40.0), ("capt-20", 1, 53.0), ("capt-20", 2, 55.0)):
        _write(tmp_path, arm, seed, value)
    write_tables(tmp_path, planned)
    text = (tmp_path / "tables.md").read_text()
    assert "Missing of 5 trials: mlm seed 2." in text
    assert "Best of 2 arms by the mean of both: `capt-20` (54.00)." in text
    assert "| capt-20 | 2 | 54.00 ± 1.41 | 1.00 ± 0.00 |" in text
    assert "| capt-20 | captions | clean | +4.00 ± 1.41 | +3.00 to +5.00 | +4.00 to +4.00 | 2 of 2 |" in text


@pytest.mark.realdata
def test_no_measured_text_is_trained_on(data_folder: Path) -> None:
    sets = measured_sets(data_folder)
    assert [len(each.queries) for each in sets] == [1500, 1379, 1338, 1364, 1000, 225]
    lines, left_out = training_text(data_folder, sets)
    measured = {same_text(text) for each in sets for text in (*each.queries, *each.documents)}
    assert not measured & {same_text(line) for line in lines}
    assert (len(lines), left_out) == (22_035, 3_562)

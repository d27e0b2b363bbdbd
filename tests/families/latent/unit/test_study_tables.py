"""The paired differences of docs/results/latent.md, and what its tables read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.studies import latent as latent_study
from tests.studies.latent_tables import (
    Sentences,
    Trial,
    best_of,
    paired_difference,
    trial_of,
    write_sentences,
    write_tables,
)

RNG = np.random.default_rng(0)
WORDS = RNG.integers(3, 40, 500).astype(float)
HARD = 5 * WORDS + 20 * RNG.standard_normal(500)
"""Difficulty of the sentences: far more than what models differ by."""


def _model(shift: float, noise: float) -> Sentences:
    return Sentences(HARD + shift * WORDS + noise * RNG.standard_normal(500), WORDS)


def test_pairs_see_what_the_difficulty_of_sentences_hides() -> None:
    found = paired_difference([(_model(0.05, 0.5), _model(0.0, 0.5)) for _ in range(3)])
    assert found.nats == pytest.approx(0.05 * WORDS.mean(), abs=4 * found.error)
    assert found.error < 0.1 < HARD.std() / 500**0.5, "unpaired, the error would hide the difference"
    assert found.ratio == pytest.approx(np.exp(0.05), rel=0.01)
    assert found.deviation is not None
    assert paired_difference([(_model(0, 0), _model(0, 0))]) == (0, 0, 0, None, 1)


def test_sentences_of_one_length_count_together() -> None:
    """Long sentences differ by more, so that the error as if each were one of its own is too small."""
    words = np.repeat([4.0, 10.0, 40.0], 20)
    first, second = Sentences(words * 1.1, words), Sentences(words * 1.0, words)
    found = paired_difference([(first, second)])
    residuals = 20 * (0.1 * np.array([4.0, 10.0, 40.0]) - found.nats)
    assert found.by_length == pytest.approx((3 / 2 * (residuals**2).sum()) ** 0.5 / 60)
    assert found.by_length > 4 * found.error
    one = Sentences(np.array([1.0, 2.0]), np.array([7.0, 7.0]))
    assert paired_difference([(one, one)]).by_length is None


def test_other_sentences_are_refused() -> None:
    other = Sentences(HARD, WORDS[::-1])
    with pytest.raises(SystemExit, match="other sentences"):
        paired_difference([(_model(0, 0), other)])


def _result(best: float, proposal: str, **more: object) -> dict[str, object]:
    known = {"value": best, "nats": 1.0, "standard_error": 2.0, "draw_error": 0.1, "draws": 9, "sentences": 2}
    bounds = {f"ppl_iw_{name}": known for name in ("q", "prior", "mixture", "refitted")}
    return {"checkpoint": "a/step-7", "rec": 3.0, "ppl_exact": {"value": None, "reason": "-"}, **bounds,
            "ppl_best": known | {"proposal": proposal}, **more}  # fmt: skip


def test_the_exact_bound_is_of_the_sentences_that_were_weighted() -> None:
    everywhere, there = ({"value": value} for value in (157.9, 177.4))
    assert trial_of("ptb", "VAE", 1, 3, _result(176.6, "prior", ppl_exact=everywhere)).ppl_exact == 157.9
    result = _result(176.6, "prior", ppl_exact=everywhere, ppl_exact_there=there)
    assert trial_of("ptb", "VAE", 1, 3, result).ppl_exact == 177.4


def test_tables_take_each_rows_own_tightest_bound(tmp_path: Path) -> None:
    trials: list[Trial] = []
    for row, proposal, nats in (("LM", "exact", (10.0, 20.0)), ("iVAE", "refitted", (11.0, 22.0))):
        for seed in (1, 2):
            trials.append(trial_of("ptb", row, seed, 3, _result(99.0 + seed, proposal)))
            lines = [f"{words},{value},0" for words, value in zip((2, 4), nats, strict=True)]
            (tmp_path / f"{row}{seed}.csv").write_text("\n".join([f"words,{proposal},q", *lines]) + "\n")
    bridge = {"sentences": 2, "tightest_minus_bridge": 0.25, "tightest_minus_bridge_standard_error": 0.05}
    trials.append(trial_of("ptb", "AE", 1, 3, _result(300.0, "prior", bridge=bridge)))
    (tmp_path / "AE1.csv").write_text("words,prior\n2,30\n4,30\n")

    def path(data: str, row: str, seed: int) -> Path:
        assert data == "ptb"
        return tmp_path / f"{row}{seed}.csv"

    assert best_of(trials[2], path("ptb", "iVAE", 1)).nats.tolist() == [11.0, 22.0]
    write_tables(trials, path, tmp_path / "tables.md")
    text = (tmp_path / "tables.md").read_text()
    assert "| iVAE | 100.5 | 2.0 | 0.7 | refitted |  |" in text
    assert f"| iVAE | LM | +1.50 | 0.50 | 0.50 | 0.00 | {np.exp(3 / 6):.3f} |" in text
    assert "| AE | LM | +15.00 | 5.00 | 5.00 |  |" in text
    assert "| iVAE | LM | 2 | +1.50 | 0.50 | 0.50 |" in text
    assert "| AE | 1 | 2 | +0.25 ± 0.05 |" in text

    write_sentences(trials[:3], path, tmp_path / "sentences.csv")
    assert (tmp_path / "sentences.csv").read_text().splitlines() == [
        "data,row,seed,words,exact,q,prior,mixture,refitted",
        "ptb,LM,1,2,10.0,0,,,", "ptb,LM,1,4,20.0,0,,,", "ptb,LM,2,2,10.0,0,,,", "ptb,LM,2,4,20.0,0,,,",
        "ptb,iVAE,1,2,,0,,,11.0", "ptb,iVAE,1,4,,0,,,22.0",
    ]  # fmt: skip


def test_a_study_of_other_draws_or_sentences_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished evaluations would be beside others of fewer sentences, and their tables be written over."""
    monkeypatch.setenv("CAPT_DATA", str(tmp_path))
    for folder in ("lm/ptb", "vae"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(latent_study, "together", lambda jobs, parallel: None)
    for name in ("trials_of", "write_trials", "write_tables", "write_sentences", "capt"):
        monkeypatch.setattr(latent_study, name, lambda *words: [])

    def study(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["study", "--out", str(tmp_path / "out"), "--rows", "LM", *words])
        return latent_study.main()

    assert study("--sentences", "400", "--bridge", "10") == 0
    assert study("--sentences", "400", "--bridge", "2") == 0
    with pytest.raises(SystemExit, match="begun with sentences 400"):
        study("--sentences", "200")

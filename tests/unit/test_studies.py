"""Shared parts of studies, queues compared, the held-out texts of pairs, and tables of a single seed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tests.realdata import real_data
from tests.studies import architecture, pretexts_tables, rerankers
from tests.studies.pairs_data import counting_words, without, words_of
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


def test_a_study_needs_the_folders_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    monkeypatch.delenv("CAPT_DATA", raising=False)
    with pytest.raises(SystemExit):
        real_data(parser, "corpus", "lm/ptb")
    assert "CAPT_DATA must name a folder with corpus, lm/ptb" in capsys.readouterr().err
    monkeypatch.setenv("CAPT_DATA", str(tmp_path))
    (tmp_path / "corpus").mkdir()
    with pytest.raises(SystemExit):
        real_data(parser, "corpus", "lm/ptb")
    assert f"CAPT_DATA names {tmp_path}, which has no lm/ptb" in capsys.readouterr().err
    (tmp_path / "lm" / "ptb").mkdir(parents=True)
    assert real_data(parser, "corpus", "lm/ptb") == tmp_path


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


def test_pairs_are_not_trained_on_held_out_texts_of_another_punctuation() -> None:
    held_out = {words_of(text) for text in ("A boy pushes another boy on the swings.", "Who was it?")}
    rows = [
        {"query": "a boy pushes another boy on the swings .", "pos": ["Two boys play ."]},
        {"query": "Two boys play .", "pos": ["One of them swings ."], "neg": ["who was it"]},
        {"query": "Two boys play .", "pos": ["A boy on the swings ."]},
    ]
    assert without(held_out, rows) == rows[2:]


def test_counting_words_ranks_the_sentence_that_shares_them(tmp_path: Path) -> None:
    scored = [("a cat sat", "a cat sat", 5.0), ("a cat sat", "a cat ran", 2.0), ("a cat sat", "birds sing", 0.0)]
    lines = [json.dumps({"sentence1": a, "sentence2": b, "score": score}) for a, b, score in scored]
    for name in ("stsb", "mrpc"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines[:: 1 if name == "stsb" else -1]))
    sentences = {"who saw rome": "rome burned", "when": "paris slept", "is it": "it is"}
    rows = [json.dumps({"query": query, "pos": [sentence]}) for query, sentence in sentences.items()]
    (tmp_path / "qnli_held_out.jsonl").write_text("\n".join(rows))
    # The second query shares no word with any of the three sentences, so that its own counts as the last.
    assert counting_words(tmp_path) == pytest.approx({"stsb": 1, "mrpc": 1, "qnli": (1 + 1 / 3 + 1) / 3})


def test_a_single_seed_has_no_deviation() -> None:
    trials = [architecture.Trial("roberta", seed, 10, 2.0 * seed, 5.0) for seed in (1, 2)]
    table = architecture.tables([*trials, architecture.Trial("roberta-5e-4", 1, 10, 4.0, 5.0)])
    assert "| roberta | 2 | 10 | 3.000 ± 1.414 | 5.000 ± 0.000 |" in table
    assert "| roberta-5e-4 | 1 | 10 | 4.000 | 5.000 |" in table


def test_an_arm_counts_by_two_sets_of_three_and_none_against(tmp_path: Path) -> None:
    def pretext(arm: str, seed: int, gain: tuple[float, float, float], mrpc: float | None) -> pretexts_tables.Trial:
        return pretexts_tables.Trial(arm, seed, 200, *(50 + seed + each for each in gain), mrpc)

    rule, up, down, mixed = pretexts_tables.rule, [1.0, 2.0], [-1.0, -2.0], [-1.0, 2.0]
    assert rule([up, up, mixed]) == rule([up, up, up]) == "for"
    assert rule([up, up, down]) == rule([up, mixed, mixed]) == rule([down, up, down]) == ""
    assert rule([down, mixed, down]) == "against"
    gains = {"none": (0.0, 0.0, 0.0), "crop": (2.0, 1.0, -0.5)}
    # MRPC is the worst of all, and decides nothing.
    trials = [
        pretext(arm, seed, gain, -9.0 if arm == "crop" else 0.0) for arm, gain in gains.items() for seed in (1, 2)
    ]
    trials[2] = trials[2]._replace(stsb=trials[2].stsb + 1)
    pretexts_tables.write_tables(trials, {"BM25": {"qnli": 80.04}}, tmp_path / "tables.md")
    text = (tmp_path / "tables.md").read_text()
    # Half of the distance of two seeds times the quantile 12.71.
    row = "| crop - none | +2.5 [-3.9, +8.9], 2 of 2 | +1.0, 2 of 2 | -0.5, 0 of 2 | -9.0, 0 of 2 |"
    assert f"{row}  |" in text, text
    assert "| BM25 |  |  | 80.0 |  |  |" in text
    pretexts_tables.write_tables([each._replace(cranfield=60.0) for each in trials], {}, tmp_path / "tables.md")
    assert "0 of 2 | -9.0, 0 of 2 | for |" in (tmp_path / "tables.md").read_text()


def test_rerankers_are_compared_by_seed_and_with_the_first_stage_of_their_questions() -> None:
    trials = [rerankers.Trial("bm25", 0, 30.0, 60.0), rerankers.Trial("start", 0, 20.0, 50.0)]
    for seed, gain in ((1, 1.0), (2, 2.0), (3, -1.5)):
        trials.append(rerankers.Trial("small infonce", seed, 30 + gain, 61.0))
        trials.append(rerankers.Trial("small bce", seed, 29 + gain, 61.0 - gain))
    trials.append(rerankers.Trial("small bce", 4, 0.0, 0.0))  # InfoNCE's of this seed has not run yet
    found = rerankers.tables(trials, 20)
    assert "| small infonce - bm25 | +0.5 [-4.0, +5.0], 2 of 3 | +1.0, 3 of 3 |" in found
    assert "| small bce - small infonce | -1.0, 0 of 3 | -0.5 [-5.0, +4.0], 1 of 3 |" in found
    # What searches all questions is not in one table with what is measured on the first ones.
    assert found.index("| bm25 |") < found.index("| all questions |") < found.index("| start |")
    assert "minilm infonce" not in found

"""Evaluation texts in the training data: against a comparison of all with all."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capt.launcher.cli import app
from capt.pretrain.base.errors import DataError, counted
from capt.pretrain.base.overlap import same_text
from capt.pretrain.pairs.duplicates import find_duplicates
from tests.unit.pairs.written import write_json

WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in ("ln", "r", "st", "m")]


def some_texts(rng: random.Random, number: int) -> list[str]:
    return [" ".join(rng.choices(WORDS, k=rng.randint(6, 25))) for _ in range(number)]


def changed(rng: random.Random, text: str) -> str:
    """The text with one or a few words replaced, in another case and with other spaces."""
    words = text.split()
    for _ in range(rng.randint(0, 4)):
        words[rng.randrange(len(words))] = rng.choice(WORDS)
    return ("  " if rng.random() < 0.5 else " ").join(words).upper()


def similarity(a: str, b: str) -> float:
    sets = [{key[i : i + 5] for i in range(len(key) - 4)} for key in map(same_text, (a, b))]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str], list[str]]:
    rng, folder = random.Random(5), tmp_path_factory.mktemp("texts")
    trained = some_texts(rng, 120)
    evaluated = [*some_texts(rng, 40), *(changed(rng, text) for text in rng.sample(trained, 80))]
    rng.shuffle(evaluated)
    train = write_json(folder / "train.jsonl", [{"query": text, "pos": ["short"]} for text in trained])
    (folder / "eval.tsv").write_text("index\tsentence\n" + "".join(f"{i}\t{t}\n" for i, t in enumerate(evaluated)))
    return train, folder / "eval.tsv", trained, evaluated


def test_equal_and_near_texts_are_those_of_a_comparison_of_all_with_all(
    files: tuple[Path, Path, list[str], list[str]],
) -> None:
    pytest.importorskip("datasketch", reason="datasketch (the extra duplicates) is not installed")
    train, against, trained, evaluated = files
    highest = {same_text(text): max(similarity(text, other) for other in trained) for text in evaluated}
    equal = {text for text in highest if text in set(map(same_text, trained))}
    near = {text for text, value in highest.items() if value >= 0.8} - equal
    assert len(equal) > 5
    assert len(near) >= 5
    found = find_duplicates([train], [against])
    assert {same_text(match.text) for match in found.equal} == equal
    assert {same_text(match.text) for match in found.near} == near
    for match in found.near:
        assert match.similarity == highest[same_text(match.text)] == similarity(match.text, match.trained_text)
    assert (found.compared, found.trained, found.short) == (len(highest), 120, 120 + 120)
    assert find_duplicates([train], [against]) == found


def test_equal_texts_need_no_other_package(files: tuple[Path, Path, list[str], list[str]]) -> None:
    train, against, trained, evaluated = files
    found = find_duplicates([train], [against], threshold=None)
    assert found.near == []
    assert {match.text for match in found.equal} == {
        t for t in evaluated if same_text(t) in set(map(same_text, trained))
    }
    for match in found.equal:
        assert match.place == f"{against}, line {evaluated.index(match.text) + 2}"
        assert match.trained_place == f"{train}, line {trained.index(match.trained_text) + 1}"


def test_a_folder_of_beir_and_nested_texts(tmp_path: Path) -> None:
    text = "one two three four five"
    write_json(tmp_path / "corpus.jsonl", [{"_id": "1", "title": "", "text": f"{text} six"}])
    write_json(tmp_path / "queries.jsonl", [{"_id": "q", "text": text.upper()}])
    train = write_json(tmp_path / "a.jsonl", [{"query": "x", "positive_passages": [{"docid": "7", "text": text}]}])
    found = find_duplicates([train], [tmp_path], threshold=None)
    assert [(match.place, match.trained_place) for match in found.equal] == [
        (f"{tmp_path}/queries.jsonl, line 1", f"{train}, line 1")
    ]
    assert found.short == 3  # the empty title, the query and the docid of the training row; no id of the folder


def test_queries_and_entries_are_counted_in_their_plural() -> None:
    assert [counted(n, "query") for n in (0, 1, 2)] == ["0 queries", "1 query", "2 queries"]
    assert counted(2, "key") == "2 keys"


def test_the_command(files: tuple[Path, Path, list[str], list[str]], tmp_path: Path) -> None:
    train, against, *_ = files
    arguments = ["data", "duplicates", str(train), "--against", str(against), "--no-near"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    found = find_duplicates([train], [against], threshold=None)
    assert f"{len(found.equal)} of {found.compared} evaluation texts are equal to a training text" in result.stdout
    assert f"1.00  {found.equal[0].place}: {found.equal[0].text}" in result.stdout
    shown = json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert len(shown["equal"]) == len(found.equal)
    short = write_json(tmp_path / "a.jsonl", [{"text": "too short"}])
    for train_files, eval_files, who in (([short], [against], "training"), ([train], [short], "evaluation")):
        with pytest.raises(DataError, match=rf"a\.jsonl: no {who} text has 5 words or more"):
            find_duplicates(train_files, eval_files)

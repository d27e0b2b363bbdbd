"""Accuracy and consistency of NLVR2 and NLVR v1 on a toy of four pairs, and their result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from capt.finetune.visual.nlvr import Version, check_nlvr, nlvr1_group, nlvr2_group, nlvr_scores, read_nlvr, write_nlvr
from capt.pretrain.base.errors import DataError
from capt.pretrain.vision_language.data.examples import Example


def _examples(rows: dict[str, bool | None]) -> list[Example]:
    return [Example(key, ("p",), "A cat.", truth=truth) for key, truth in rows.items()]


# one sentence with two pairs, and two sentences that share the first pair's number
NLVR2 = {"dev-8-0-0": True, "dev-8-1-0": False, "dev-8-0-1": True, "dev-9-0-0": False}
NLVR1 = {"15-0": True, "15-1": False, "16-0": True, "16-3": True}


def test_groups() -> None:
    assert [nlvr2_group(key) for key in NLVR2] == ["dev-8--0", "dev-8--0", "dev-8--1", "dev-9--0"]
    assert [nlvr1_group(key) for key in NLVR1] == ["15", "15", "16", "16"]


@pytest.mark.parametrize(
    ("wrong", "accuracy", "consistency"),
    [
        ((), 1.0, 1.0),
        (("dev-8-1-0",), 3 / 4, 2 / 3),
        (("dev-8-0-1",), 3 / 4, 2 / 3),
        (("dev-8-0-0", "dev-8-1-0"), 2 / 4, 2 / 3),
        (("dev-8-0-0", "dev-8-0-1"), 2 / 4, 1 / 3),
        (tuple(NLVR2), 0.0, 0.0),
    ],
)
def test_toy_of_four_pairs(wrong: tuple[str, ...], accuracy: float, consistency: float) -> None:
    predictions = {key: truth != (key in wrong) for key, truth in NLVR2.items()}
    scores = nlvr_scores(predictions, _examples({**NLVR2}), "nlvr2")
    assert scores == pytest.approx({"accuracy": accuracy, "consistency": consistency})


def test_nlvr1_groups_by_stem() -> None:
    predictions = {**NLVR1, "15-1": True}
    scores = nlvr_scores(predictions, _examples({**NLVR1, "17-0": None}), "nlvr1")
    assert scores == {"accuracy": 3 / 4, "consistency": 1 / 2}
    with pytest.raises(DataError, match="1 statement without a prediction, such as '16-3'"):
        nlvr_scores({"15-0": True, "15-1": True, "16-0": True}, _examples({**NLVR1}), "nlvr1")
    with pytest.raises(DataError, match="nothing to score"):
        nlvr_scores({"15-0": True}, _examples({"15-0": None}), "nlvr1")


@pytest.mark.parametrize(
    ("version", "rows", "text"),
    [
        ("nlvr2", NLVR2, "dev-8-0-0,True\ndev-8-1-0,False\ndev-8-0-1,True\ndev-9-0-0,False\n"),
        ("nlvr1", NLVR1, "15-0,true\n15-1,false\n16-0,true\n16-3,true\n"),
    ],
)
def test_result_file(tmp_path: Path, version: Version, rows: dict[str, bool], text: str) -> None:
    out = write_nlvr(rows, tmp_path / "o.csv", rows, version)
    assert out.read_bytes() == text.encode()
    assert read_nlvr(out, version) == rows
    with pytest.raises(DataError, match="1 question not in the questions: 'more'"):
        write_nlvr({**rows, "more": True}, tmp_path / "p.csv", rows, version)
    assert not (tmp_path / "p.csv").exists()


def test_validator(tmp_path: Path) -> None:
    path = tmp_path / "o.csv"
    path.write_text("identifier,prediction\n15-0,TRUE\r\n15-1, False\n15-1,false\n\n16-0,1\n99-9,true\n")
    assert check_nlvr(path, NLVR1, "nlvr1") == [
        "line 1: 'identifier,prediction' is not identifier,true|false",
        "line 6: '16-0,1' is not identifier,true|false",
        "1 question twice: '15-1'",
        "1 question not in the questions: '99-9'",
        "2 questions without a prediction: '16-0', '16-3'",
    ]
    with pytest.raises(DataError, match="line 1"):
        read_nlvr(path, "nlvr1")

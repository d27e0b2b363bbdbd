"""Accuracy and consistency of NLVR2 on a toy of four pairs, and its result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from capt.finetune.visual.nlvr import check_nlvr, nlvr2_group, nlvr_scores, read_nlvr, write_nlvr
from capt.pretrain.base.errors import DataError
from capt.pretrain.vision_language.data.examples import Example


def _examples(rows: dict[str, bool | None]) -> list[Example]:
    return [Example(key, ("p",), "A cat.", truth=truth) for key, truth in rows.items()]


# one sentence with two pairs, and two sentences that share the first pair's number
NLVR2 = {"dev-8-0-0": True, "dev-8-1-0": False, "dev-8-0-1": True, "dev-9-0-0": False}


def test_groups() -> None:
    assert [nlvr2_group(key) for key in NLVR2] == ["dev-8--0", "dev-8--0", "dev-8--1", "dev-9--0"]


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
    scores = nlvr_scores(predictions, _examples({**NLVR2}))
    assert scores == pytest.approx({"accuracy": accuracy, "consistency": consistency})


def test_only_labelled_statements_are_scored() -> None:
    predictions = {**NLVR2, "dev-8-1-0": True}
    scores = nlvr_scores(predictions, _examples({**NLVR2, "dev-9-1-0": None}))
    assert scores == pytest.approx({"accuracy": 3 / 4, "consistency": 2 / 3})
    with pytest.raises(DataError, match="1 statement without a prediction, such as 'dev-9-0-0'"):
        nlvr_scores({key: True for key in [*NLVR2][:3]}, _examples({**NLVR2}))
    with pytest.raises(DataError, match="nothing to score"):
        nlvr_scores({"dev-8-0-0": True}, _examples({"dev-8-0-0": None}))


def test_result_file(tmp_path: Path) -> None:
    out = write_nlvr(NLVR2, tmp_path / "o.csv", NLVR2)
    assert out.read_bytes() == b"dev-8-0-0,True\ndev-8-1-0,False\ndev-8-0-1,True\ndev-9-0-0,False\n"
    assert read_nlvr(out) == NLVR2
    with pytest.raises(DataError, match="1 question not in the questions: 'more'"):
        write_nlvr({**NLVR2, "more": True}, tmp_path / "p.csv", NLVR2)
    assert not (tmp_path / "p.csv").exists()


def test_validator(tmp_path: Path) -> None:
    path = tmp_path / "o.csv"
    path.write_text(
        "identifier,prediction\ndev-8-0-0,TRUE\r\ndev-8-1-0, False\ndev-8-1-0,false\n\ndev-8-0-1,1\ndev-1-0-0,true\n"
    )
    assert check_nlvr(path, NLVR2) == [
        "line 1: 'identifier,prediction' is not identifier,True|False",
        "line 6: 'dev-8-0-1,1' is not identifier,True|False",
        "1 question twice: 'dev-8-1-0'",
        "1 question not in the questions: 'dev-1-0-0'",
        "2 questions without a prediction: 'dev-8-0-1', 'dev-9-0-0'",
    ]
    with pytest.raises(DataError, match="line 1"):
        read_nlvr(path)

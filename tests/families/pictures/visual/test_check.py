"""``capt predictions check``: which task the data belong to, what is wrong, and the scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capt.finetune.visual.dumps import check_predictions
from capt.pretrain.base.errors import DataError
from tests.families.pictures.vision_language.data import forms
from tests.support import Capt


def _files(tmp_path: Path, *values: Any, lines: bool = False) -> list[Path]:
    return [forms.write(tmp_path / f"data{i}.json", value, lines=lines) for i, value in enumerate(values)]


def test_vqa(tmp_path: Path) -> None:
    rows = [{"question_id": 42000, "answer": "a cat"}, {"question_id": 7001, "answer": "no"}]
    path = forms.write(tmp_path / "o.json", rows)
    checked = check_predictions(path, _files(tmp_path, forms.QUESTIONS, forms.ANNOTATIONS))
    assert (checked.task, checked.questions, checked.problems) == ("vqa", 2, [])
    assert checked.scores == pytest.approx({"accuracy": 0.8, "accuracy_other": 1.0, "accuracy_yes_no": 0.6})
    assert check_predictions(path, _files(tmp_path, forms.QUESTIONS)).scores == {}
    assert check_predictions(path, _files(tmp_path, forms.LXMERT_VQA)).scores == {"accuracy": 0.0}
    bad = forms.write(tmp_path / "bad.json", rows[:1])
    checked = check_predictions(bad, _files(tmp_path, forms.QUESTIONS, forms.ANNOTATIONS))
    assert checked.problems == ["1 question without a prediction: 7001"]
    assert checked.scores == {}


def test_gqa_and_nlvr(tmp_path: Path) -> None:
    path = forms.write(
        tmp_path / "o.json", [{"questionId": "201", "prediction": "no"}, {"questionId": "202", "prediction": "no"}]
    )
    checked = check_predictions(path, _files(tmp_path, forms.GQA))
    assert checked[:5] == ("gqa", 2, 2, 0, [])
    assert checked.scores == {"accuracy": 1.0, "binary": 1.0, "consistency": 0.0}
    assert checked.figures.missing["open"] == "no question is open"
    path = forms.write(tmp_path / "o.csv", "dev-850-0-0,True\ndev-850-1-0,True\n")
    checked = check_predictions(path, _files(tmp_path, forms.NLVR2, lines=True))
    assert (*checked[:5], checked.scores) == ("nlvr2", 2, 2, 0, [], {"accuracy": 0.5, "consistency": 0.0})


def test_predictions_of_other_questions_count_where_the_official_script_passes_over_them(tmp_path: Path) -> None:
    more = forms.write(tmp_path / "o.csv", "dev-850-0-0,True\ndev-850-1-0,True\ndev-9-0-0,True\ndev-9-1-0,True\n")
    checked = check_predictions(more, _files(tmp_path, forms.NLVR2, lines=True))
    assert (checked.predictions, checked.unasked, checked.problems) == (2, 2, [])
    assert checked.scores == {"accuracy": 0.5, "consistency": 0.0}
    rows = [{"questionId": key, "prediction": "no"} for key in ("201", "203", "204")]
    checked = check_predictions(forms.write(tmp_path / "o.json", rows), _files(tmp_path, forms.GQA))
    assert (checked.questions, checked.predictions, checked.unasked, checked.problems) == (2, 1, 2, [])
    answers = [{"question_id": key, "answer": "no"} for key in (42000, 7001, 1)]
    checked = check_predictions(forms.write(tmp_path / "o.json", answers), _files(tmp_path, forms.QUESTIONS))
    assert checked.problems == ["1 question not in the questions: 1"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((forms.COCO,), "--data: captions; give the questions"),
        ((forms.GQA, forms.LXMERT_NLVR2), "--data: gqa, nlvr2; give the questions"),
        ((forms.ANNOTATIONS,), "name the file of their questions as well"),
    ],
)
def test_data_of_no_task(tmp_path: Path, values: tuple[Any, ...], message: str) -> None:
    path = forms.write(tmp_path / "o.json", [{"question_id": 1, "answer": "a"}])
    with pytest.raises(DataError, match=message):
        check_predictions(path, _files(tmp_path, *values))


def test_command(tmp_path: Path, capt: Capt) -> None:
    (data,) = _files(tmp_path, forms.NLVR2, lines=True)
    path = forms.write(tmp_path / "o.csv", "dev-850-0-0,True\ndev-850-1-0,True\n")
    code, out, _ = capt("predictions", "check", path, "--data", data)
    first, *scores = out.splitlines()
    assert code == 0
    assert first == f"{path}: 2 predictions, as nlvr2 expects them"
    assert [line.split() for line in scores] == [["accuracy", "50.00%"], ["consistency", "0.00%"]]
    code, out, _ = capt("predictions", "check", path, "--data", data, "--json")
    assert code == 0
    assert json.loads(out) == {
        **{"task": "nlvr2", "questions": 2, "predictions": 2, "unasked": 0, "missing": {}, "details": {}},
        **{"accuracy": 0.5, "consistency": 0.0},
    }
    forms.write(path, "dev-850-0-0,False\ndev-850-1-0,True\ndev-9-0-0,True\n")
    code, out, _ = capt("predictions", "check", path, "--data", data)
    assert code == 0
    assert "1 more answer questions that were not asked" in out
    forms.write(path, "dev-850-0-0,True\ndev-9-0-0,True\n")
    code, _, error = capt("predictions", "check", path, "--data", data)
    assert code == 2
    assert error.startswith("error: ")
    assert "1 question without a prediction: 'dev-850-1-0'" in error

"""A collapse is noticed by what the run itself has been; healthy runs, new encoders and overflows are none.

The curves are measured: ``capt_tiny`` on 3 MB of prose, a row of metrics every 10 steps, and validations of the studies
in ``docs/results``.
"""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base import distributed
from capt.pretrain.base.records import parse_record
from capt.pretrain.config.contrast import ContrastSection
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.contrastive.collapse import CollapseState, CollapseWatch, Figures, Split, remedies
from capt.pretrain.language.task import LanguageTask
from tests.language import language_mapping

Curve = list[tuple[Split, int, Figures]]


def training(first: int, *rows: tuple[float, float, float]) -> Curve:
    return [("training", first + 10 * i, Figures(*map(float, row))) for i, row in enumerate(rows)]


def validation(*rows: tuple[int, float, float, float]) -> Curve:
    return [("validation", step, Figures(*map(float, figures))) for step, *figures in rows]


# batch.global=8 optimizer.lr=5e-4 contrast.queue=1024 contrast.queue_start=200
ALONE = training(
    10,
    (0.938, -0.862, 0.808), (1, -1.85, 0.573), (1, -3, 0.319), (1, -2.77, 0.35), (1, -2.37, 0.4), (1, -3.13, 0.267),
    (1, -3.28, 0.303), (1, -2.55, 0.431), (1, -2.92, 0.412), (1, -2.79, 0.354), (1, -3.1, 0.331), (1, -2.73, 0.356),
    (1, -2.97, 0.327), (1, -3.39, 0.24), (1, -2.18, 0.459), (1, -3.44, 0.285), (1, -2.78, 0.352), (1, -3.16, 0.256),
    (1, -3.08, 0.359), (1, -3.03, 0.333),
)  # fmt: skip
ALONE_VALIDATED = validation(
    (50, 0.997, -2.11, 0.412), (100, 0.997, -2.57, 0.255), (150, 0.996, -2.6, 0.278), (200, 1, -2.67, 0.269)
)
QUEUED = training(
    210,
    (0.938, -0.919, 0.786), (1, -1.26, 0.701), (1, -0.978, 0.771), (1, -1.12, 0.741), (0.938, -0.968, 0.77),
    (1, -0.972, 0.756), (1, -1.6, 0.553), (1, -0.599, 0.859), (1, -1.08, 0.719), (1, -0.507, 0.882),
    (0.938, -0.341, 0.92), (0.5, -0.315, 0.924), (0.75, -0.389, 0.906), (0.312, -0.686, 0.773), (0.75, -0.19, 0.948),
)  # fmt: skip
QUEUED_VALIDATED = validation((250, 0.959, -0.784, 0.781), (300, 0.757, -0.62, 0.809), (350, 0.58, -0.115, 0.964))
# contrast.queue=256 contrast.queue_start=0: in one point from the first steps on
NEVER_GOOD = training(10, (0.977, -0.00525, 0.999), (0.0703, -4.76e-05, 1), (0, -0.00117, 1), (0.0234, -0.000105, 1))
NEVER_GOOD_VALIDATED = validation((20, 0.0586, -1.04e-05, 1), (40, 0.042, -8.37e-06, 1))


def study(first: int, every: int, *rows: tuple[float, float]) -> Curve:
    """Validations of before ``first_direction`` was measured: one that is as far from collapse as uniformity is."""
    return [
        ("validation", first + every * i, Figures(float(retrieval), uniformity, 1 + uniformity / 4))
        for i, (retrieval, uniformity) in enumerate(rows)
    ]


SHIPPED = study(50, 50, (1, -3.2), (1, -3.34), (1, -2.89), (1, -3.18), (1, -3.33))  # the queue starts at step 100
CONSTANT_TAU = study(50, 50, (1, -3.41), (1, -3.64), (1, -2.94), (1, -3.47), (1, -3.6))
LONG = study(
    500, 500, (0.92, -2.56), (0.973, -2.69), (0.794, -2.31), (0.925, -2.95), (0.957, -3.16), (0.985, -3.21),
    (0.989, -3.26), (0.989, -3.32), (0.992, -3.38), (0.993, -3.43), (0.99, -3.36), (0.99, -3.39),
)  # fmt: skip
LONG_FALL = study(500, 500, (0.927, -2.47), (0.958, -2.65), (0.062, -0.0), (0.026, -0.0), (0.012, -0.0))


def watched(curve: Curve, state: CollapseState | None = None) -> CollapseWatch:
    watch = CollapseWatch(ContrastSection())
    watch.state = state or watch.state
    for split, step, figures in sorted(curve, key=lambda look: look[1]):
        watch.look(split, step, figures)
    return watch


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="capt.pretrain.contrastive.collapse")


@pytest.mark.parametrize(
    "curve",
    [ALONE, ALONE_VALIDATED, SHIPPED, CONSTANT_TAU, LONG],
    ids=["training", "validation", "capt_tiny", "constant temperature", "6,000 steps"],
)
def test_a_healthy_run_is_none(curve: Curve, caplog: pytest.LogCaptureFixture) -> None:
    assert watched(curve).status == ""
    assert not caplog.records


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (
            ALONE + QUEUED,
            "step 230 (training): the representations are collapsing: uniformity -3.44 (step 160) -> -0.978, "
            "first direction 0.24 (step 140) -> 0.771, retrieval 1. What helps: "
            "contrast.drift=moments with contrast.queue_share=1, ",
        ),
        (
            ALONE_VALIDATED + QUEUED_VALIDATED,
            "step 250 (validation): the representations are collapsing: uniformity -2.67 (step 200) -> -0.784, "
            "first direction 0.255 (step 100) -> 0.781, retrieval 0.959. What helps: ",
        ),
        (
            LONG_FALL,
            "step 1500 (validation): the representations are collapsing: uniformity -2.65 (step 1000) -> -0, ",
        ),
        (
            NEVER_GOOD,
            "step 40 (training): the representations are collapsing: first direction 0.999 (step 10) -> 1, uniformity ",
        ),
        (
            NEVER_GOOD_VALIDATED,
            "step 20 (validation): the representations are collapsing: retrieval 0.0586, uniformity -1.04e-05, ",
        ),
    ],
    ids=["training", "validation", "6,000 steps", "never good, training", "never good, validation"],
)
def test_a_fall_is_named_once_when_it_begins(curve: Curve, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    watch = watched(curve)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(expected)
    last, best = curve[-1][2].uniformity, min(figures.uniformity for *_, figures in curve)
    word = "COLLAPSED" if last > -0.1 else "COLLAPSING"
    assert watch.status == f"{word} (uniformity {last:.2f}, was {best:.2f})"


def test_one_fall_in_both_splits_is_one_and_lasts_until_both_have_recovered(caplog: pytest.LogCaptureFixture) -> None:
    watch = watched(ALONE + ALONE_VALIDATED + QUEUED + QUEUED_VALIDATED)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    watch.look("training", 360, Figures(1.0, -3.0, 0.3))
    assert watch.status
    watch.look("validation", 360, Figures(1.0, -1.6, 0.6))  # better than half, less than three quarters
    assert watch.status
    watch.look("validation", 370, Figures(1.0, -2.5, 0.3))
    assert watch.status == ""
    assert caplog.messages[1:] == ["step 370: the representations have recovered from their collapse"]
    watch.look("validation", 380, Figures(0.3, -0.5, 0.9))
    assert watch.status
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO, logging.WARNING]


@pytest.mark.parametrize(
    "figures", [Figures(0.2, -2.6, 0.28), Figures(1.0, -1.2, 0.28), Figures(1.0, -2.6, 0.8)], ids=Figures._fields
)
def test_one_figure_alone_is_no_fall(figures: Figures) -> None:
    assert watched([*ALONE_VALIDATED, ("validation", 300, figures)]).status == ""


@pytest.mark.parametrize("figures", [Figures(0.89, -0.002, 0.999), Figures(0.0, -0.5, 0.875)], ids=["mean", "first"])
def test_new_encoders_are_none(figures: Figures) -> None:
    """Mean pooling puts all texts into one point and finds each; the first token has no text in it yet."""
    assert watched([("validation", 1, figures)]).status == ""
    assert watched(training(10, *[figures] * 4)).status == ""


def test_before_the_first_step_nothing_has_fallen(caplog: pytest.LogCaptureFixture) -> None:
    """The baseline of a job of pairs: an encoder of a masked-language model has its means in one point."""
    watch = watched(validation((0, 0.214, -0.00154, 1)))
    assert (watch.status, caplog.records) == ("", [])
    watch.look("validation", 20, Figures(0.2, -0.0015, 1.0))
    assert watch.status.startswith("COLLAPSED")
    assert len(caplog.records) == 1


def test_rank_0_alone_tells_of_a_fall(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    assert watched(NEVER_GOOD_VALIDATED).status
    assert not caplog.records


def test_from_one_point_to_a_few_is_no_recovery() -> None:
    watch = watched(NEVER_GOOD_VALIDATED)
    watch.look("validation", 60, Figures(0.06, -0.69, 0.5))  # two points
    assert watch.status == "COLLAPSING (uniformity -0.69, was -0.69)"
    watch.look("validation", 80, Figures(0.9, -2.5, 0.3))
    assert watch.status == ""


def test_two_bad_steps_in_training_are_none() -> None:
    bad = QUEUED[10:12]
    assert watched(ALONE + bad).status == ""
    assert watched(ALONE + bad + training(330, (1, -3, 0.3)) + [("training", 340, bad[0][2])]).status == ""


@pytest.mark.parametrize("place", range(3))
def test_an_overflowed_step_tells_nothing(place: int) -> None:
    figures = [1.0, -3.0, 0.3]
    figures[place] = math.nan
    before = watched(ALONE).state
    assert watched(training(500, *[tuple(figures)] * 4), before).state == before


def test_the_past_survives_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mapping = language_mapping(tmp_path)

    def task() -> LanguageTask:
        return LanguageTask(job_from_mapping(mapping, "test"), tmp_path / "run")

    first = task()
    mapping["tokenizer"]["path"] = str(first.prepared.tokenizer_folder)
    first.collapse = watched(ALONE)
    resumed = task()
    resumed.load_state(tmp_path, json.loads(json.dumps(first.save_state(tmp_path))))
    for split, step, figures in QUEUED[:3]:
        resumed.collapse.look(split, step, figures)
    assert resumed.status == "COLLAPSING (uniformity -0.98, was -3.44)"
    again = task()
    again.load_state(tmp_path, json.loads(json.dumps(resumed.save_state(tmp_path))))
    assert again.status == resumed.status
    again.collapse.look(*QUEUED[3])
    assert [record.levelno for record in caplog.records if "collapsing" in record.getMessage()] == [logging.WARNING]
    older = {key: value for key, value in first.save_state(tmp_path).items() if key != "collapse"}
    again.load_state(tmp_path, older)
    assert again.status == ""


def test_a_damaged_state_is_refused() -> None:
    state = watched(ALONE).state.model_dump(mode="json")
    state["past"]["training"]["best"]["uniformity"]["value"] = None
    with pytest.raises(Exception, match=r"past\.training\.best\.uniformity\.value"):
        parse_record(CollapseState, state, "state.json")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"queue_weight": 0.1, "drift": "moments", "queue_share": 1.0}),
        ({"drift": "moments"}, {"queue_weight": 0.1, "drift": "moments", "queue_share": 1.0}),
        ({"drift": "moments", "queue_share": 1.0}, {"queue": 0.0, "queue_weight": 0.1, "queue_share": "null"}),
        ({"queue_weight": 0.1}, {}),
        ({"in_batch": "none"}, {"in_batch": "global"}),
        ({"queue": 0}, {}),
    ],
)
def test_remedies_are_settings_that_the_job_does_not_have(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    text = remedies(ContrastSection(**settings))
    named = dict(word.strip(",").split("=") for word in text.split() if "=" in word)
    assert named == {
        f"contrast.{key}": f"{value:g}" if isinstance(value, float) else value for key, value in expected.items()
    }
    assert ("contrast.queue_start" in text) == (settings.get("queue", 1) > 0 and settings.get("in_batch") != "none")
    assert "optimizer.lr" in text


@pytest.mark.parametrize("settings", [{}, {"drift": "moments", "queue_share": 1.0}])
def test_each_remedy_is_a_job(settings: dict[str, Any]) -> None:
    """The one that was measured most comes first; none is refused beside what the job has."""
    ways = [dict(re.findall(r"contrast\.(\w+)=(\S+)", way)) for way in remedies(ContrastSection(**settings)).split(",")]
    assert ("drift" in ways[0]) == (not settings)
    for way in ways:
        ContrastSection(**{**settings, **{key: None if value == "null" else value for key, value in way.items()}})

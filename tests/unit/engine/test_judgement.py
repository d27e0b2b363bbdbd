"""The sentence about a run: plain rules, tried on made curves whose truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from capt.pretrain.engine.judgement import SOLVED, START, Verdict, judge, judged_metric, trained_on
from capt.pretrain.engine.metrics_file import VALIDATION, MetricsRow

Curve = Callable[[float], float]


def rows(
    curve: Curve, metric: str, steps: int, every: int, noise: float = 0.0, split: str = "train"
) -> list[MetricsRow]:
    """Rows of a figure that goes as ``curve`` does over 0 to 1, with noise."""
    random_ = random.Random(7)
    at = range(every, steps + 1, every)
    return [MetricsRow(step, split, {metric: curve(step / steps) + random_.gauss(0, noise)}) for step in at]


def falls(start: float, end: float) -> Curve:
    return lambda t: end + (start - end) * math.exp(-3 * t)


def flat(value: float) -> Curve:
    return lambda t: value


def levels(start: float, end: float) -> Curve:
    return lambda t: end + (start - end) * math.exp(-40 * t)


def turns(start: float, best: float, end: float) -> Curve:
    return lambda t: start + (best - start) * t / 0.4 if t < 0.4 else best + (end - best) * (t - 0.4) / 0.6


def scaled(curve: Curve, scale: float, up: bool) -> Curve:
    return lambda t: scale * (10 - curve(t) if up else curve(t))


# Every pair of a metric, a scale and a number of points: each verdict follows from the curve and not from these.
COVERING = [
    (metric, scale, (4, 10, 50)[(i + j) % 3])
    for i, metric in enumerate(("loss", "loss/mlm", "nelbo_iw", "accuracy", "stsb/pearson"))
    for j, scale in enumerate((1e-3, 1.0, 500.0))
]


@pytest.mark.parametrize(
    ("verdict", "curve", "training"),
    [
        ("learning", falls(8, 2), falls(8, 2)),
        ("levelled off", levels(8, 2), falls(8, 2)),
        ("not learning", flat(5), flat(5)),
        ("over-fitted", turns(8, 4, 7), falls(8, 1)),
        ("over-fitted", lambda t: 4 + 3 * t, falls(8, 1)),
        ("getting worse", turns(8, 4, 7), turns(8, 4, 8)),
    ],
)
def test_the_verdict_follows_validation_and_training(verdict: Verdict, curve: Curve, training: Curve) -> None:
    for metric, scale, points in COVERING:
        up = metric in ("accuracy", "stsb/pearson")
        validation = rows(scaled(curve, scale, up), metric, 1000, 1000 // points, split=VALIDATION)
        found = judge(rows(training, "loss", 1000, 5, noise=0.05), validation)
        assert found.verdict == verdict, (metric, scale, points, found)
        assert metric in found.reason


def _judged(training: Sequence[MetricsRow], validation: Sequence[MetricsRow] = (), best: str | None = None) -> str:
    return str(judge(training, validation, best))


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("name", ["loss", "loss/mlm", "loss/rec"])
def test_without_validation_the_training_loss_tells(noise: float, name: str) -> None:
    assert judge(rows(falls(8, 2), name, 1000, 5, noise), []).verdict == "learning"
    assert judge(rows(flat(5), name, 1000, 5, noise), []).verdict == "not learning"
    assert judge(rows(falls(8, 2), name, 1000, 200, noise), []).verdict == "too early to tell"


def test_a_loss_that_the_temperature_moves_is_not_the_judge() -> None:
    risen = [
        MetricsRow(step, "train", {"loss": 10 + step / 50, "loss/capt": step / 50, "loss/mlm": 9 - step / 200})
        for step in range(5, 1001, 5)
    ]
    assert judge(risen, []).verdict == "learning"


def test_the_metric_of_the_best_checkpoint_is_judged() -> None:
    validation = [MetricsRow(s, VALIDATION, {"loss/mlm": 8 - s / 100, "accuracy": 0.5}) for s in range(100, 600, 100)]
    assert _judged([], validation).startswith("learning: loss/mlm went from 7 at step 100 to 3 at step 500")
    assert _judged([], validation, "accuracy").startswith("not learning: accuracy went from 0.5")
    assert _judged([], validation, "absent").startswith("learning: loss/mlm")


def test_a_student_is_judged_by_its_teacher() -> None:
    figures = [{"map@100": 0.5, "teacher/cosine": 0.4 + step / 1000} for step in range(0, 500, 100)]
    validation = [MetricsRow(100 * i, VALIDATION, each) for i, each in enumerate(figures)]
    assert _judged([], validation).startswith("learning: teacher/cosine went from 0.4 at step 0 to 0.8 at step 400")
    assert _judged([], validation, "map@100").startswith("not learning: map@100")
    for losses, judged in (({"cosine": 1.0}, True), ({"mse": 0.5}, True), ({"listwise": 1.0, "cosine": 0.0}, False)):
        config = {f"distillation.{name}": weight for name, weight in losses.items()}
        assert ("teacher/cosine" in _judged([], trained_on(validation, config))) == judged, losses
    # Of texts alone there is nothing but the teacher; pairs with data.loss=none have a loss that is measured alone.
    fallen = [{"teacher/cosine": 0.9 - i / 10, "teacher/cosine_p5": 0.8 - i / 10} for i in range(5)]
    alone = [MetricsRow(100 * i, VALIDATION, each) for i, each in enumerate(fallen)]
    assert _judged([], trained_on(alone, {"distillation.listwise": 1.0})).startswith("too early to tell")
    pairs = [MetricsRow(row.step, VALIDATION, {"loss/pairs": 1.0, **row.figures}) for row in validation]
    for data, judge_of in (
        ({"data.loss": "none"}, "teacher/cosine"),
        ({"data.loss": "auto"}, "loss/pairs"),
        ({"data.loss": "none", "data.sources": [{"name": "a"}, {"name": "b", "loss": "auto"}]}, "loss/pairs"),
        ({"data.loss": "auto", "data.sources": [{"name": "a", "loss": "none"}]}, "teacher/cosine"),
    ):
        assert judge_of in _judged([], trained_on(pairs, {"distillation.cosine": 1.0, **data})), data


def test_a_loss_that_is_no_number_is_a_divergence() -> None:
    training = [MetricsRow(1, "train", {"loss": 3.0}), MetricsRow(2, "train", {"loss": math.nan})]
    assert _judged(training) == "diverged: the loss of step 2 is not a finite number"


@pytest.mark.parametrize("at_validation", [True, False])
def test_a_collapse_is_named_and_an_even_spread_is_none(at_validation: bool) -> None:
    names = (
        ("retrieval/to_corrupted", "uniformity", "first_direction")
        if at_validation
        else ("contrast/accuracy", "contrast/uniformity", "contrast/first_direction")
    )

    def verdict(*figures: tuple[float, float, float]) -> Verdict:
        split = VALIDATION if at_validation else "train"
        found = [
            MetricsRow(10 * step, split, dict(zip(names, each, strict=True)) | {"loss": 9.0 - step})
            for step, each in enumerate([*figures, figures[-1], figures[-1]])
        ]
        return judge([] if at_validation else found, found if at_validation else []).verdict

    assert verdict((0.99, -3.5, 0.1), (0.99, -3.4, 0.1), (0.98, -3.3, 0.1)) != "collapsed"
    assert verdict((0.99, -3.5, 0.1), (0.9, -2.0, 0.2), (0.02, -0.01, 0.99)) == "collapsed"
    assert verdict((0.99, -3.5, 0.1), (0.9, -1.0, 0.8), (0.9, -0.9, 0.8)) == "collapsed"
    assert verdict(*[(0.01, -0.02, 0.99)] * 8) == "collapsed"
    assert verdict((0.9, -0.02, 0.99), (0.95, -0.03, 0.98)) != "collapsed", "a new encoder that pools by the mean"
    assert verdict((0.99, -3.5, 0.1), (math.nan, math.nan, math.nan)) != "collapsed"


def test_one_training_row_is_no_collapse() -> None:
    figures = {"contrast/accuracy": 0.9, "contrast/uniformity": -3.0, "loss": 1.0}
    bad = figures | {"contrast/accuracy": 0.0, "contrast/uniformity": 0.0}
    assert judge([MetricsRow(10, "train", figures), MetricsRow(20, "train", bad)], []).verdict != "collapsed"
    assert (
        judge([MetricsRow(10, "train", figures), *(MetricsRow(s, "train", bad) for s in (20, 30, 40))], []).verdict
        == "collapsed"
    )


@pytest.mark.parametrize("retrieval", [0.0, 0.49, 0.51])
@pytest.mark.parametrize("validations", [0, 1, 3])
@pytest.mark.parametrize("steps", [1, 3, 9])
def test_in_the_first_steps_nothing_has_collapsed(steps: int, validations: int, retrieval: float) -> None:
    """A new encoder begins in one point: what is found of its texts by chance must not decide the verdict."""
    training = [
        MetricsRow(s, "train", {"loss": 8.0, "contrast/accuracy": 0.5 / s, "contrast/uniformity": -0.05 / s})
        for s in range(1, steps + 1)
    ]
    figures = {"loss": 8.0, "retrieval/to_corrupted": retrieval, "uniformity": -1e-6, "first_direction": 1.0}
    at = range(steps, steps - min(validations, 1), -1) if validations < 3 else range(1, steps + 1)
    validation = [MetricsRow(step, VALIDATION, figures) for step in at]
    assert judge(training, validation).verdict != "collapsed"


def test_a_posterior_without_active_units_has_collapsed() -> None:
    validation = [MetricsRow(s, VALIDATION, {"nelbo_iw": 100.0 - s, "au": 0.0}) for s in (1, 2, 3)]
    assert judge([], validation).verdict == "collapsed"


@pytest.mark.parametrize(
    ("figures", "verdict", "says"),
    [
        ({"au": 2.0, "mi_batch": 0.4}, "degenerate", "2 units of z are active, and codes tell 0.4 nats of a sentence"),
        ({"au": 9.0, "mi_batch": 2.5}, "learning", "9 units of z are active, and codes tell 2.5 nats of a sentence"),
        ({"au": 9.0}, "learning", "; 9 units of z are active"),
        ({"nearest_cosine": 0.94}, "degenerate", "a word and its nearest neighbour have a cosine of 0.94"),
        ({"nearest_cosine": 0.71}, "learning", "nelbo_iw"),
    ],
)
def test_codes_and_vectors_that_are_nearly_alike_are_degenerate(
    figures: dict[str, float], verdict: Verdict, says: str
) -> None:
    found = judge([], [MetricsRow(s, VALIDATION, {"nelbo_iw": 100.0 - s, **figures}) for s in (1, 2, 3)])
    assert found.verdict == verdict
    assert says in found.reason


def test_nothing_logged_is_too_early() -> None:
    assert _judged([]) == "too early to tell: logged steps: 0, validations: 0"


@pytest.mark.parametrize(("degenerate", "verdict"), [
    ((1, 1), "not learning"), ((0, 1), "collapsed"), ((1, 0), "learning"),
])  # fmt: skip
def test_a_classifier_that_always_says_the_same_has_not_learnt(degenerate: tuple[int, int], verdict: Verdict) -> None:
    validation = [
        MetricsRow(step, VALIDATION, {"loss": 1 / step, "degenerate": value})
        for step, value in zip((10, 20), degenerate, strict=True)
    ]
    found = judge(rows(falls(8, 2), "loss", 20, 1), validation)
    assert found.verdict == verdict
    assert ("all predictions are the same at step 20; try another optimizer.lr" in found.reason) == (degenerate[1] == 1)


def test_an_objective_without_weight_is_measured_and_not_judged() -> None:
    """Adapting a sentence encoder trains no MLM, whose random head gets worse and means nothing."""
    config = {"mlm.weight": 0.0, "contrast.weight": 1.0, "optimizer.lr": 0}
    worse, better = turns(8, 4, 7), falls(8, 1)
    training = [
        MetricsRow(
            row.step, row.split, {**row.figures, "loss/mlm": worse(row.step / 400), "loss/capt": better(row.step / 400)}
        )
        for row in rows(better, "loss", 400, 10)
    ]
    validation = [
        MetricsRow(
            row.step,
            row.split,
            {**row.figures, "loss/mlm/books": worse(row.step / 400), "loss/capt_fixed": better(row.step / 400)},
        )
        for row in rows(worse, "loss/mlm", 400, 40, split=VALIDATION)
    ]
    assert judge(training, validation).verdict == "getting worse"
    trained, validated = (trained_on(part, config) for part in (training, validation))
    judged = judge(trained, validated)
    assert (judged.verdict, judged.reason.split()[0]) == ("learning", "loss/capt_fixed")
    assert judge(trained, []).verdict == "learning"
    assert judged_metric(validated) == "loss/capt_fixed"
    # The metric that the job itself chose is the one that is judged.
    chosen = "loss/mlm"
    trained, validated = (trained_on(part, config, chosen) for part in (training, validation))
    assert judged_metric(validated, chosen) == chosen
    assert judge(trained, validated, chosen).reason.startswith("loss/mlm ")


@pytest.mark.parametrize(("steps", "verdict"), [([0, 60], "not learning"), ([0, 60, 120, 180], "getting worse")])
def test_a_start_that_was_better_says_what_to_lower(steps: list[int], verdict: Verdict) -> None:
    """A rate for random weights spoils a trained encoder; a later validation that is best is not that."""

    def judged(values: Sequence[float]) -> str:
        validation = [MetricsRow(step, VALIDATION, {"loss": value}) for step, value in zip(steps, values, strict=False)]
        found = judge(rows(flat(5), "loss", 180, 10), validation)
        assert found.verdict == verdict
        return found.reason

    assert judged([0.2226, 0.36, 0.37, 0.38]).endswith("a lower optimizer.lr keeps more of the start")
    if len(steps) > 2:
        assert "optimizer.lr" not in judged([0.36, 0.2226, 0.37, 0.38])
    else:
        assert "optimizer.lr" not in judged([0.36, 0.36])


@pytest.mark.parametrize(("start", "verdict"), [(5.0, "getting worse"), (5.6, "over-fitted")])
def test_noise_of_the_training_loss_is_no_fall(start: float, verdict: Verdict) -> None:
    def training(t: float) -> float:
        return start if t < 0.4 else 5.0

    validation = rows(turns(8, 4, 7), "loss", 400, 40, split=VALIDATION)
    for noise in (0.1, 0.2):
        found = judge(rows(training, "loss", 400, 10, noise), validation)
        assert found.verdict == verdict, found


def test_a_contrast_that_the_start_had_solved_is_not_learning() -> None:
    """A loss that goes from 0.03 to 0.01 where the samples found their other view before the first step."""
    contrast = rows(falls(0.03, 0.01), "loss/capt", 100, 10)
    validation = rows(falls(0.03, 0.01), "loss/capt_fixed", 100, 20, split=VALIDATION)
    masked = rows(falls(8, 2), "loss/mlm", 100, 20, split=VALIDATION)
    for share, verdict in ((0.97, "solved at the start"), (SOLVED, "solved at the start"), (0.43, "learning")):
        started = [replace(contrast[0], figures={**contrast[0].figures, START: share}), *contrast[1:]]
        for validated in ([], validation):
            found = judge(started, validated)
            assert found.verdict == verdict
            assert ("of the samples found their other view before training" in found.reason) == (share >= SOLVED)
        assert judge(started, masked).verdict == "learning", "the tokens were not found before"
        # Held-out samples say it as well, without the dropout of a training step.
        found_at = {"retrieval/to_corrupted": share, "retrieval/to_original": share}
        begun = [MetricsRow(0, VALIDATION, {"loss/capt_fixed": 0.03, **found_at}), *validation]
        assert judge(contrast, begun).verdict == verdict
        assert judge(started, rows(flat(5), "loss/capt_fixed", 100, 20, split=VALIDATION)).verdict == "not learning"

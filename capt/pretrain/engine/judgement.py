"""Judge a run in one sentence by its own records: is it learning, has it collapsed, does it over-fit?

The rules are plain and look at logged figures alone, so that the end of a run and ``capt report`` say the same.
Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Literal

from capt.pretrain.config.retrieval import METRICS as RETRIEVAL
from capt.pretrain.engine.metrics_file import MetricsRow

Verdict = Literal[
    "learning", "levelled off", "not learning", "solved at the start", "over-fitted", "getting worse", "collapsed",
    "degenerate", "diverged", "too early to tell",
]  # fmt: skip

_LOWER_IS_BETTER = ("loss", "alignment", "uniformity", "direction", "drift", "perplexity")
_BOUNDS = ("nelbo_iw", "nelbo_exact", "ppl_iw", "ppl_exact", "ppl_known")
"""Upper bounds of latent-variable models; what is named after the dual bounds nothing, and may be anything."""
_HIGHER_IS_BETTER = ("accuracy", "retrieval", "top1", "gap", "spearman", "pearson", "f1", "matthews", "recall", "mrr")

_COLLAPSES = (
    (True, "retrieval/to_corrupted", "uniformity", "first_direction"),
    (False, "contrast/accuracy", "contrast/uniformity", "contrast/first_direction"),
)
"""Figures of a validation, and of a training step, by which a collapse shows."""
ONE_POINT = -0.1
"""Uniformity above this: nearly all representations in one point (0 is one point, about -4 an even spread)."""
FEW_FOUND = 0.5
"""Retrieval below this, in one point, is a collapse. New encoders that pool by the mean are in one point as well, and
find most texts by their corruptions."""
FALLEN = 0.5
"""A figure has fallen that is less than this part of its best distance from collapse; two are a collapse."""
TRAINING_LOOKS = 3
"""This number of training rows in a row makes a fall: the samples of a step are few, and others each time."""
SOLVED = 0.9
"""Share of the samples that find their other view before training, from which on that teaches little.

Encoders with random weights find 0.999 of the texts by their corrupted copy (`docs/results/language.md`), and far fewer
by another span of the same passage. What is found already has hardly a gradient: its size is the probability of what
is not the positive."""
START = "pretext/accuracy"
"""The figure of a training row that says it: before the first update."""
_TAUGHT = "teacher/cosine"
"""The figure of a validation that says how near a student is to its teacher's vectors."""
LITTLE_INFORMATION = 1.0
"""Nats that codes tell of a sentence, below which they tell fewer than three kinds apart (e nats' worth)."""
NEAREST = "nearest_cosine"
"""The figure of word vectors: the median cosine of a frequent word and its nearest neighbour."""
ALIKE = 0.9
"""`NEAREST` from which on word vectors are nearly all alike: those of too little text have 0.92 and more."""
_RETRIEVAL = ("retrieval/to_corrupted", "retrieval/to_original")
_OF_CONTRAST = ("loss/capt", "loss/capt_fixed", "loss/pairs")
_WORSE = 0.1
"""Over-fitted: this part of what validation had gained is lost again."""
_LEVEL = 0.02
"""Levelled off: the last quarter of the steps brought less than this part of the whole gain."""
_NO_GAIN = 1e-3
"""Not learning: the gain is less than this part of the first value."""
_ROWS = 10
"""Rows that the training loss needs before it says anything; and steps, and rows of any kind where an encoder was never
better, before a collapse is one."""

Series = list[tuple[int, float]]


@dataclass(frozen=True)
class Judgement:
    """A verdict, and the figures that it rests on."""

    verdict: Verdict
    reason: str

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"


_ERROR = "/error"


def error_of(metric: str) -> str:
    """The name of the standard error of a metric, where a validation reports it."""
    return metric + _ERROR


def is_error(metric: str) -> bool:
    """Return whether a figure is the standard error of another one."""
    return metric.endswith(_ERROR)


def direction(metric: str) -> int:
    """1 where higher is better, -1 where lower is, 0 where the name does not say."""
    if is_error(metric):
        return 0
    parts = metric.lower().replace("_", "/").split("/")
    if parts[0] in RETRIEVAL:
        return 1
    if parts[0] == "teacher":  # its own figures stay as they are
        return 1 if parts[1] in ("cosine", "reached") else 0
    if metric in _BOUNDS or any(word in parts for word in _LOWER_IS_BETTER):
        return -1
    return 1 if any(word in parts for word in _HIGHER_IS_BETTER) else 0


def trained_on(rows: Sequence[MetricsRow], config: Mapping[str, Any], best: str | None = None) -> list[MetricsRow]:
    """Leave out the figures of objectives with ``NAME.weight`` 0, with those of sources below them, unless ``best``.

    Those of a teacher's vectors and of pairs are left out where nothing trains them either. A run measures these and
    does not train on them, so that they say nothing about the training. ``config`` has flat keys.
    """
    names = [key.removesuffix(".weight") for key, value in config.items() if key.endswith(".weight") and value == 0]
    untrained = {f"{figure}/{name}" for name in names for figure in ("loss", "accuracy")}
    if not (config.get("distillation.cosine") or config.get("distillation.mse")):
        untrained |= {_TAUGHT, f"{_TAUGHT}_p5"}  # listwise alone turns the vectors as it likes
    of_data = config.get("data.loss")
    if {each.get("loss", of_data) for each in config.get("data.sources") or [{}]} == {"none"}:
        untrained.add("loss/pairs")  # pairs whose texts learn a teacher's vectors and nothing of each other

    def is_kept(name: str) -> bool:
        return name == best or "/".join(name.split("/")[:2]) not in untrained

    return [replace(row, figures={k: v for k, v in row.figures.items() if is_kept(k)}) for row in rows]


def judge(training: Sequence[MetricsRow], validation: Sequence[MetricsRow], best: str | None = None) -> Judgement:
    """Judge a run by its rows in the order of their steps.

    Args:
        training: the rows of training steps.
        validation: the rows of validations.
        best: the validation metric that chooses the best checkpoint, which is then the one that is judged.
    """
    if training and not math.isfinite(training[-1].figures.get("loss", 0.0)):
        return Judgement("diverged", f"the loss of step {training[-1].step} is not a finite number")
    if (collapse := _collapse(training, validation)) is not None:
        return collapse
    if validation and validation[-1].figures.get("degenerate") == 1:
        always = all(row.figures.get("degenerate", 1) == 1 for row in validation)
        summary = f"all predictions are the same at step {validation[-1].step}; try another optimizer.lr"
        return Judgement("not learning" if always else "collapsed", summary)
    if validation and (found := _degenerate(validation[-1])) is not None:
        return found
    metric = judged_metric(validation, best)
    values = series(validation, metric) if metric else []
    if metric is None or len(values) < 2:
        found = _by_training(training, len(validation))
        parts = {name for row in training for name in row.figures if name.startswith("loss/")}
        of_contrast = bool(parts) and parts <= {*_OF_CONTRAST}
    else:
        found = _by_validation(metric, values, training)
        of_contrast = metric in _OF_CONTRAST or metric.startswith("retrieval/")
    # Adam enlarges the smallest gradient: a loss of 0.03 falls to 0.01, and nothing is told apart that was not before.
    if found.verdict == "learning" and of_contrast and (start := _start(training, validation)) >= SOLVED:
        return Judgement(
            "solved at the start", f"{start:.1%} of the samples found their other view before training; {found.reason}"
        )
    if validation and "au" in validation[-1].figures:
        return replace(found, reason=f"{found.reason}; {_code(validation[-1])}")
    return found


def _degenerate(row: MetricsRow) -> Judgement | None:
    """Judge codes of sentences that tell hardly anything, and word vectors that are nearly alike."""
    information, nearest = _information(row), row.figures.get(NEAREST, 0.0)
    if information is not None and information < LITTLE_INFORMATION:
        return Judgement(
            "degenerate",
            f"{_code(row)} at step {row.step}: what the model writes repeats itself; more text or epochs, or "
            "objective.beta_end below 1, leave more in z",
        )
    if nearest >= ALIKE:
        return Judgement(
            "degenerate",
            f"a word and its nearest neighbour have a cosine of {nearest:.2f} in the median at step {row.step}: the "
            "vectors are nearly alike; more text, more schedule.epochs, or model.init=VECTORS tell words apart",
        )
    return None


def _information(row: MetricsRow) -> float | None:
    """Return the information of codes about their sentences, with all posteriors where that was measured."""
    return row.figures.get("mi_aggregate", row.figures.get("mi_batch"))


def _code(row: MetricsRow) -> str:
    units, nats = row.figures.get("au", 0.0), _information(row)
    summary = "" if nats is None else f", and codes tell {nats:.2g} nats of a sentence"
    return f"{units:g} units of z are active{summary}"


def _start(training: Sequence[MetricsRow], validation: Sequence[MetricsRow]) -> float:
    """Return the share of the samples that found their other view before training: under dropout, or held-out ones."""
    found = [row.figures[START] for row in training if START in row.figures][:1]
    for row in validation[:1]:
        both = [value for name, value in row.figures.items() if name in _RETRIEVAL]
        found += [fmean(both)] if row.step == 0 and both else []
    return max(found, default=0.0)


def judged_metric(validation: Sequence[MetricsRow], best: str | None = None) -> str | None:
    """Choose ``best`` where it was logged, else the first loss, CAPT's own after others, else any known direction.

    Of those the cosine to a teacher comes first, which is what such a run learns.
    """
    names = dict.fromkeys(name for row in validation for name in row.figures if direction(name))
    losses = sorted((name for name in names if name.split("/")[0] == "loss"), key=lambda name: "capt" in name)
    taught = [_TAUGHT] if _TAUGHT in names else []
    return best if best in names else next(iter([*losses, *taught, *names]), None)


def series(rows: Sequence[MetricsRow], name: str) -> Series:
    """Return the steps and values of one figure, without those that are not finite."""
    found = [(row.step, row.figures[name]) for row in rows if name in row.figures]
    return [(step, value) for step, value in found if math.isfinite(value)]


def best_of(values: Series, metric: str) -> tuple[int, float]:
    """Return the step and value of the best point of a series."""
    return max(values, key=lambda point: direction(metric) * point[1])


def _collapse(training: Sequence[MetricsRow], validation: Sequence[MetricsRow]) -> Judgement | None:
    """Apply the rules of the collapse watch to the last validation, or to the last training rows without one.

    A new encoder may begin in one point: in the first steps that is no collapse.
    """
    if validation and validation[-1].figures.get("au") == 0:
        return Judgement("collapsed", f"no unit of the posterior is active (AU 0) at step {validation[-1].step}")
    for at_validation, *names in _COLLAPSES:
        # The third figure may be missing.
        rows = [row for row in (validation if at_validation else training) if all(n in row.figures for n in names[:2])]
        if not rows:
            continue
        distances = [_distances(row, names) for row in rows]
        finite = [each for each in distances if all(map(math.isfinite, each))]
        if not finite:
            continue
        best = [max(each[i] for each in finite if len(each) > i) for i in range(len(finite[-1]))]
        fallen = [_is_fallen(each, best) for each in finite]
        looks = 1 if at_validation else TRAINING_LOOKS
        known = rows[-1].step >= _ROWS and (not all(fallen) or len(training) + len(validation) >= _ROWS)
        if known and len(fallen) >= looks and all(fallen[-looks:]):
            retrieval, spread, *_ = finite[-1]
            return Judgement(
                "collapsed",
                f"the representations are nearly alike (uniformity {-spread:.2f}, at its best {-best[1]:.2f}; "
                f"{retrieval:.0%} find their positive, at best {best[0]:.0%})",
            )
        return None
    return None


def _is_fallen(distances: Sequence[float], best: Sequence[float]) -> bool:
    retrieval, spread, *_ = distances
    one_point = -spread > ONE_POINT and retrieval < FEW_FOUND
    return one_point or sum(now < FALLEN * then for now, then in zip(distances, best, strict=False)) >= 2


def _distances(row: MetricsRow, names: Sequence[str]) -> list[float]:
    """Return how far a row is from collapse: retrieval, minus uniformity, and what is outside the first direction."""
    retrieval, uniformity, first = (row.figures.get(name) for name in names)
    assert retrieval is not None
    assert uniformity is not None
    return [retrieval, -uniformity, *([] if first is None else [1 - first])]


def _by_validation(metric: str, values: Series, training: Sequence[MetricsRow]) -> Judgement:
    sign = direction(metric)
    (first_step, first), (last_step, last) = values[0], values[-1]
    best_step, best = best_of(values, metric)
    gain, lost = sign * (best - first), sign * (best - last)
    summary = f"{metric} went from {first:.4g} at step {first_step} to {last:.4g} at step {last_step}"
    # A trained encoder that training makes worse from the first steps on.
    too_fast = "; it was best before the first step: a lower optimizer.lr keeps more of the start"
    advice = too_fast if best_step == 0 and lost > _NO_GAIN * abs(best) else ""
    later = sum(step > best_step for step, _ in values)
    # Two later validations at least: one bad value is no verdict.
    if later >= 2 and lost > _WORSE * gain and lost > _NO_GAIN * abs(best):
        worse = f"{metric} was best at step {best_step} with {best:.4g} and is {last:.4g} at step {last_step}"
        loss = _training_loss(training)
        before = [value for step, value in loss if step <= best_step][-_ROWS:]
        after = [value for _, value in loss][-_ROWS:]
        # The noise is that of the last rows alone: the first ones may fall steeply.
        noise = stdev(after) * math.sqrt(2 / len(after)) if len(after) > 1 else 0.0
        if before and fmean(before) - fmean(after) > 3 * noise:
            fell = f"while the training loss fell from {fmean(before):.4g} to {fmean(after):.4g}"
            return Judgement("over-fitted", f"{worse}, {fell}{advice}")
        return Judgement("getting worse", f"{worse}, and the training loss does not fall{advice}")
    if gain <= _NO_GAIN * abs(first):
        # No gain since the first validation: it may have come when all was learnt.
        start = _by_training([row for row in training if row.step <= first_step], 0)
        return Judgement("levelled off" if start.verdict == "learning" else "not learning", summary + advice)
    three_quarters = [value for step, value in values if step <= first_step + 0.75 * (last_step - first_step)][-1]
    if len(values) >= 4 and sign * (last - three_quarters) < _LEVEL * gain:
        return Judgement("levelled off", f"{summary}, hardly any better in the last quarter")
    return Judgement("learning", summary)


def _training_loss(training: Sequence[MetricsRow]) -> Series:
    """Return the loss that a schedule of the temperature does not move: a part other than CAPT's, else the whole."""
    names = list(dict.fromkeys(name for row in training for name in row.figures if name.split("/")[0] == "loss"))
    names.sort(key=lambda name: (not name.startswith("loss/"), name.startswith("loss/capt")))
    return series(training, names[0]) if names else []


def _by_training(training: Sequence[MetricsRow], validations: int) -> Judgement:
    """Compare the first and the last tenth of the training loss (at least five rows) with the noise of their means."""
    values = [value for _, value in _training_loss(training)]
    if len(values) < _ROWS:
        return Judgement("too early to tell", f"logged steps: {len(training)}, validations: {validations}")
    part = max(_ROWS // 2, len(values) // 10)
    first, last = values[:part], values[-part:]
    # The standard error of the difference of both means.
    noise = math.hypot(stdev(first), stdev(last)) / math.sqrt(part)
    summary = f"the training loss went from {fmean(first):.4g} to {fmean(last):.4g}; validation does not tell"
    fell = fmean(first) - fmean(last)
    return Judgement("learning" if fell > max(3 * noise, _NO_GAIN * abs(fmean(first))) else "not learning", summary)

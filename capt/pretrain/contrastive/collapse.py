"""Notices that representations collapse into few directions or one point, compared with the best of the same run."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from capt.pretrain.base import distributed
from capt.pretrain.base.records import Count, Record
from capt.pretrain.engine.judgement import FALLEN, FEW_FOUND, ONE_POINT, TRAINING_LOOKS

if TYPE_CHECKING:
    from capt.pretrain.config.contrast import ContrastSection

logger = logging.getLogger(__name__)

Split = Literal["training", "validation"]

_RECOVERED = 0.75
"""A fall ends once a figure is this part of its best distance from collapse again; between that and the part that makes
a fall nothing changes, so that values near a limit do not alternate."""
_LOOKS: dict[Split, int] = {"training": TRAINING_LOOKS, "validation": 1}
"""Observations in a row that make a fall: a single batch of training may be unusual, a validation is not."""
_SPREAD = -1.0
"""After a fall into one point: uniformity below this is its end."""


class Figures(NamedTuple):
    """Figures that show a collapse: each has a value that only a collapsed encoder has, and its distance from it."""

    retrieval: float
    """Share of the anchors that find their positive, 0 to 1; 0 is collapse."""
    uniformity: float
    """Uniformity of the originals (`capt.pretrain.contrast.metrics.uniformity`), at most 0, which is collapse."""
    first_direction: float
    """First direction of the originals (`capt.pretrain.contrast.metrics.first_direction`), at most 1, which is
    collapse."""

    def distances(self) -> tuple[float, float, float]:
        """Return the distance of each figure from collapse."""
        return self.retrieval, -self.uniformity, 1 - self.first_direction

    def are_of_one_point(self, limit: float = ONE_POINT) -> bool:
        """Return whether all texts lie at one point (uniformity above ``limit``) and few are told apart."""
        return self.retrieval < FEW_FOUND and self.uniformity > limit


class BestValue(Record):
    """A figure at its best, and the step at which it was so."""

    value: float
    step: Count


class BestFigures(Record):
    """The best value of each of the `Figures`, and its step."""

    retrieval: BestValue
    uniformity: BestValue
    first_direction: BestValue

    def figures(self) -> Figures:
        """Their values."""
        return Figures(self.retrieval.value, self.uniformity.value, self.first_direction.value)


class SplitHistory(Record):
    """A split so far: its best figures, observations in a row that were like a collapse, and whether it has fallen."""

    best: BestFigures
    doubts: Count = 0
    fallen: bool = False


class CollapseState(Record):
    """State of `CollapseWatch` in ``state.json``."""

    past: dict[Split, SplitHistory] = Field(default_factory=dict)
    status: Annotated[str, Field(max_length=200)] = ""


class CollapseWatch:
    """Compares the figures of training and of validation, each with the best that the run has had.

    A *fall*: at least two of the three figures are less than half as far from collapse as at their best; or retrieval
    is below a half and uniformity nearly 0, which finds a run that was never better. One figure alone may have other
    causes: retrieval falls where a longer queue holds more rows to tell apart, and the temperature moves uniformity.

    Rank 0 logs every fall once, with its remedies; until two figures are three quarters as far from collapse again,
    ``status`` names it. All ranks see the same figures.

    Args:
        section: the job's ``contrast``, for which remedies are named.
    """

    def __init__(self, section: ContrastSection) -> None:
        self.state = CollapseState()
        self._remedies = remedies(section)

    @property
    def status(self) -> str:
        """Text of the progress line: empty, or for instance ``COLLAPSING (uniformity -0.94, was -3.41)``."""
        return self.state.status

    def look(self, split: Split, step: int, figures: Figures) -> None:
        """Compare the figures after ``step`` with the best; those that are not finite (overflowed) are ignored."""
        if not all(map(math.isfinite, figures)):
            return
        was_fallen = bool(self.state.status)
        before = self.state.past.get(split)
        best = _better(None if before is None else before.best, figures, step)
        past = SplitHistory(best=best) if before is None else before
        # What makes a fall is stricter than what keeps it, see `_RECOVERED`.
        limit, part = (_SPREAD, _RECOVERED) if past.fallen else (ONE_POINT, FALLEN)
        lost = figures.are_of_one_point(limit) or _lost(figures, best, part) >= 2
        doubts = past.doubts + 1 if lost else 0
        fallen = step > 0 and lost and (past.fallen or doubts >= _LOOKS[split])  # step 0: nothing is trained yet
        # Either split may have fallen; the progress line keeps its words until neither has.
        pasts = {**self.state.past, split: SplitHistory(best=best, doubts=doubts, fallen=fallen)}
        status = ""
        if fallen:
            word = "COLLAPSED" if figures.are_of_one_point() else "COLLAPSING"
            status = f"{word} (uniformity {figures.uniformity:.2f}, was {best.uniformity.value:.2f})"
        elif any(other.fallen for other in pasts.values()):
            status = self.state.status
        self.state = CollapseState(past=pasts, status=status)
        if distributed.rank():  # all ranks have the same state, and one of them tells it
            return
        if status and not was_fallen:
            self._warn(split, step, figures, best)
        elif was_fallen and not status:
            logger.info("step %d: the representations have recovered from their collapse", step)

    def _warn(self, split: Split, step: int, figures: Figures, best: BestFigures) -> None:
        distances = zip(figures.distances(), best.figures().distances(), strict=True)
        # A figure whose best distance is 0 cannot have fallen.
        kept = [now / then if then else 1.0 for now, then in distances]
        fallen_first = sorted(zip(kept, best, figures, strict=True), key=lambda row: row[0])
        changes = ", ".join(
            f"{name.replace('_', ' ')} "
            + (f"{mark.value:.3g} (step {mark.step}) -> {value:.3g}" if part < _RECOVERED else f"{value:.3g}")
            for part, (name, mark), value in fallen_first
        )
        logger.warning(
            "step %d (%s): the representations are collapsing: %s. What helps: %s", step, split, changes, self._remedies
        )


def remedies(section: ContrastSection) -> str:
    """The settings that keep a job from a collapse and that this one does not have yet."""
    ways = []
    if section.queue and section.in_batch == "none":
        ways.append("contrast.in_batch=global")
    elif section.queue:
        if section.queue_weight is None:
            if section.drift != "moments" or section.queue_share is None:
                ways.append("contrast.drift=moments with contrast.queue_share=1")
            else:  # the guard that was measured most is there: two crops of a text were too hard for it
                ways.append("contrast.queue=0")
            no_share = "" if section.queue_share is None else " with contrast.queue_share=null"
            ways.append(f"contrast.queue_weight=0.1{no_share}")
        ways.append("a later contrast.queue_start")
    return ", ".join([*ways, "a longer schedule.warmup_steps or a lower optimizer.lr"])


def _lost(figures: Figures, best: BestFigures, part: float) -> int:
    """Count the figures that have less than ``part`` of their best distance from collapse."""
    distances = zip(figures.distances(), best.figures().distances(), strict=True)
    return sum(now < part * then for now, then in distances)


def _better(best: BestFigures | None, figures: Figures, step: int) -> BestFigures:
    """The best of each figure, these included."""
    if best is None:
        return BestFigures(**{name: BestValue(value=value, step=step) for name, value in figures._asdict().items()})
    farther = [now > then for now, then in zip(figures.distances(), best.figures().distances(), strict=True)]
    marks = zip(best, figures, farther, strict=True)
    return BestFigures(
        **{name: BestValue(value=value, step=step) if better else mark for (name, mark), value, better in marks}
    )

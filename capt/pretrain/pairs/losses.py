"""The losses of pairs: what the rows of each need, the function, and the figures of validation. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.base import Section
from capt.pretrain.registry import look_up_row

GROUP = "capt.pair_losses"
"""The entry-point group of losses of other distributions: name -> ``MODULE:ROW``, a `PairLoss`."""


@dataclass(frozen=True)
class PairLoss:
    """A loss of the rows of a source, beside the others in `LOSSES`.

    Attributes:
        about: what it compares, for the description of ``data.loss``.
        function: ``MODULE:FUNCTION``, from `capt.pretrain.pairs.loss.LossRows` to a scalar: the same value on all
            ranks, whose gradient is right in the mean over ranks.
        metric: the name of the loss in the log.
        needs: what every row must have: the ``scores`` of its two texts, a ``teacher``'s scores of its documents, hard
            ``negatives`` of its own.
        contrasts: queries are compared with documents of other rows and of the queue, so that known positives are left
            out, and all sources of a step have one loss together. Other losses have a part of the step for each source.
        compares: rows are compared with each other, and one row alone has the loss 0.
        of_cosines: scores are cosines, from -1 to 1; else of any scale.
        of_vectors: rows are read as unit vectors; False: they are compared by `LossRows.similarity` where there is one.
        options: the section of ``data.loss_options``.
        figures: what validation reports of held-out rows with scores: name -> ``MODULE:FUNCTION`` of cosines and
            scores.
    """

    about: str
    function: str
    metric: str
    needs: frozenset[Literal["scores", "teacher", "negatives"]] = frozenset()
    contrasts: bool = False
    compares: bool = True
    of_cosines: bool = False
    of_vectors: bool = True
    options: type[Section] = Section
    figures: Mapping[str, str] = field(default_factory=dict)


_SPEARMAN = {"spearman": "capt.pretrain.pairs.validation:rank_correlation"}

NO_LOSS = "none"
"""The loss of rows that a teacher's vectors alone train."""

LOSSES = {
    "contrast": PairLoss(
        "pairs against the other pairs of the step", "capt.pretrain.pairs.loss:contrast", "loss/pairs", contrasts=True,
        of_vectors=False,
    ),
    "cosent": PairLoss(
        "rows of two texts and a score, by the order of the scores", "capt.pretrain.pairs.loss:cosent", "loss/cosent",
        frozenset({"scores"}), figures=_SPEARMAN,
    ),
    "cosine": PairLoss(
        "the same, by the distance of cosine and score", "capt.pretrain.pairs.loss:cosine", "loss/cosine",
        frozenset({"scores"}), compares=False, of_cosines=True, figures=_SPEARMAN,
    ),
    NO_LOSS: PairLoss(
        "none of the rows' own, where distillation.vectors trains them", "capt.pretrain.pairs.loss:none", "",
        compares=False,
    ),
}  # fmt: skip
"""The values of ``data.loss`` beside ``auto``."""


def find_loss(name: str) -> PairLoss:
    """The loss called ``name``, of this package or of `GROUP`. Raises ``ConfigError`` where there is none."""
    return look_up_row(name, LOSSES, GROUP, "data.loss", PairLoss, "auto")


def loss_of(name: str, *, is_scored: bool) -> str:
    """The loss that ``data.loss`` means for rows with or without scores: ``auto`` goes by that."""
    return ("cosent" if is_scored else "contrast") if name == "auto" else name


def check_source(source: str, name: str, options: Mapping[str, Any], negatives: int) -> None:
    """Raise ``ConfigError`` where a source has options that its loss does not, or no negatives for it."""
    loss = PairLoss("", "", "") if name == "auto" else find_loss(name)
    try:
        loss.options.model_validate(options)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise ConfigError(f"source {source}: loss_options.{key} of the loss {name}: {fault['msg']}") from None
    if "negatives" in loss.needs and not negatives:
        raise ConfigError(
            f"source {source}: the loss {name} compares the documents of a row with each other; set data.negatives "
            "above 0"
        )

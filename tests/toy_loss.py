"""A loss of pairs in a file of its own: margins of a teacher's scores (Hofstätter et al. 2020, arXiv:2010.02666)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.config.base import Section
from capt.pretrain.pairs.loss import LossRows
from capt.pretrain.pairs.losses import PairLoss


class Options(Section):
    """Settings of the loss."""

    scale: float = 1.0


def margin(rows: LossRows) -> Tensor:
    """Squared difference of the margins of cosines and of scores, in the mean over the negatives of all ranks."""
    views, settings = rows.views, rows.part.settings
    assert views.negatives is not None
    assert views.owners is not None
    assert views.teacher is not None
    assert views.negative_teacher is not None
    assert isinstance(settings, Options)
    s, owners = views.s[views.owners], views.owners
    ours = (s * views.s_hat[owners]).sum(1) - (s * views.negatives).sum(1)
    theirs = settings.scale * (views.teacher[owners] - views.negative_teacher)
    count = distributed.all_reduce_sum(torch.tensor(float(len(owners)), device=s.device))
    return distributed.world_size() * (ours - theirs).square().sum() / count


def pearson(cosines: np.ndarray, scores: np.ndarray) -> float:
    """The correlation of cosines and scores."""
    return float(np.corrcoef(cosines, scores)[0, 1])


MARGIN = PairLoss(
    "a teacher's margins", "tests.toy_loss:margin", "loss/margin", frozenset({"teacher", "negatives"}), compares=False,
    options=Options,
)  # fmt: skip
SCORED = PairLoss(
    "cosine regression by another name", "capt.pretrain.pairs.loss:cosine", "loss/scored", frozenset({"scores"}),
    compares=False, figures={"pearson": "tests.toy_loss:pearson"},
)  # fmt: skip

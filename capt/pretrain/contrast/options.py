"""The options of a contrast: one object from the job to the kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast.kernels import KERNELS, Precision
from capt.pretrain.contrast.precisions import VECTOR_PRECISIONS, VectorPrecision

if TYPE_CHECKING:
    from capt.pretrain.contrast.exchange import Exchange

InBatch = Literal["global", "local", "none"]
Reduction = Literal["mean", "sum"]
Direction = Literal["q-d", "q-q", "d-q", "d-d"]
Partition = Literal["joint", "per_direction"]
Preset = Literal["infonce", "symmetric", "gte", "qwen3"]
HardNegatives = Literal["all", "own"]


@dataclass(frozen=True)
class Form:
    """The directions of a loss and what goes with them.

    Attributes:
        directions: the cosines that are in it.
        partition: one softmax of them all, or one each.
        hard_negatives: an anchor sees the hard negatives of all, or its own alone.
        mask_margin: the margin of the mask by score that the preset was published with.
    """

    directions: tuple[Direction, ...]
    partition: Partition = "joint"
    hard_negatives: HardNegatives = "all"
    mask_margin: float | None = None


PRESETS: dict[Preset, Form] = {
    "infonce": Form(("q-d",)),
    "symmetric": Form(("q-d", "d-q"), "per_direction"),
    "gte": Form(("q-d", "q-q", "d-q", "d-d")),
    "qwen3": Form(("q-d", "q-q", "d-d"), hard_negatives="own", mask_margin=0.1),
}
"""Forms by the name under which they were published: InfoNCE (van den Oord et al. 2018, arXiv:1807.03748), CLIP's
(Radford et al. 2021, arXiv:2103.00020), GTE's improved contrastive loss (Li et al. 2023, arXiv:2308.03281) and Qwen3
Embedding's (Zhang et al. 2025, arXiv:2506.05176)."""


@dataclass(frozen=True)
class ContrastOptions:
    r"""Options of a contrast: one object from the job to the kernel.

    A field here is a keyword of the loss, and a key of the section ``contrast`` of that name sets it.

    Attributes:
        directions: the form of the loss: a preset (``infonce``, ``symmetric``, ``gte``, ``qwen3``) or a tuple of the
            directions ``q-d``, ``q-q``, ``d-q`` and ``d-d`` (:mod:`capt.pretrain.contrast.forms`). The queue holds
            documents: it is seen in q-d and d-d. None = the form that ``symmetric`` and ``within_view`` name.
        partition: all directions in one softmax (``joint``), or one each (``per_direction``, of q-d and d-q). None =
            the preset's; of a tuple joint.
        hard_negatives: an anchor sees the hard negatives of ``all`` anchors, or its ``own`` alone. None = the preset's.
        mask_margin: a negative of a cosine above :math:`s_i^+` plus this margin is taken for a false one and left out.
            None = the preset's (``qwen3``: 0.1), or no mask.
        mask_relative: the same above :math:`s_i^+ - |s_i^+| m`, a margin below the positive and relative to it.
        hardness_in_batch: :math:`\alpha` of the other samples' documents and hard negatives in q-d (without directions:
            of all live rows): their logits are :math:`c_{ij} / \tau + \alpha c_{ij}`, the second term without gradient
            (9 in Lan et al. 2025, arXiv:2503.04812).
        hardness_own: the same for the anchor's own hard negatives (5 in EmbeddingGemma, arXiv:2509.20354).
        matryoshka: widths :math:`w`; the loss is the sum over them of the loss of rows cut to their first :math:`w`
            features and normalised again (Kusupati et al. 2022, arXiv:2205.13147). Rows travel once and are cut on
            arrival. Empty = whole rows.
        matryoshka_weights: a factor of each width. Empty = 1 each.
        precisions: the precisions whose blocks the rows have side by side (:mod:`capt.pretrain.contrast.precisions`);
            the loss is the sum over them of the loss of rows of that block alone, each cut to all widths. Empty = rows
            are vectors.
        precision_weights: a factor of each precision. Empty = 1 each.
        queue_share: how much the queue may weigh beside the live keys. Every queued row then counts
            ``min(1, queue_share * L / K)`` times, of ``L`` live rows of the views that are keys, ``negatives`` not
            counted (of all ranks, or of a rank in the mean where ``in_batch`` is local), and ``K`` rows that the queue
            holds, so that stale rows never drown live ones. 0 = as without the queue, None = every row counts once.
        hardness: :math:`\alpha`; each queued row counts :math:`K_i e^{\alpha c_{ij}} / \sum_{j'} e^{\alpha c_{ij'}}`
            times, with its cosine :math:`c_{ij}` to the anchor and :math:`K_i` queued negatives of it, so that near
            ones count more and all together as often as before. The weights take no gradient. 0 = every row counts
            once.
        in_batch: whose live rows are negatives: those of all ranks, of this rank, or none.
        equal_rows: the caller knows that all ranks hold the same number of rows: then no rank asks the others for
            theirs, and the host does not wait for the device. Other sizes would be an error of the collectives, or
            wrong rows.
        reduction: ``mean`` over the anchors of all ranks, or ``sum``.
        grad_reduction: how the engine combines the parameter gradients of the ranks. The value returned on each rank is
            scaled so that this very combination of the ranks' values, and of their gradients, is exact.
        impl: ``chunked``, or ``dense`` (all logits of a rank in one matrix, to compare with).
        precision: of the matrix products with keys and queue, :mod:`capt.pretrain.contrast.kernels`; exponentials,
            sums and all else stay in float32.

    Raises:
        ConfigError: an unknown choice, or a number that is negative or not finite.
    """

    directions: Preset | tuple[Direction, ...] | None = None
    partition: Partition | None = None
    hard_negatives: HardNegatives | None = None
    mask_margin: float | None = None
    mask_relative: float | None = None
    hardness_in_batch: float = 0.0
    hardness_own: float = 0.0
    matryoshka: tuple[int, ...] = ()
    matryoshka_weights: tuple[float, ...] = ()
    precisions: tuple[VectorPrecision, ...] = ()
    precision_weights: tuple[float, ...] = ()
    queue_share: float | None = None
    hardness: float = 0.0
    in_batch: InBatch = "global"
    equal_rows: bool = False
    reduction: Reduction = "mean"
    grad_reduction: Reduction = "mean"
    impl: str = "chunked"
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        choices = {
            "in_batch": (self.in_batch, get_args(InBatch)),
            "reduction": (self.reduction, get_args(Reduction)),
            "grad_reduction": (self.grad_reduction, get_args(Reduction)),
            "impl": (self.impl, tuple(KERNELS)),
            "partition": (self.partition, (None, *get_args(Partition))),
            "hard_negatives": (self.hard_negatives, (None, *get_args(HardNegatives))),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(each for each in allowed if each)}, got {value!r}")
        for name in ("hardness", "hardness_in_batch", "hardness_own"):
            number = getattr(self, name)
            if not 0 <= number < math.inf:
                raise ConfigError(f"{name} is a number of 0 or more, got {number}")
        if self.queue_share is not None and (self.in_batch == "none" or not 0 <= self.queue_share < math.inf):
            raise ConfigError(
                f"queue_share is a number of 0 or more, and a share of the live keys, got {self.queue_share} with "
                f"in_batch={self.in_batch}"
            )
        self._check_form()
        self._check_mask()
        self._check_widths()

    def _check_form(self) -> None:
        if self.directions is None:
            if self.partition is not None:
                raise ConfigError(f"partition={self.partition} divides directions: set directions as well")
            return
        if isinstance(self.directions, str):
            if self.directions not in PRESETS:
                raise ConfigError(f"directions is one of {', '.join(PRESETS)}, or a tuple, got {self.directions!r}")
            if self.partition is not None:
                raise ConfigError(
                    f"partition is part of directions={self.directions}: leave it out, or list directions"
                )
            return
        known = get_args(Direction)
        if (
            not self.directions
            or not set(self.directions) <= set(known)
            or len(set(self.directions)) < len(self.directions)
        ):
            raise ConfigError(f"directions are different ones of {', '.join(known)}, got {self.directions}")
        if "q-d" not in self.directions:
            raise ConfigError(f"directions without q-d have no positive, got {self.directions}")
        if self.partition == "per_direction" and not set(self.directions) <= {"q-d", "d-q"}:
            raise ConfigError(
                f"partition=per_direction needs the positive in each direction: q-d and d-q, got {self.directions}"
            )

    def _check_mask(self) -> None:
        if self.mask_margin is not None and self.mask_relative is not None:
            raise ConfigError("mask_margin and mask_relative are two limits of one mask: set one of them")
        if self.mask_margin is not None and math.isnan(self.mask_margin):
            raise ConfigError("mask_margin is a cosine that is added to the positive's, got nan")
        if self.mask_relative is not None and not 0 <= self.mask_relative < math.inf:
            raise ConfigError(f"mask_relative is a part of the positive's cosine, 0 or more, got {self.mask_relative}")

    def _check_widths(self) -> None:
        if any(width < 1 for width in self.matryoshka) or len(set(self.matryoshka)) < len(self.matryoshka):
            raise ConfigError(f"matryoshka lists different widths of 1 or more, got {self.matryoshka}")
        if self.matryoshka_weights and len(self.matryoshka_weights) != len(self.matryoshka):
            raise ConfigError(
                f"matryoshka_weights has one number for each of {len(self.matryoshka)} widths of matryoshka, got "
                f"{self.matryoshka_weights}"
            )
        if any(not 0 <= weight < math.inf for weight in self.matryoshka_weights):
            raise ConfigError(f"matryoshka_weights are numbers of 0 or more, got {self.matryoshka_weights}")

        if any(each not in VECTOR_PRECISIONS for each in self.precisions) or len(set(self.precisions)) < len(
            self.precisions
        ):
            raise ConfigError(f"precisions are different ones of {', '.join(VECTOR_PRECISIONS)}, got {self.precisions}")
        if self.precision_weights and len(self.precision_weights) != len(self.precisions):
            raise ConfigError(
                f"precision_weights has one number for each of {len(self.precisions)} precisions, got "
                f"{self.precision_weights}"
            )
        if any(not 0 <= weight < math.inf for weight in self.precision_weights):
            raise ConfigError(f"precision_weights are numbers of 0 or more, got {self.precision_weights}")

    @property
    def form(self) -> Form | None:
        """The form that ``directions`` and ``partition`` name."""
        if self.directions is None:
            return None
        if isinstance(self.directions, str):
            return PRESETS[self.directions]
        return Form(self.directions, self.partition or "joint")

    @property
    def sees_all_hard_negatives(self) -> bool:
        """True if an anchor sees the hard negatives of others."""
        chosen = self.hard_negatives or (self.form.hard_negatives if self.form else "all")
        return chosen == "all" and self.in_batch != "none"

    def limits(self, positive_cosines: Tensor) -> Tensor | None:
        """The largest cosine of a negative of each anchor, from that of its positive; None: there is no mask."""
        if self.mask_relative is not None:
            return positive_cosines - positive_cosines.abs() * self.mask_relative
        margin = self.form.mask_margin if self.mask_margin is None and self.form else self.mask_margin
        return None if margin is None else positive_cosines + margin

    def sum_scale(self, samples: Exchange, terms: int = 1) -> float:
        """Return the factor of a sum over this rank's samples: a mean over those of all ranks, of ``terms`` each."""
        # Engines divide the sum of the ranks' gradients by their number, by which the loss is multiplied beforehand.
        scale = float(len(samples.counts)) if self.grad_reduction == "mean" else 1.0
        return scale / (max(1, sum(samples.counts)) * terms) if self.reduction == "mean" else scale

    def widths(self, features: int) -> list[tuple[slice, float]]:
        """The columns that rows of ``features`` are cut to (`capt.pretrain.contrast.sharded.cut`), each with a weight.

        They are each width of each precision.
        """
        blocks = len(self.precisions) or 1
        if features % blocks:
            raise ConfigError(
                f"precisions {self.precisions}: rows of {features} features are not {blocks} equal blocks"
            )
        whole = features // blocks
        if any(width > whole for width in self.matryoshka):
            raise ConfigError(f"matryoshka {self.matryoshka}: rows have {whole} features, which is the largest width")
        cuts = list(zip(self.matryoshka, self.matryoshka_weights or [1.0] * len(self.matryoshka), strict=True))
        return [
            (slice(block * whole, block * whole + width), of_block * weight)
            for block, of_block in enumerate(self.precision_weights or [1.0] * blocks)
            for width, weight in cuts or [(whole, 1.0)]
        ]

    @property
    def largest_hardness(self) -> float:
        """The largest of all factors alpha."""
        return max(self.hardness, self.hardness_in_batch, self.hardness_own)

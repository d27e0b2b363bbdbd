"""The validation metrics of what is trained with the contrast, one row a metric. No torch until one is computed.

A row is all that a metric needs: validation and ``capt evaluate`` report it, ``checkpoint.best`` and sweeps accept its
names, and the documentation lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Of = Literal["tokens", "pairs", "noise"]


@dataclass(frozen=True)
class Metric:
    """A metric, or several that are computed together.

    Attributes:
        names: of the values, in their order.
        of: what it is computed of. ``tokens``: the masked tokens, as `token_metrics` is. ``pairs``: the unit rows of
            the aggregation head, as `contrast_metrics` is. ``noise``: the pooled rows of the encoder, as
            `noise_metrics` is.
        compute: gives the values, equal on every rank (all ranks call it).
        about: what each value is, for the documentation.
    """

    names: tuple[str, ...]
    of: Of
    compute: Callable[..., Iterable[float]]
    about: tuple[str, ...]


def _loss_and_accuracy(loss: float, correct: float, count: float) -> Iterable[float]:
    return loss / count, correct / count


def _contrastive_loss(s: Tensor, s_hat: Tensor, temperature: float) -> Iterable[float]:
    from capt.pretrain.contrast.metrics import contrastive_loss

    return [contrastive_loss(s, s_hat, temperature)]


def _retrieval(s: Tensor, s_hat: Tensor, temperature: float) -> Iterable[float]:
    from capt.pretrain.contrast.metrics import retrieval_accuracy

    return retrieval_accuracy(s, s_hat), retrieval_accuracy(s_hat, s)


def _spread(s: Tensor, s_hat: Tensor, temperature: float) -> Iterable[float]:
    from capt.pretrain.contrast.metrics import alignment, first_direction, uniformity

    return alignment(s, s_hat), uniformity(s), first_direction(s)


def _noise_invariance(z: Tensor, z_hat: Tensor) -> Iterable[float]:
    from capt.pretrain.contrast.metrics import noise_invariance

    return noise_invariance(z, z_hat).values()


METRICS: tuple[Metric, ...] = (
    Metric(
        ("loss/mlm", "accuracy/mlm"), "tokens", _loss_and_accuracy,
        ("mean nats over masked tokens", "share of masked tokens that are predicted right"),
    ),
    Metric(
        ("loss/capt_fixed",), "pairs", _contrastive_loss,
        ("the CAPT loss without a queue at `validate.temperature`; chance is 2 log(2N - 1)",),
    ),
    Metric(
        ("retrieval/to_corrupted", "retrieval/to_original"), "pairs", _retrieval,
        (
            "share of originals whose own corruption is nearest of all N; chance is 1/N",
            "share of corruptions whose own original is nearest of all N; chance is 1/N",
        ),
    ),
    Metric(
        ("alignment", "uniformity", "first_direction"), "pairs", _spread,
        (
            "Wang and Isola 2020: mean squared distance of both views; lower is better",
            "Wang and Isola 2020: how evenly the originals are spread; lower is better, 0 is collapse",
            "share of the rows' sum of squares in their first principal direction, rows not centred; 1 is collapse, an "
            "even spread over d dimensions has 1/d",
        ),
    ),
    Metric(
        ("cosine_gap", "centred_gap", "drift", "top1"), "noise", _noise_invariance,
        (
            "mean cosine to the own corruption minus that to another text's",
            "the same after subtracting the mean of all rows, which takes an anisotropic encoder's common direction "
            "away; 1 when noise moves nothing, 0 when it leaves no trace of the text",
            "squared distance that noise moves a text, in units of that between texts; 0 is invariant, 1 is no better "
            "than another text",
            "retrieval accuracy on centred rows",
        ),
    ),
)  # fmt: skip


def names_of(of: Of) -> tuple[str, ...]:
    """The names of the metrics of a kind."""
    return tuple(name for metric in METRICS if metric.of == of for name in metric.names)


def token_metrics(loss: float, correct: float, count: float) -> dict[str, float]:
    """Metrics of masked tokens of all ranks, from their cross entropy in nats, right predictions, and number."""
    return _computed("tokens", loss, correct, count)


def contrast_metrics(s: Tensor, s_hat: Tensor, temperature: float) -> dict[str, float]:
    """Measure how well N texts and their corruptions find each other (collective).

    Args:
        s: unit rows of the originals.
        s_hat: unit rows of their corruptions.
        temperature: above 0, and the same for all runs that are compared.
    """
    return _computed("pairs", s, s_hat, temperature)


def noise_metrics(z: Tensor, z_hat: Tensor) -> dict[str, float]:
    """Measure how close an encoder keeps N corrupted texts to their originals, from rows of any scale (collective)."""
    return _computed("noise", z, z_hat)


def _computed(of: Of, *given: Any) -> dict[str, float]:
    rows = [metric for metric in METRICS if metric.of == of]
    return {name: x for row in rows for name, x in zip(row.names, row.compute(*given), strict=True)}

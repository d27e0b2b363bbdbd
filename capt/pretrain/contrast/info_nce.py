"""InfoNCE with negatives from the batches of all ranks and from a sharded queue; the CAPT loss (Eq. 2-4) on top."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrast.exchange import Exchange
from capt.pretrain.contrast.forms import Softmax, softmaxes
from capt.pretrain.contrast.kernels import Precision, Products, check_precision
from capt.pretrain.contrast.metrics import ContrastStats
from capt.pretrain.contrast.options import ContrastOptions
from capt.pretrain.contrast.queue import NO_ID, ShardedQueue, is_not_one, is_readable, norms_of
from capt.pretrain.contrast.sharded import Arrived, Known, ShardedSoftmax, SoftmaxContext, cut


def compute_dtype(anchors: Tensor, positives: Tensor, precision: Precision) -> torch.dtype:
    """The type of all arithmetic: float64 where a row is float64, else float32. Raises for another ``precision``."""
    dtype = torch.float64 if torch.float64 in (anchors.dtype, positives.dtype) else torch.float32
    if dtype == torch.float64 and precision != "fp32":
        raise ConfigError(
            f"precision {precision} is for float32 rows; float64 rows are multiplied in float64, with fp32"
        )
    return dtype


def check_temperature(temperature: float | Tensor) -> None:
    """Raise for a temperature that is not a positive number; one that cannot be read without waiting is not checked."""
    if isinstance(temperature, Tensor) and not is_readable(temperature):
        return
    values = temperature.flatten().tolist() if isinstance(temperature, Tensor) else [temperature]
    for tau in values:
        if not 0 < tau < math.inf:
            raise ConfigError(f"the temperature must be a positive number, got {tau}")


def _check_row_temperatures(anchors: Tensor, temperature: Tensor, options: ContrastOptions) -> None:
    """Raise for temperatures of rows that have another number or an option that needs one temperature for all."""
    if temperature.shape != anchors.shape[:1]:
        raise ConfigError(
            f"temperature is a number, or one for each of {len(anchors)} anchors, got {tuple(temperature.shape)}"
        )
    if options.largest_hardness:
        raise ConfigError("hardness needs one temperature for all anchors: set it to 0, or give a number")
    if temperature.requires_grad:
        raise ConfigError("a temperature for each anchor is not learned: detach it, or give a scalar")


def check_rows(
    anchors: Tensor, positives: Tensor, negatives: Tensor | None, ids: Tensor | None, wait_for_values: bool
) -> None:
    """Raise for types and shapes that do not fit each other, and for rows without unit norm.

    Norms that cannot be read without a wait are checked only with ``wait_for_values``.
    """
    named = {"anchors": anchors, "positives": positives, "negatives": negatives}
    for name, rows in named.items():
        if rows is not None and not (rows.ndim == 2 and rows.is_floating_point()):
            raise ConfigError(f"{name} must be rows of real numbers, got {tuple(rows.shape)} of {rows.dtype}")
    if positives.shape != anchors.shape or (negatives is not None and negatives.shape[1:] != anchors.shape[1:]):
        shapes = [tuple(rows.shape) for rows in (anchors, positives, negatives) if rows is not None]
        raise ConfigError(f"anchors and positives must have one shape, negatives the same width, got {shapes}")
    if ids is not None and (ids.shape != anchors.shape[:1] or ids.dtype != torch.int64):
        raise ConfigError(f"ids must be {len(anchors)} int64 numbers, got {tuple(ids.shape)} of {ids.dtype}")
    if not (wait_for_values or is_readable(anchors)):
        return
    # One comparison for all rows: on a GPU it is one wait, and the culprit is looked for only after a failure.
    found = {name: norms_of(rows.detach()) for name, rows in named.items() if rows is not None}
    if is_not_one(torch.cat(list(found.values()))):
        name = next(name for name, values in found.items() if is_not_one(values))
        raise ConfigError(f"{name} must have unit norm: apply torch.nn.functional.normalize(rows, dim=-1) first")


def check_known(n: int, ids: Tensor | None, query_ids: Tensor | None, known: Tensor | None) -> None:
    """Raise for pairs that belong together without the ids of both sides, or of another shape or type."""
    if (query_ids is None) != (known is None):
        raise ConfigError("known pairs are found by the queries' ids: give query_ids and known, or neither")
    if known is None or query_ids is None:
        return
    if ids is None:
        raise ConfigError("known are pairs of query_ids with the ids of documents: give ids, those of the positives")
    if query_ids.shape != (n,) or query_ids.dtype != torch.int64:
        raise ConfigError(f"query_ids must be {n} int64 numbers, got {tuple(query_ids.shape)} of {query_ids.dtype}")
    if known.ndim != 2 or known.shape[1] != 2 or known.dtype != torch.int64:
        raise ConfigError(f"known must be rows of two int64 ids, got {tuple(known.shape)} of {known.dtype}")


def check_negatives(
    anchors: Tensor,
    negatives: Tensor | None,
    negative_ids: Tensor | None,
    negative_owners: Tensor | None,
    ids: Tensor | None,
    options: ContrastOptions,
) -> None:
    """Raise for ids or owners of hard negatives that do not fit them, and for options that need what is not given."""
    named = {"negative_ids": negative_ids, "negative_owners": negative_owners}
    for name, numbers in named.items():
        if numbers is not None and (
            negatives is None or numbers.shape != negatives.shape[:1] or numbers.dtype != torch.int64
        ):
            raise ConfigError(
                f"{name} is one int64 number for each of {0 if negatives is None else len(negatives)} negatives, got "
                f"{tuple(numbers.shape)} of {numbers.dtype}"
            )
    if negative_ids is not None and ids is None:
        raise ConfigError("negative_ids are compared with the ids of the anchors: give ids as well")
    if negatives is None:
        return
    if negative_owners is None:
        directions = options.form.directions if options.form else ()
        asks = {
            "in_batch=none": options.in_batch == "none",
            "hard_negatives=own": not options.sees_all_hard_negatives,
            "hardness_own": options.hardness_own > 0,
            "direction d-d": "d-d" in directions,
        }
        for name, is_asked in asks.items():
            if is_asked:
                raise ConfigError(f"{name} asks whose hard negative each of negatives is: give negative_owners")
    # On a GPU a look at the values would wait for its stream in every step, so they are checked where it costs nothing.
    elif is_readable(negative_owners) and len(negative_owners):
        low, high = int(negative_owners.min()), int(negative_owners.max())
        if low < -1 or high >= len(anchors):
            raise ConfigError(
                f"negative_owners are rows of the anchors, 0 to {len(anchors) - 1}, or -1 for nobody's, got {low} to "
                f"{high}"
            )


def check_queue(
    anchors: Tensor, queue: ShardedQueue | None, negatives: Tensor | None, in_batch: str, group: distributed.Group
) -> None:
    """Raise where the queue has another width, device or group than the loss, or rows without unit norm, or where there
    would be no negatives.
    """
    if in_batch == "none" and queue is None and negatives is None:
        raise ConfigError("in_batch=none leaves only the queue and an anchor's own hard negatives: pass one of them")
    if queue is None:
        return
    if not queue.has_unit_rows:
        raise ConfigError(
            "the queue was given rows without unit norm: apply torch.nn.functional.normalize(rows, dim=-1) before "
            "queue.enqueue"
        )
    if queue.device != anchors.device:
        raise ConfigError(
            f"the queue is on {queue.device}, the anchors on {anchors.device}: give ShardedQueue(device=...) theirs"
        )
    if queue.dim != anchors.shape[1]:
        raise ConfigError(f"the queue holds rows of {queue.dim} features, the anchors have {anchors.shape[1]}")
    world = distributed.world_size(group)
    if queue.world != world:
        raise ConfigError(
            f"the queue is sharded over {queue.world} ranks, the loss over {world}: give both one group, and use the "
            "queue only after torch.distributed.init_process_group"
        )


LARGEST_INVERSE_TEMPERATURE = {torch.float32: 64.0, torch.float64: 640.0}
"""Up to this ``1 / tau`` (plus the hardness) logits of unit rows need no running maximum: their exponentials and sums
stay in range."""


def info_nce(
    anchors: Float[Tensor, "n d"],
    positives: Float[Tensor, "n d"],
    *,
    temperature: float | Float[Tensor, ""] | Float[Tensor, " n"],
    queue: ShardedQueue | None = None,
    negatives: Float[Tensor, "k d"] | None = None,
    negative_ids: Int[Tensor, " k"] | None = None,
    negative_owners: Int[Tensor, " k"] | None = None,
    symmetric: bool = False,
    within_view: bool = False,
    across_views: bool = True,
    ids: Int[Tensor, " n"] | None = None,
    query_ids: Int[Tensor, " n"] | None = None,
    known: Int[Tensor, "p 2"] | None = None,
    group: distributed.Group = None,
    stats: ContrastStats | None = None,
    options: ContrastOptions | None = None,
    **changes: Any,
) -> Float[Tensor, ""]:
    r"""Contrastive loss of ``n`` anchors per rank, exact over all ranks of ``group``.

    .. math::
        L_i = -\log \frac{e^{q_i \cdot k_i^+ / \tau}}{e^{q_i \cdot k_i^+ / \tau} + \sum_{j \in \mathcal{N}(i)} e^{q_i
        \cdot k_j / \tau}}

    The negatives of anchor ``i`` are all rows of the queue and, of the live batch, the positives of other samples; with
    ``within_view`` the anchors of other samples, too. The sample's own rows are never among them. The queue is frozen;
    live rows receive gradients from the anchors of every rank that sees them. The option ``directions`` names the forms
    of embedding training, :mod:`capt.pretrain.contrast.forms`, in place of ``symmetric`` and ``within_view``.

    Args:
        anchors: unit rows. In float64 everything is computed in float64, else in float32, whatever their type.
        positives: unit rows; row ``i`` is the positive of anchor ``i``.
        temperature: a number, or a positive scalar tensor whose exact gradient is wanted. It may differ from call to
            call, as between sources of data. Or one for each anchor, which then divides all cosines in the anchor's
            denominators; it takes no gradient and goes without hardness.
        queue: more negatives, over all ranks. Enqueue *after* the loss; with a ``drift``, those views that are keys
            here, whose statistics the queued rows take on.
        negatives: hard negatives: more live negatives for every anchor that sees this rank's batch, unit rows, any
            number.
        negative_ids: instance of each hard negative, to be compared with ``ids``.
        negative_owners: the anchor of this rank that each is a hard negative of, -1 for nobody's. With
            ``hard_negatives="own"`` or ``in_batch="none"`` an anchor sees its own alone.
        symmetric: positives are anchors as well (the mean is then over both directions).
        within_view: rows of the anchor's own view are negatives as well (SimCLR, CAPT).
        across_views: rows of the other view are negatives; without it, and with ``within_view``, those of the anchor's
            own view alone (Eq. 10 of the clVAE paper).
        ids: instance of each sample; a key with the anchor's id, live or queued, is not a negative (it shows the same
            thing). The positive always counts once.
        query_ids: with ``known``: the text of each anchor; ``ids`` are then those of the positives' texts.
        known: pairs of a query's id and a document's that belong together, the same on all ranks: those of every
            anchor of any rank with the live and queued keys. Row ``(a, b)`` says that a document ``b``, live or
            queued, is not a negative of a sample whose query is ``a``, and a query ``a`` not one of a sample whose
            document is ``b``. It says nothing about other texts: what belongs to one query may be a negative of another
            one, whatever both share. A sample's own pair and copies of its document need no row.
        group: the ranks over which batch and queue are spread. Ranks may hold different ``n``.
        stats: filled with diagnostics of this rank's anchors (with ``matryoshka`` of the widest rows, with
            ``precisions`` of the first).
        options: :class:`~capt.pretrain.contrast.options.ContrastOptions`.
        changes: fields of the options that differ from ``options``, such as ``hardness=2.0``.

    Raises:
        ConfigError: a temperature that is not positive, a hardness below 0, rows without unit norm (on a GPU, and in
            compiled code, this is looked at only when ``stats`` are asked for), arguments that do not fit each other,
            or a precision that the device does not have.
    """
    options = replace(options or ContrastOptions(), **changes)
    check_temperature(temperature)
    check_precision(options.precision, anchors.device)
    check_rows(anchors, positives, negatives, ids, wait_for_values=stats is not None)
    check_known(len(anchors), ids, query_ids, known)
    check_negatives(anchors, negatives, negative_ids, negative_owners, ids, options)
    check_queue(anchors, queue, negatives, options.in_batch, group)
    if options.directions is not None and (symmetric or within_view or not across_views):
        raise ConfigError("directions name the form: leave out symmetric, within_view and across_views")
    if not (within_view or across_views):
        raise ConfigError("across_views=False leaves the anchor's own view as negatives: set within_view=True")
    if options.queue_share == 0:  # its rows would count 0 times, and still be the nearest ones
        queue = None
    # Hardness weighs queued rows alone: without them it must not forbid temperatures of rows, or ask for a maximum.
    if queue is None:
        options = replace(options, hardness=0.0)
    by_row = isinstance(temperature, Tensor) and temperature.ndim > 0
    if by_row:
        _check_row_temperatures(anchors, temperature, options)  # type: ignore[arg-type]
    dtype = compute_dtype(anchors, positives, options.precision)
    # One softmax, or one for each direction: who its anchors are, and which live keys they see.
    parts = softmaxes(
        anchors, positives, negatives,
        options=options, owned=negative_owners is not None, symmetric=symmetric, within_view=within_view,
        across_views=across_views,
    )  # fmt: skip

    # The factor of a sum over this rank's anchors that makes the loss a mean over the anchors of all ranks.
    samples = Exchange.gather_counts(len(anchors), anchors.device, group, equal=options.equal_rows)
    # other ranks' anchors are needed where this rank holds keys for them
    exchange = samples if queue is not None or options.in_batch == "global" else samples.local()
    largest = LARGEST_INVERSE_TEMPERATURE[dtype]
    # A tensor is not looked at, which would wait for the device: its logits count as unbounded.
    bounded = not isinstance(temperature, Tensor) and 1 / temperature + options.largest_hardness <= largest
    # A key of the anchor's own instance is not a negative; hard negatives without an id equal no instance.
    places = torch.arange(len(anchors), device=anchors.device)
    instances = places if ids is None else ids
    nobody = places.new_full((0 if negatives is None else len(negatives),), -1)
    hard_ids = torch.full_like(nobody, NO_ID) if negative_ids is None else negative_ids
    hard_owners = nobody if negative_owners is None else negative_owners

    # This rank's part of the queue, moved to where the live rows are (drift), and how often each row counts.
    queued, queued_weight = None, None
    if queue is not None:
        live_views = [anchors] * (symmetric or within_view) + [positives] * (symmetric or across_views)
        queued = queue.negatives(live_views), queue.ids
        # L of `ContrastOptions.queue_share`: with in_batch=local an anchor sees the rows of one rank, in the mean 1/W.
        if options.queue_share is not None:
            live_rows = (
                len(live_views) * sum(samples.counts) / (1 if options.in_batch == "global" else len(samples.counts))
            )
            queued_weight = _weight_of_queue(options.queue_share * live_rows, queued[0], group)

    losses: list[Tensor] = []
    widths = options.widths(anchors.shape[1])
    for part in parts:
        views, sides, keys, hard = len(part.positives), len(part.sides), len(part.keys), part.hard is not None
        rows = _interleave([_concatenate(side) for side in part.sides])
        # Without a live key (in_batch=none) an empty matrix takes their place, as the function below needs a tensor.
        live = [*part.keys, *([] if part.hard is None else [part.hard])] or [anchors[:0].detach()]
        tensors = [each.to(dtype) for each in (rows, _concatenate(part.positives), _concatenate(live))]
        tensors[2] = tensors[2].view_as(tensors[2])  # the positives may be the live keys: a compiler wants them apart
        context = SoftmaxContext(
            exchange=exchange.with_views(views * sides),
            options=options,
            queued=queued if part.queue_step else None,
            queued_weight=queued_weight,
            queue_step=part.queue_step,
            anchor_ids=_interleave([_concatenate([instances] * views)] * sides),
            anchor_places=_interleave([_concatenate([places] * views)] * sides),
            live_ids=_concatenate([instances] * keys + [hard_ids] * hard or [instances[:0]]),
            # Rows of the batch are nobody's hard negatives: no anchor has the place -1.
            live_owners=_concatenate([torch.full_like(places, -1)] * keys + [hard_owners] * hard or [places[:0]]),
            interactions=part.interactions,
            sides=sides,
            positive_count=part.positive_count,
            arrived=None,
            known=_known(known, query_ids, instances, hard_ids if hard else None, part),
            shared_ids=ids is not None,
            # Diagnostics need the nearest negative, which is the running maximum.
            needs_max=not bounded or stats is not None,
            scale=options.sum_scale(samples, sum(len(part.positives) for part in parts)),
            stats=stats,
        )
        tau = torch.cat([temperature] * views) if by_row else temperature  # type: ignore[list-item]
        losses += _at_widths(tensors, tau, context, widths)
    return functools.reduce(torch.add, losses)


if torch.__version__ < "2.13":  # compiled by 2.11, the gradients of float64 rows and of a temperature are 0
    info_nce = torch._disable_dynamo(info_nce)  # type: ignore[attr-defined]


def _at_widths(
    tensors: list[Tensor], temperature: float | Tensor, context: SoftmaxContext, widths: list[tuple[slice, float]]
) -> list[Tensor]:
    """The loss of one softmax over ``tensors`` (anchors, positives, live keys) at each width, times its weight.

    Where rows are cut the anchors travel once, whole, and are cut on arrival.
    """
    anchors, whole = tensors[0], slice(0, tensors[0].shape[1])
    if widths != [(whole, 1.0)]:
        wire = Products(context.options.precision).wire_dtype(anchors.dtype)
        gathered = context.exchange.all_gather(anchors.detach().to(wire))
        arrived = Arrived(gathered, context.gathered_ids(len(gathered)), context.gathered_queries_of(), whole)
        context = replace(context, arrived=arrived)
    losses = []
    sizes = [columns.stop - columns.start for columns, _ in widths]  # a list: torch.compile knows no key of max
    widest = sizes.index(max(sizes))
    for number, (columns, weight) in enumerate(widths):
        queued = context.queued and (cut(context.queued[0], columns), context.queued[1])
        stats = context.stats if number == widest else None
        arrived_here = context.arrived and context.arrived._replace(columns=columns)
        at_width = replace(context, queued=queued, stats=stats, arrived=arrived_here)
        # Autocast would multiply in 16 bits, whatever `precision` says.
        with torch.autocast(anchors.device.type, enabled=False):
            loss = ShardedSoftmax.apply(*(cut(rows, columns) for rows in tensors), temperature, at_width)
        losses.append(loss if weight == 1 else weight * loss)
    return losses


def _known(
    pairs: Tensor | None, queries: Tensor | None, documents: Tensor, hard: Tensor | None, part: Softmax
) -> Known | None:
    """The texts of a softmax by id; None where no pairs are known.

    ``queries`` and ``documents`` are those of the samples, ``hard`` the hard negatives.
    """
    if pairs is None or queries is None or not len(pairs):
        return None
    nothing, of_queries = torch.full_like(documents, NO_ID), part.keys_are_queries
    hard = documents[:0] if hard is None else hard
    return Known(
        pairs,
        _interleave([_concatenate([queries] * len(part.positives))] * len(part.sides)),
        _concatenate([queries if each else nothing for each in of_queries] + [torch.full_like(hard, NO_ID)])
        if any(of_queries)
        else None,
        _concatenate([nothing if each else documents for each in of_queries] + [hard]),
    )


def _weight_of_queue(rows: float, queued: Tensor, group: distributed.Group) -> Tensor:
    """The weight of each queued row: 1, or less where all of them together would weigh more than ``rows`` rows."""
    # The count stays on the device: to read it would make the host wait.
    held = distributed.all_reduce_sum(
        torch.full((), float(len(queued)), dtype=torch.float64, device=queued.device), group
    )
    return (rows / held.clamp_min(1.0)).clamp_max(1.0)


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _interleave(sides: list[Tensor]) -> Tensor:
    """The rows of several sides interleaved: the first row of each side, the second of each, and so on."""
    return sides[0] if len(sides) == 1 else torch.stack(sides, 1).flatten(0, 1)


def capt_loss(
    s: Float[Tensor, "n d"],
    s_hat: Float[Tensor, "n d"],
    queue: ShardedQueue | None = None,
    *,
    temperature: float | Float[Tensor, ""],
    ids: Int[Tensor, " n"] | None = None,
    group: distributed.Group = None,
    stats: ContrastStats | None = None,
    options: ContrastOptions | None = None,
    **changes: Any,
) -> Float[Tensor, ""]:
    r"""CAPT's loss between original sequences and their corruptions, exact over all ranks (Eq. 2-4).

    .. math::
        \mathcal{L}(x_i) = -\log \frac{e^{s_i \cdot \hat s_i / \tau}}{\sum_j e^{s_i \cdot \hat s_j / \tau} +
        \sum_{j \neq i} e^{s_i \cdot s_j / \tau} + \sum_{q \in \mathcal{Q}} e^{s_i \cdot q / \tau}}

    and :math:`\mathcal{L}(\hat x_i)` likewise with the views exchanged (section 2.2 adds the queue :math:`\mathcal{Q}`
    to Eq. 2 and 3). Both views are anchors, and both views of every other sample are negatives.

    Args:
        s: unit rows, the originals of this rank.
        s_hat: unit rows, their corruptions.
        queue: frozen negatives from earlier steps; push ``queue.enqueue(s, s_hat)`` after the loss.
        temperature: ``tau``, for instance of :func:`~capt.pretrain.contrast.temperature.inverted_triangle` (Eq. 6).
        ids: instance of each sample, to take copies of the same text out of the negatives.
        group: the ranks that train together.
        stats: filled with diagnostics.
        options: :class:`~capt.pretrain.contrast.options.ContrastOptions`. ``reduction="mean"`` is
            :math:`\frac1n \sum_i [\mathcal{L}(x_i) + \mathcal{L}(\hat x_i)]` over the samples of all ranks, the scale
            of a mean-token MLM loss; ``sum`` is Eq. 4 to the letter.
        changes: fields of the options that differ from ``options``, such as ``hardness=2.0``.

    Raises:
        ConfigError: see :func:`~capt.pretrain.contrast.info_nce.info_nce`.
    """
    options = replace(options or ContrastOptions(), **changes)
    if options.directions is not None:
        raise ConfigError("the directions of capt_loss are those of Eq. 2-4: leave out directions, or use info_nce")
    loss = info_nce(
        s, s_hat, temperature=temperature, queue=queue, symmetric=True, within_view=True, ids=ids, group=group,
        stats=stats, options=options,
    )  # fmt: skip
    return loss if options.reduction == "sum" else 2 * loss  # two anchors per sample


class CaptLoss(nn.Module):
    """:func:`capt_loss` in the form that the trainer of sentence-transformers calls.

    The data set has two columns: originals, and their other views. Every training pass fills the queue; an evaluation
    only reads it.

    Args:
        model: the SentenceTransformer.
        queue: frozen negatives from earlier steps, on the device of the model.
        temperature: ``tau``.
        options: more keywords of :func:`capt_loss`.
    """

    def __init__(
        self, model: nn.Module, queue: ShardedQueue | None = None, *, temperature: float = 0.05, **options: Any
    ) -> None:
        super().__init__()
        self.model, self.queue = model, queue
        self.temperature, self.options = temperature, options

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Float[Tensor, ""]:
        """The loss of a batch; ``labels`` are not read.

        Raises:
            ConfigError: a data set of more or fewer than two columns of texts.
        """
        columns = list(sentence_features)
        if len(columns) != 2:
            raise ConfigError(f"CaptLoss needs a data set of two columns of texts, this one has {len(columns)}")
        s, s_hat = (normalize(self.model(column)["sentence_embedding"], dim=-1) for column in columns)
        loss = capt_loss(s, s_hat, self.queue, temperature=self.temperature, **self.options)
        if self.queue is not None and loss.requires_grad:
            self.queue.enqueue(s, s_hat)
        return loss

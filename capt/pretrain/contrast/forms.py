r"""Forms: the softmaxes that a loss consists of, who is an anchor in them and which live keys it sees.

Let a batch be pairs of a query :math:`q_i` and a document :math:`d_i`, and :math:`h_k` hard negatives, which are
documents too. Four **directions** name the cosines of a batch, anchor first:

- ``q-d``: the query against all documents and hard negatives. It contains the positive, and every form has it.
- ``q-q``: the query against the other queries.
- ``d-q``: the document against all queries.
- ``d-d``: the document against the other documents, and the hard negatives of others.

With :math:`S_i^{ab}` the sum of :math:`e^{\cos / \tau}` over the keys of direction ``a-b``, a **joint** partition has
one softmax a pair, of which both the query and the document are anchors, and a partition **per direction** one for each
direction, of which the loss is the mean:

.. math::
    L_i = -\log \frac{e^{q_i \cdot d_i / \tau}}{\sum_{ab} S_i^{ab}}, \qquad\qquad
    L_i = -\frac{1}{2} \left[ \log \frac{e^{q_i \cdot d_i / \tau}}{S_i^{qd}} +
    \log \frac{e^{q_i \cdot d_i / \tau}}{S_i^{dq}} \right].

The positive is in :math:`S^{qd}` and in :math:`S^{dq}`, so a joint form with both counts it twice, as its authors do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from capt.pretrain.contrast.options import ContrastOptions, Direction


@dataclass(frozen=True)
class Span:
    """Rows by the place of the first, the place after the last, and the step from one to the next.

    Numbers and no slice: a compiler takes the bounds of a stored slice for constants, and would compile for each number
    of rows.
    """

    first: int
    stop: int
    step: int = 1

    @property
    def index(self) -> slice:
        """The rows as an index."""
        return slice(self.first, self.stop, self.step)


@dataclass(frozen=True)
class Interaction:
    r"""The anchors of one side against some live keys of a rank.

    Attributes:
        side: the place of the anchors' side in the softmax.
        keys: the place of the keys among the rank's live keys.
        owned: None: all of these anchors see all of these keys; True: an anchor sees its own hard negatives alone;
            False: those of others alone.
        hardness: :math:`\alpha` of these keys; their logits are :math:`c_{ij} / \tau + \alpha c_{ij}`.
    """

    side: int
    keys: Span
    owned: bool | None = None
    hardness: float = 0.0


@dataclass(frozen=True)
class Softmax:
    """A softmax over pairs of rows: its anchors, and the keys that they see.

    Attributes:
        sides: of each side the views whose rows are anchors, one view after the other. Row ``i`` of all sides shares
            one denominator.
        positives: views, one after another; row ``i`` is the positive of row ``i`` of the first side.
        keys: the live keys of this rank: views, one after another.
        keys_are_queries: of each of these views; the others are of documents.
        hard: the hard negatives of this rank, which are after them; None: there are none.
        interactions: which side sees which of these keys.
        queue_step: every anchor sees the queue (1), or every second one, the queries (2), or none (0).
        positive_count: how often the positive is in the denominator.
    """

    sides: list[list[Tensor]]
    positives: list[Tensor]
    keys: list[Tensor]
    keys_are_queries: list[bool]
    hard: Tensor | None
    interactions: list[Interaction]
    queue_step: int = 1
    positive_count: int = 1


def softmaxes(
    q: Tensor,
    d: Tensor,
    hard: Tensor | None,
    *,
    options: ContrastOptions,
    owned: bool = False,
    symmetric: bool = False,
    within_view: bool = False,
    across_views: bool = True,
) -> list[Softmax]:
    """The softmaxes of a loss of ``n`` pairs ``(q, d)`` on this rank.

    Args:
        q: ``(n, d)``, the queries.
        d: ``(n, d)``, the documents.
        hard: ``(k, d)``, hard negatives of this rank.
        options: the form, and which keys weigh more.
        owned: whether it is known whose hard negative each is.
        symmetric: without a form: documents are anchors, too.
        within_view: without a form: the rows of the anchor's own view are negatives, too.
        across_views: without a form: those of the other view are; else the own view's alone.
    """
    form = options.form
    if form is None:  # the CAPT paper's form: each row against the other view, or both, of all other samples
        if symmetric and within_view and across_views:
            views = [([q, d], [d, q], [True, False])]
        else:
            # The anchor's own view, and whether it is that of the queries.
            pairs = [(q, d, True), (d, q, False)] if symmetric else [(q, d, True)]
            views = [
                ([own], [other], [is_query] * within_view + [not is_query] * across_views)
                for own, other, is_query in pairs
            ]
        return [
            _one_sided(sides, positives, [q if each else d for each in of_queries], of_queries, hard, options, owned)
            for sides, positives, of_queries in views
        ]
    if options.in_batch == "none":  # hard negatives of the query and the queue are left
        return [_one_sided([q], [d], [], [], hard, options, owned)]
    if form.partition == "joint":
        return [_joint(q, d, hard, form.directions, options, owned)]
    # The direction d-q: hard negatives and the queue are documents, and its keys are queries.
    reverse = Softmax([[d]], [q], [q], [True], None, [Interaction(0, Span(0, len(q)))], queue_step=0)
    return [
        _joint(q, d, hard, (direction,), options, owned) if direction == "q-d" else reverse
        for direction in form.directions
    ]


def _one_sided(
    anchors: list[Tensor],
    positives: list[Tensor],
    live: list[Tensor],
    of_queries: list[bool],
    hard: Tensor | None,
    options: ContrastOptions,
    owned: bool,
) -> Softmax:
    """Each anchor against all of ``live`` and the hard negatives: the forms of one side.

    ``of_queries`` says of each view of ``live`` whether it is of queries.
    """
    live, of_queries = (live, of_queries) if options.in_batch != "none" else ([], [])
    *views, negatives = _places([*live, hard])
    interactions = [Interaction(0, Span(0, negatives.first), None, options.hardness_in_batch)] if views else []
    if hard is not None:
        interactions += _hard_negatives(negatives, options, owned)
    return Softmax([anchors], positives, live, of_queries, hard, _merged(interactions))


def _joint(
    q: Tensor, d: Tensor, hard: Tensor | None, directions: Sequence[Direction], options: ContrastOptions, owned: bool
) -> Softmax:
    """All ``directions`` in one softmax. The query is the first side and the document, where it is an anchor, another.

    Hardness is a matter of the direction q-d, as in the papers that it is from.
    """
    queries_are_keys = any(direction.endswith("-q") for direction in directions)
    keys = [q, d] if queries_are_keys else [d]
    *views, negatives = _places([*keys, hard])
    interactions: list[Interaction] = []
    for direction in directions:
        # Where queries are keys they are the first view; documents are always the last.
        side, seen = "qd".index(direction[0]), views[0] if direction.endswith("-q") else views[-1]
        in_batch = options.hardness_in_batch if direction == "q-d" else 0.0
        interactions.append(Interaction(side, seen, None, in_batch))
        if hard is not None and direction == "q-d":
            interactions += _hard_negatives(negatives, options, owned)
        elif hard is not None and direction == "d-d" and options.sees_all_hard_negatives:
            interactions.append(Interaction(side, negatives, False))
    # Without d-d the queue, which holds documents, is seen by the queries alone: every second row.
    two_sided = any(direction.startswith("d-") for direction in directions)
    return Softmax(
        [[q], [d]] if two_sided else [[q]],
        [d],
        keys,
        [True, False] if queries_are_keys else [False],
        hard,
        _merged(interactions),
        queue_step=2 if two_sided and "d-d" not in directions else 1,
        positive_count=2 if "d-q" in directions else 1,
    )


def _hard_negatives(keys: Span, options: ContrastOptions, owned: bool) -> list[Interaction]:
    """The first side against hard negatives: those of others are as any row of the batch, the own ones may weigh more.

    Hard negatives without an owner are those of others.
    """
    in_batch, own = options.hardness_in_batch, options.hardness_own
    if not owned:
        return [Interaction(0, keys, None, in_batch)]
    if not options.sees_all_hard_negatives:
        return [Interaction(0, keys, True, own)]
    if in_batch == own:
        return [Interaction(0, keys, None, own)]
    return [Interaction(0, keys, False, in_batch), Interaction(0, keys, True, own)]


def _places(parts: Sequence[Tensor | None]) -> list[Span]:
    """The place of the rows of each part when the parts are one after another."""
    places, start = [], 0
    for part in parts:
        stop = start if part is None else start + len(part)
        places.append(Span(start, stop))
        start = stop
    return places


def _merged(interactions: list[Interaction]) -> list[Interaction]:
    """Interactions that differ in nothing but adjacent keys as one, for fewer and larger products."""
    out: list[Interaction] = []
    for each in sorted(interactions, key=lambda each: (each.side, each.keys.first)):
        last = out.pop() if out else each
        # Keys with an owner stay apart: merged, an anchor would see what the one or the other leaves out.
        alike = (last.side, last.hardness) == (each.side, each.hardness) and last.owned is each.owned is None
        if last is not each and alike and last.keys.stop == each.keys.first:
            out.append(replace(last, keys=Span(last.keys.first, each.keys.stop)))
        else:
            out += [each] if last is each else [last, each]
    return out

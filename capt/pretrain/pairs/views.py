"""The vectors of the pairs of a step with what is known of them, and the parts of them that have one loss together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from capt.pretrain.config.base import Section
from capt.pretrain.contrastive.views import Views, starts_of
from capt.pretrain.pairs.batches import PairBatch
from capt.pretrain.pairs.distillation_config import PairDistillation
from capt.pretrain.pairs.sources import SourceRows


class Part(NamedTuple):
    """Rows of a step that have one loss together.

    Attributes:
        loss: the name of what is computed of them (`capt.pretrain.pairs.losses`).
        share: how many of the rows of the whole step they are, from 0 to 1.
        sources: the numbers of their sources.
        own_alone: a query is compared with its own hard negatives alone.
        temperature: of their sources; None: that of the step, or one of each row.
        taught: the share of the rows whose documents a teacher has scored.
        settings: of the loss (`PairLoss.options`).
    """

    loss: str
    share: float
    sources: tuple[int, ...]
    own_alone: bool = False
    temperature: float | None = None
    taught: float = 0.0
    settings: Section = Section()


def parts_of(sources: Sequence[SourceRows], step_rows: Sequence[int]) -> tuple[Part, ...]:
    """The parts of a step that has ``step_rows`` rows of each source.

    All sources whose queries see the other pairs of the step are one part, and so are those whose queries see their own
    negatives alone. A scored source is a part of its own, for scores of different sources do not compare.
    """
    total = sum(step_rows)
    groups: dict[tuple[str, bool, int, str], list[int]] = {}
    for number, rows in enumerate(step_rows):
        if rows:
            loss, in_batch = sources[number].loss_name, sources[number].source.in_batch
            options = repr(sorted(sources[number].source.loss_options.items()))
            # -1: sources of a contrast with the same options are one part; others are told apart by their number.
            name = (
                (loss, not in_batch, -1, options) if sources[number].loss.contrasts else (loss, False, number, options)
            )
            groups.setdefault(name, []).append(number)
    return tuple(
        Part(
            sources[numbers[0]].loss_name,
            sum(step_rows[number] for number in numbers) / total,
            tuple(numbers),
            own_alone,
            sources[numbers[0]].source.temperature if len(numbers) == 1 else None,
            sum(step_rows[number] for number in numbers if sources[number].has_teacher) / total,
            sources[numbers[0]].loss.options.model_validate(sources[numbers[0]].source.loss_options),
        )
        for (_, own_alone, _, _), numbers in groups.items()
    )


@dataclass(frozen=True)
class PairViews(Views):
    """Queries ``s`` and their positives ``s_hat``, with hard negatives and what is known of them.

    ``ids`` are keys of the positives.

    Attributes:
        negatives: unit rows, the hard negatives of the queries, any number; None where no source has any.
        negative_ids: key of each of them.
        owners: query of each of them.
        parts: what is computed of which rows.
        sources: number of the source of each row; read where there are several parts.
        temperatures: one for each row, in batches of several sources with temperatures of their own; else None.
        scores: similarity of query and positive.
        teacher: a teacher's score of each positive, nan where there is none.
        negative_teacher: the same of each negative.
        query_ids: key of each query.
        known: keys of a query and a document that belong together beside those of a pair; None: there are none.
        texts: unit rows of all texts (queries, documents, negatives), where a loss compares them with one another.
        taught: vectors of the same texts in the teacher's space.
        teacher_vectors: the teacher's vectors of the same texts.
    """

    negatives: Float[Tensor, "m d"] | None = None
    negative_ids: Int[Tensor, " m"] | None = None
    owners: Int[Tensor, " m"] | None = None
    parts: tuple[Part, ...] = (Part("contrast", 1.0, (0,)),)
    sources: Int[Tensor, " n"] | None = None
    temperatures: Float[Tensor, " n"] | None = None
    scores: Float[Tensor, " n"] | None = None
    teacher: Float[Tensor, " n"] | None = None
    negative_teacher: Float[Tensor, " m"] | None = None
    query_ids: Int[Tensor, " n"] | None = None
    known: Int[Tensor, "p 2"] | None = None
    texts: Float[Tensor, "t d"] | None = None
    taught: Float[Tensor, "t e"] | None = None
    teacher_vectors: Float[Tensor, "t e"] | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that get gradients: ``s``, ``s_hat``, those of `_MORE`, a learned temperature as a row."""
        s, s_hat, *learned = super().tensors()
        more = (getattr(self, name) for name in _MORE)
        return s, s_hat, *(rows for rows in more if rows is not None), *learned

    @classmethod
    def joined(cls, views: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """The views of all samples; see `Views.joined`."""
        s, s_hat, *rest = tensors
        # The order of `tensors`: these come before a learned temperature.
        together: dict[str, Any] = {
            name: rest.pop(0) if getattr(views[0], name) is not None else None for name in _MORE
        }
        whole = super().joined(views, [s, s_hat, *rest])
        for name in (
            "negative_ids", "sources", "temperatures", "scores", "teacher", "negative_teacher", "query_ids",
            "teacher_vectors",
        ):  # fmt: skip
            values = [getattr(each, name) for each in views]
            together[name] = None if values[0] is None else torch.cat(values)
        # Owners count within their own micro-batch, and are shifted to the rows of all.
        owners = None
        if views[0].owners is not None:
            owners = torch.cat([
                each.owners + start for each, start in zip(views, starts_of(views), strict=True)
                if each.owners is not None
            ])  # fmt: skip
        # What is known of the queries is the same for all micro-batches of a step.
        known, parts = views[0].known, views[0].parts
        return replace(whole, owners=owners, parts=parts, known=known, **together)

    def chosen(self, rows: Int[Tensor, " m"]) -> PairViews:
        """The views of some rows with their negatives."""
        # New place of each row; negatives whose query is not chosen go with it.
        place = torch.full_like(self.ids, -1)
        place[rows] = torch.arange(len(rows), device=rows.device)
        names: dict[str, Tensor] = dict.fromkeys(
            ("s", "s_hat", "ids", "query_ids", "sources", "temperatures", "scores", "teacher"), rows
        )
        # A teacher's vectors are of the texts of all parts together.
        changes: dict[str, Any] = {"texts": None, "taught": None, "teacher_vectors": None}
        if self.negatives is not None and self.owners is not None:
            mine = (place[self.owners] >= 0).nonzero()[:, 0]
            changes["owners"] = place[self.owners[mine]]
            names |= dict.fromkeys(("negatives", "negative_ids", "negative_teacher"), mine)
        for name, chosen in names.items():
            if (values := getattr(self, name)) is not None:
                changes[name] = values[chosen]
        return replace(self, **changes)

    def of(self, part: Part) -> PairViews:
        """The views of a part of the rows."""
        assert self.sources is not None
        return self.chosen(torch.isin(self.sources, self.sources.new_tensor(part.sources)).nonzero()[:, 0])


_MORE = ("negatives", "texts", "taught")
"""The tensors of `PairViews` that get gradients and are not always there."""


def batch_views(
    batch: PairBatch, rows: Tensor, taught_rows: Tensor | None, temperature: float | Tensor,
    sources: Sequence[SourceRows], distillation: PairDistillation,
) -> PairViews:  # fmt: skip
    """Return the views of a micro-batch.

    Args:
        batch: the micro-batch.
        rows: the vectors of its texts, in their order.
        taught_rows: those in the teacher's space, where a loss reads them.
        temperature: of the step.
        sources: of the job.
        distillation: its section of the job.
    """
    n, device = len(batch.ids), rows.device
    # A text alone is encoded once, and nothing compares it with another view.
    s, documents = rows[:n], rows if batch.is_alone else rows[n:]
    parts = parts_of(sources, batch.step_rows)
    used = [pairs for pairs, number in zip(sources, batch.step_rows, strict=True) if number]

    def on_device(values: Tensor) -> Tensor:
        return values.to(device, non_blocking=True)

    # One temperature, or with several sources in a batch the one of the source of each row.
    temperatures = None
    if len(used) > 1 and len({pairs.source.temperature for pairs in sources}) > 1:
        assert not isinstance(temperature, Tensor), "the job refuses a learned one beside those of sources"
        of_sources = [pairs.source.temperature or temperature for pairs in sources]
        temperatures = on_device(torch.tensor(of_sources)[batch.sources])
    scored = any(pairs.scores is not None for pairs in used)
    asked = distillation.weight > 0 or any("teacher" in pairs.loss.needs for pairs in used)
    taught = asked and any(pairs.has_teacher for pairs in used)
    return PairViews(
        s, documents[:n], on_device(batch.keys), temperature,
        negatives=documents[n:] if any(pairs.source.negatives for pairs in used) else None,
        negative_ids=on_device(batch.negative_keys),
        owners=on_device(batch.owners),
        parts=parts,
        sources=on_device(batch.sources) if len(parts) > 1 else None,
        temperatures=temperatures,
        scores=on_device(batch.scores) if scored else None,
        teacher=on_device(batch.teacher) if taught else None,
        negative_teacher=on_device(batch.negative_teacher) if taught else None,
        query_ids=on_device(batch.query_keys) if len(batch.known) else None,
        known=on_device(batch.known) if len(batch.known) else None,
        texts=rows if distillation.listwise else None,
        taught=taught_rows,
        teacher_vectors=None if distillation.vectors is None else on_device(batch.teacher_vectors),
    )  # fmt: skip

"""Batches of pairs: which rows a step has, what of them each rank takes, and the tokens of their texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from capt.pretrain.data.corruption import IGNORE
from capt.pretrain.data.sampler import BlockMixtureSampler, Sampler, micro_batches
from capt.pretrain.pairs.division import by_length, divided, within_budget
from capt.pretrain.pairs.draws import Drawn, Noise, Tokens, draw
from capt.pretrain.pairs.known import Candidates, Compared, Pairs, candidates, known_pairs, of_several_documents
from capt.pretrain.pairs.sources import SourceRows, Teacher
from capt.pretrain.pairs.texts import GroupedTexts, MaskedTexts, groups_by_length, padded_rows


@dataclass(frozen=True)
class PairBatch:
    """A micro-batch: ``n`` queries, their positives, and ``k`` hard negatives.

    Attributes:
        tokens: ids of all texts, one after another: queries, positives, negatives.
        lengths: tokens of each text.
        ids: row of each query, counted over all sources.
        keys: key of the positive of each query; a document of the same key is not a negative of the query.
        query_keys: key of each query.
        negative_keys: key of each negative.
        owners: place of the query in this micro-batch whose negative each is.
        contents: a digest of all texts of each row.
        sources: number of the source of each row.
        scores: similarity of query and positive; nan in rows without a score.
        teacher: a teacher's score of each positive; nan where there is none.
        negative_teacher: the same of each negative.
        masked: ids of corrupted texts, one after another; none without the masked-language-model loss.
        masked_lengths: tokens of each of them.
        labels: what each of their tokens was where it is to be predicted, else -100.
        step_rows: rows of each source in the whole step, on all ranks.
        step_tokens: tokens of the whole step, on all ranks, padding not counted.
        known: keys of a query and a document that belong together, of the queries of the whole step that have several.
        candidates: what the queries of the whole step are compared with.
        teacher_vectors: a teacher's vector of each text, in the order of ``tokens``; no columns without a teacher.
    """

    tokens: Int[Tensor, " total"]
    lengths: Int[Tensor, " texts"]
    ids: Int[Tensor, " n"]
    keys: Int[Tensor, " n"]
    query_keys: Int[Tensor, " n"]
    negative_keys: Int[Tensor, " k"]
    owners: Int[Tensor, " k"]
    contents: Int[Tensor, " n"]
    sources: Int[Tensor, " n"]
    scores: Float[Tensor, " n"]
    teacher: Float[Tensor, " n"]
    negative_teacher: Float[Tensor, " k"]
    masked: Int[Tensor, " masked"]
    masked_lengths: Int[Tensor, " corrupted"]
    labels: Int[Tensor, " masked"]
    step_rows: tuple[int, ...]
    step_tokens: int
    known: Int[Tensor, "p 2"]
    candidates: Candidates
    teacher_vectors: Float[Tensor, "texts e"]

    @property
    def is_alone(self) -> bool:
        """True where texts have no document beside them: a teacher's vectors alone train them."""
        return len(self.lengths) == len(self.ids)

    def texts(self, pad_id: int, device: torch.device, *, by_length: bool) -> GroupedTexts:
        """The queries, the positives and the negatives on ``device``.

        ``by_length``: in groups of texts of similar length, while that saves padding; else queries and documents, a
        group each.
        """
        n, texts = len(self.ids), self.tokens.split(self.lengths.tolist())
        groups = (
            groups_by_length(self.lengths)
            if by_length
            else [each for each in torch.arange(len(texts)).split([n, len(texts) - n]) if len(each)]
        )
        return GroupedTexts(
            [
                padded_rows(torch.cat([texts[i] for i in group.tolist()]), self.lengths[group], pad_id, device)
                for group in groups
            ],
            # The inverse permutation: place `i` says in which row of the groups text `i` lies.
            torch.cat(groups).argsort().to(device, non_blocking=True),
        )

    def masked_texts(self, pad_id: int, device: torch.device) -> MaskedTexts | None:
        """The corrupted texts on ``device``; None without the masked-language-model loss."""
        if not len(self.masked_lengths):
            return None
        texts = padded_rows(self.masked, self.masked_lengths, pad_id, device)
        labels = padded_rows(self.labels, self.masked_lengths, IGNORE, torch.device("cpu")).tokens
        chosen = labels != IGNORE
        # The chosen positions of each row come first, in their order in the text, and the rest is cut off.
        order = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True)[
            :, : max(1, int(chosen.sum(1).max()))
        ]
        return MaskedTexts(
            texts, order.to(device, non_blocking=True), labels.gather(1, order).to(device, non_blocking=True)
        )


class Step(NamedTuple):
    """The rows of a step, of all ranks: where each comes from, and what was drawn of it.

    Texts of source ``s`` that are at ``places[s]`` of the step, as ``drawn[s]`` has them. ``keys`` are those of the
    positives, ``known`` are pairs of keys of queries with several documents. ``lengths`` are the tokens of all texts of
    a row; ``shapes`` are those of its query, those of its longest document, and how many documents it has.
    """

    ids: Int64[np.ndarray, " n"]
    visits: Int64[np.ndarray, " n"]
    sources: Int64[np.ndarray, " n"]
    places: dict[int, Int64[np.ndarray, " _"]]
    drawn: dict[int, Drawn]
    keys: Int64[np.ndarray, " n"]
    query_keys: Int64[np.ndarray, " n"]
    negative_keys: Int64[np.ndarray, " k"]
    owners: Int64[np.ndarray, " k"]
    known: Pairs
    candidates: Candidates
    lengths: Int64[np.ndarray, " n"]
    shapes: Int64[np.ndarray, "n 3"]


class PairAssembler:
    """Makes this rank's micro-batches of the step that begins at any sample; a pure function of its arguments.

    Args:
        sources: rows of each source.
        sampler: the order of the rows, numbered one source after the other.
        batch: samples of a step, over all ranks.
        parts: micro-batches of a step; with ``bucketing`` their sizes differ.
        world: number of ranks.
        rank: this one.
        seed: of the draws of positives and negatives.
        bucketing: whether micro-batches hold texts of similar length; their sizes differ then.
        budget: most tokens of a micro-batch, padding counted; the texts of a step then decide how many it has, and
            ``parts`` is not read. None: ``parts`` micro-batches.
        noise: corrupts texts of one column alone, and those of the masked-language-model loss; None: neither is asked.
        masks: whether there is that loss.
        compared: what the queries of a step are compared with.
        teacher: has vectors of all texts; None: none is asked for.
    """

    def __init__(
        self, sources: Sequence[SourceRows], sampler: Sampler | BlockMixtureSampler, *, batch: int, parts: int,
        world: int, rank: int, seed: int, bucketing: bool, budget: int | None = None, noise: Noise | None = None,
        masks: bool = False, compared: Compared | None = None, teacher: Teacher | None = None,
    ) -> None:  # fmt: skip
        self._teacher = teacher
        self._sources, self._sampler, self._compared = sources, sampler, compared or Compared()
        self._firsts = np.cumsum([0, *map(len, sources)])
        self._shape = (batch, parts, world, rank)
        self._seed, self._bucketing, self._budget = seed, bucketing, budget
        self._noise, self._masks = noise, masks

    def __call__(self, start: int, rate: float | None = None) -> list[PairBatch]:
        """The micro-batches of the step whose first sample is ``start``, corrupted at its ``rate``."""
        step = self._step(start)
        if self._budget is not None:
            return [self._batch(step, part, rate) for part in self._within(self._budget, step, start)]
        parts = [part - start for part in micro_batches(start, *self._shape)]
        if self._bucketing:
            parts = by_length(np.concatenate(parts), step.lengths, len(parts))
        return [self._batch(step, part, rate) for part in parts]

    def _within(self, budget: int, step: Step, start: int) -> list[Int64[np.ndarray, " _"]]:
        """The places of this rank's micro-batches, each within ``budget``; the same number of them on every rank."""
        batch, _, world, rank = self._shape
        # Divide for every rank, not this one alone: all agree on the number of micro-batches without asking each other.
        of_ranks = []
        for each in range(world):
            (places,) = micro_batches(start, batch, 1, world, each)
            places = places - start
            if self._bucketing:
                places = places[np.argsort(-step.lengths[places], kind="stable")]
            of_ranks.append(within_budget(places, step.shapes, budget))
        return divided(of_ranks[rank], max(map(len, of_ranks)))

    def _step(self, start: int) -> Step:
        """Assemble a step of all ranks together, from sample ``start`` on."""
        samples = np.arange(start, start + self._shape[0], dtype=np.int64)
        visits, ids = self._sampler.locate(samples)
        sources = np.searchsorted(self._firsts, ids, side="right") - 1
        # Rows of all ranks, what is drawn of them, and the lengths by which micro-batches are cut.
        query_keys, positive_keys, lengths = (np.zeros(len(ids), dtype=np.int64) for _ in range(3))
        shapes = np.ones((len(ids), 3), dtype=np.int64)
        negative_keys, owners = [], []
        places, drawn = {}, {}
        alone = self._is_alone(np.unique(sources).tolist())
        # One source at a time, for texts are numbered within their source.
        for number in np.unique(sources).tolist():
            source, here = self._sources[number], np.flatnonzero(sources == number)
            each = draw(source, ids[here] - self._firsts[number], visits[here], self._seed)
            places[number], drawn[number] = here, each
            query_keys[here] = source.queries.keys[each.queries]
            positive_keys[here] = source.documents.keys[each.positives]
            shapes[here, 0] = source.queries.lengths(each.queries)
            shapes[here, 1] = source.documents.lengths(each.positives)
            if alone:
                shapes[here, 1] = 0  # no document is encoded
            lengths[here] = shapes[here, 0] + shapes[here, 1]
            # The negatives of a row add to its tokens, may be its longest document, and count as documents.
            negatives, owned = source.documents.lengths(each.negatives), here[each.owners]
            np.add.at(lengths, owned, negatives)
            np.maximum.at(shapes[:, 1], owned, negatives)
            np.add.at(shapes[:, 2], owned, 1)
            negative_keys.append(source.documents.keys[each.negatives])
            owners.append(here[each.owners])
        hard, owned = np.concatenate(negative_keys), np.concatenate(owners)
        known = self._known(sources, query_keys, positive_keys, hard)
        counted = self._candidates(start, sources, query_keys, positive_keys, hard, owned, known)
        return Step(
            ids, visits, sources, places, drawn, positive_keys, query_keys, hard, owned, known, counted, lengths, shapes
        )

    def _is_alone(self, sources: Iterable[int]) -> bool:
        """Return whether the texts of these sources have no document that a step encodes."""
        return all(self._sources[number].is_alone for number in sources)

    def _known(
        self, sources: Int64[np.ndarray, " n"], queries: Int64[np.ndarray, " n"], positives: Int64[np.ndarray, " n"],
        hard: Int64[np.ndarray, " k"],
    ) -> Pairs:  # fmt: skip
        """Return the known pairs of a step's queries with its documents; if there is a queue, with all documents."""
        if not self._compared.masks:
            return np.zeros((0, 2), dtype=np.int64)
        contrasted = np.isin(sources, [i for i, pairs in enumerate(self._sources) if pairs.loss.contrasts])
        among = None if self._compared.queue else np.concatenate([positives, hard])
        return of_several_documents(known_pairs([pairs.known for pairs in self._sources], queries[contrasted], among))

    def _candidates(
        self, start: int, sources: Int64[np.ndarray, " n"], queries: Int64[np.ndarray, " n"],
        positives: Int64[np.ndarray, " n"], hard: Int64[np.ndarray, " k"], owners: Int64[np.ndarray, " k"],
        known: Pairs,
    ) -> Candidates:  # fmt: skip
        """Count what the queries of the contrast are compared with in a step."""
        compared, n = self._compared, len(sources)
        contrasted = np.array([pairs.loss.contrasts for pairs in self._sources])[sources]
        sees_others = np.array([pairs.source.in_batch for pairs in self._sources])[sources]
        if compared.in_batch == "none":
            sees_others[:] = False
        # Pairs of one contrast have one number; a query that sees its own negatives alone has a number of its own.
        groups = np.zeros(n, dtype=np.int64)
        if compared.in_batch == "local" or not compared.whole:
            batch, parts, world, _ = self._shape
            for rank in range(world):
                for part, samples in enumerate(
                    micro_batches(start, batch, 1 if compared.whole else parts, world, rank)
                ):
                    groups[samples - start] = part * world + (rank if compared.in_batch == "local" else 0)
        groups = np.where(sees_others, groups, n * (1 + groups.max(initial=0)) + np.arange(n))
        number = np.cumsum(contrasted) - 1
        mine = contrasted[owners]
        owned = number[owners[mine]]
        is_own = compared.own_hard | ~sees_others[owners[mine]]
        _, groups = np.unique(groups[contrasted], return_inverse=True)
        return candidates(
            groups, queries[contrasted], positives[contrasted], hard[mine], owned, is_own, known, masks=compared.masks
        )

    def _batch(self, step: Step, part: Int64[np.ndarray, " m"], rate: float | None) -> PairBatch:
        """The micro-batch of the samples at the places ``part`` of a step."""
        n = len(part)
        # Place of each row of the step in this micro-batch; -1 where it is not of it.
        place = np.full(len(step.ids), -1)
        place[part] = np.arange(n)
        queries: Tokens = [_NONE] * n
        positives: Tokens = [_NONE] * n
        scores, teacher = np.full((2, n), np.nan, dtype=np.float32)
        alone, width = self._is_alone(step.places), 0 if self._teacher is None else self._teacher.dimension
        taught = np.zeros((2, n, width), dtype=np.float32)
        negative_taught: list[np.ndarray] = []
        negatives: Tokens = []
        negative_teacher: list[np.ndarray] = []
        masked: list[tuple[int, np.ndarray, np.ndarray]] = []
        for number, here in step.places.items():
            source, each = self._sources[number], step.drawn[number]
            mine = np.flatnonzero(place[here] >= 0)
            at = place[here[mine]].tolist()
            rows = step.ids[here[mine]] - self._firsts[number]
            visits = step.visits[here[mine]]
            first, documents, labels = self._views(source, each, mine, rows, visits, rate)
            for i, query, document in zip(at, first, documents, strict=True):
                queries[i], positives[i] = query, document
            if self._masks:
                view = (documents, labels)
                masked += self._corrupted(source, each, mine, at, view, rows, visits, rate)
            if source.scores is not None:
                scores[at] = source.scores[rows]
            # Negatives come source by source here, and are put in the order of their queries below.
            owned = np.flatnonzero(place[here[each.owners]] >= 0)
            negatives += source.documents.tokens(each.negatives[owned])
            if self._teacher is not None:
                taught[0, at] = source.vectors(self._teacher, "query", each.queries[mine])
                if not alone:
                    taught[1, at] = source.vectors(self._teacher, "document", each.positives[mine])
                negative_taught.append(source.vectors(self._teacher, "document", each.negatives[owned]))
            if source.has_teacher and source.positive_scores is not None and source.negative_scores is not None:
                teacher[at] = source.positive_scores[each.positive_places[mine]]
                negative_teacher.append(source.negative_scores[each.negative_places[owned]])
            else:
                negative_teacher.append(np.full(len(owned), np.nan, dtype=np.float32))
        owned = np.flatnonzero(place[step.owners] >= 0)  # in the order of the sources, as `negatives`
        order = np.argsort(place[step.owners[owned]], kind="stable")
        owners = place[step.owners[owned]][order]
        texts = [*queries, *(() if alone else positives), *(negatives[i] for i in order.tolist())]
        vectors = [*taught[: 1 if alone else 2], *(np.concatenate(negative_taught)[order] for _ in negative_taught[:1])]
        # Stable, so that of each row the query stays before the document.
        masked.sort(key=lambda each: each[0])
        return PairBatch(
            tokens=torch.from_numpy(np.concatenate(texts)),
            lengths=torch.tensor([len(text) for text in texts]),
            ids=torch.from_numpy(step.ids[part]),
            keys=torch.from_numpy(step.keys[part]),
            query_keys=torch.from_numpy(step.query_keys[part]),
            negative_keys=torch.from_numpy(step.negative_keys[owned][order]),
            owners=torch.from_numpy(owners),
            contents=torch.from_numpy(_digests(texts, n, owners)),
            sources=torch.from_numpy(step.sources[part]),
            scores=torch.from_numpy(scores),
            teacher=torch.from_numpy(teacher),
            # `negatives`, `owned` and these scores are in the order of the sources, so one permutation serves all.
            negative_teacher=torch.from_numpy(np.concatenate(negative_teacher)[order]),
            masked=torch.from_numpy(np.concatenate([_NONE, *(tokens for _, tokens, _ in masked)])),
            masked_lengths=torch.tensor([len(tokens) for _, tokens, _ in masked], dtype=torch.int64),
            labels=torch.from_numpy(np.concatenate([_NONE, *(labels for _, _, labels in masked)])),
            step_rows=tuple(np.bincount(step.sources, minlength=len(self._sources)).tolist()),
            step_tokens=int(step.lengths.sum()),
            known=torch.from_numpy(step.known),
            candidates=step.candidates,
            teacher_vectors=torch.from_numpy(
                np.concatenate(vectors) if width else np.zeros((len(texts), 0), np.float32)
            ),
        )

    def _views(
        self, source: SourceRows, each: Drawn, mine: Int64[np.ndarray, " n"], rows: Int64[np.ndarray, " n"],
        visits: Int64[np.ndarray, " n"], rate: float | None,
    ) -> tuple[Tokens, Tokens, Tokens]:  # fmt: skip
        """The queries and documents of some rows, and labels of the documents where these are corruptions."""
        if source.draw is not None:
            return *source.spans(each.queries[mine], rows, visits, self._seed), []
        queries, numbers = source.queries.tokens(each.queries[mine]), each.positives[mine]
        if not source.view.corrupts or self._noise is None:
            return queries, source.documents.tokens(numbers), []
        return queries, *self._noise(source.source.name, "view", source.documents, numbers, rows, visits, rate)

    def _corrupted(
        self, source: SourceRows, each: Drawn, mine: Int64[np.ndarray, " n"], at: list[int],
        view: tuple[Tokens, Tokens], rows: Int64[np.ndarray, " n"], visits: Int64[np.ndarray, " n"],
        rate: float | None,
    ) -> list[tuple[int, np.ndarray, np.ndarray]]:  # fmt: skip
        """The corrupted texts of some rows at the places ``at``: of a corrupted view that view, else both texts."""
        assert self._noise is not None
        # The corrupted view serves both losses; it is not corrupted again.
        if view[1]:
            return list(zip(at, *view, strict=True))
        found: list[tuple[int, np.ndarray, np.ndarray]] = []
        sides = [("query", source.queries, each.queries[mine]), ("document", source.documents, each.positives[mine])]
        for side, texts, numbers in sides[: 1 if source.is_one_column else 2]:
            found += zip(at, *self._noise(source.source.name, side, texts, numbers, rows, visits, rate), strict=True)
        return found


_NONE = np.zeros(0, dtype=np.int32)


def _digests(texts: Sequence[np.ndarray], n: int, owners: Int64[np.ndarray, " k"]) -> Int64[np.ndarray, " n"]:
    """A digest of the tokens of each row, which does not depend on how its micro-batch was padded."""
    others = texts[n : 2 * n] or [_NONE] * n
    hashes = [
        hashlib.blake2b(text.tobytes() + other.tobytes(), digest_size=8)
        for text, other in zip(texts[:n], others, strict=True)
    ]
    # Negatives change from visit to visit, and are part of what the row is.
    for text, owner in zip(texts[2 * n :], owners.tolist(), strict=True):
        hashes[owner].update(text.tobytes())
    return np.array([int.from_bytes(each.digest(), "little", signed=True) for each in hashes], dtype=np.int64)

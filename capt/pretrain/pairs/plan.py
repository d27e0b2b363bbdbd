"""A ``capt_pairs`` job without its pairs, for ``capt plan``: its encoder's sizes, and a batch of its shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from capt.pretrain.contrastive.task import ContrastTask
from capt.pretrain.data.views import drawn_lengths, find_view
from capt.pretrain.language.load import encoder_tokenizer
from capt.pretrain.language.plan import described_encoder, rehearsed_encoder
from capt.pretrain.pairs.batches import PairBatch
from capt.pretrain.pairs.config import PairJob
from capt.pretrain.pairs.known import Candidates
from capt.pretrain.pairs.load import with_own_length
from capt.pretrain.pairs.losses import NO_LOSS
from capt.pretrain.pairs.module import PairModule
from capt.pretrain.pairs.representations import module_of, similarity_of
from capt.pretrain.pairs.sources import EncodedTexts, Lists, SourceRows, longest_behind
from capt.pretrain.pairs.task import PairTask
from capt.pretrain.pairs.texts import GroupedTexts, MaskedTexts, PaddedTexts
from capt.pretrain.pairs.views import PairViews
from capt.pretrain.plan.rehearsal import TEMPERATURE, Rehearsal, leaf_rows
from capt.tokenizer.encode import require_short_prompt

_LENGTH = 128
"""Tokens of a text where neither the job says how many nor the encoder is here."""


class _Shape(NamedTuple):
    """Tokens of a query and of a document, and the hard negatives of a query: the most that any source asks for.

    ``is_alone``: a text is taken for one that a teacher's vector alone trains, and has no document.
    """

    query: int
    document: int
    negatives: int
    is_alone: bool = False


@dataclass(frozen=True)
class _Batch(PairBatch):
    """A micro-batch whose texts all differ and are as long as they may be."""

    shape: _Shape
    predicted: int

    @classmethod
    def of(cls, n: int, shape: _Shape, predicted: int, step_tokens: int, batch: int, width: int) -> _Batch:
        """A batch of ``n`` queries of one source; ``predicted`` tokens of queries and documents are masked.

        A teacher's vector of each text has ``width`` columns.
        """
        texts = n * (1 if shape.is_alone else 2 + shape.negatives)
        ids, none, no_score = torch.arange(n), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        labels = torch.zeros(2 * n * predicted, dtype=torch.int64)
        return cls(
            tokens=none, lengths=none, ids=ids, keys=ids, query_keys=ids,
            # From 2**30 on, so that no negative has the id of a pair.
            negative_keys=torch.arange(n * shape.negatives) + (1 << 30), owners=ids.repeat_interleave(shape.negatives),
            contents=none, sources=torch.zeros_like(ids), scores=no_score, teacher=no_score, negative_teacher=no_score,
            masked=labels, masked_lengths=none, labels=labels,
            step_rows=(batch,), step_tokens=step_tokens, shape=shape, predicted=predicted,
            known=torch.zeros(0, 2, dtype=torch.int64), candidates=Candidates(),
            teacher_vectors=torch.zeros(texts, width),
        )  # fmt: skip

    @property
    def is_alone(self) -> bool:
        """True where texts have no document beside them."""
        return self.shape.is_alone

    def masked_texts(self, pad_id: int, device: torch.device) -> MaskedTexts | None:
        """Queries and documents for masked language modelling, all as long as a document."""
        if not self.predicted:
            return None
        tokens = torch.zeros(2 * len(self.ids), self.shape.document, dtype=torch.int64)
        labels = self.labels.view(-1, self.predicted)
        return MaskedTexts(PaddedTexts(tokens, False), torch.zeros_like(labels), labels)

    def texts(self, pad_id: int, device: torch.device, *, by_length: bool) -> GroupedTexts:
        """Queries, and documents with the negatives after them: all of a length, whatever ``by_length``."""
        n = len(self.ids)
        queries = torch.zeros(n, self.shape.query, dtype=torch.int64)
        if self.shape.is_alone:
            return GroupedTexts([PaddedTexts(queries, False)], torch.arange(n))
        documents = torch.zeros(n * (1 + self.shape.negatives), self.shape.document, dtype=torch.int64)
        return GroupedTexts(
            [PaddedTexts(queries, False), PaddedTexts(documents, False)], torch.arange(len(queries) + len(documents))
        )


def _longest_row(job: PairJob, shape: _Shape) -> SourceRows:
    """A source of one row whose texts are as long as they may be."""

    def texts(count: int, length: int, key: int) -> EncodedTexts:
        starts = np.arange(count + 1, dtype=np.int64) * length
        return EncodedTexts(np.zeros(count * length, np.int32), starts, np.arange(key, key + count), 0)

    source = next(job.data.each()).model_copy(update={"negatives": shape.negatives, "temperature": None})
    first = 0 if shape.is_alone else 1
    return SourceRows(
        source, texts(1, shape.query, 0), texts(1 + shape.negatives, shape.document, first), np.zeros(1, np.int64),
        Lists.of([[0]]), Lists.of([range(1, 1 + shape.negatives)]),
    )  # fmt: skip


class RehearsedTask(PairTask):
    """The task over no pairs, on tensors without data."""

    def __init__(
        self, job: PairJob, hf_config: dict[str, Any], tokens_of: Callable[[str], int], *, is_here: bool
    ) -> None:
        with torch.device("meta"):
            encoder = rehearsed_encoder(hf_config, job.model)
        if is_here:
            job = with_own_length(job, encoder.max_positions)
        # Not `PairTask.__init__`, which loads the encoder and reads the pairs.
        ContrastTask.__init__(self, job)
        self._hf_config = hf_config
        self._backbone: Any = SimpleNamespace(encoder=encoder)
        self._pooling = "mean" if job.model.pooling == "auto" else job.model.pooling
        self.similarity = similarity_of(job)
        self._width = job.contrast.columns(module_of(job).width_of(job, encoder))
        self.teacher = None
        self.shape = _longest(job, tokens_of, encoder.max_positions)
        self.sources = [_longest_row(job, self.shape)]

    def build_module(self) -> PairModule:
        """Build an encoder of these sizes under its pooling."""
        module: PairModule = module_of(self.job)(
            self.job, rehearsed_encoder(self._hf_config, self.job.model), self._pooling
        )
        return module

    def contrasted_views(self, count: int, width: int) -> PairViews:
        """Return vectors of ``count`` pairs, as leaves, to contrast alone."""
        ids, k = torch.arange(count), self.shape.negatives
        return PairViews(
            leaf_rows(count, width), leaf_rows(count, width), ids, TEMPERATURE,
            negatives=leaf_rows(count * k, width) if k else None,
            negative_ids=torch.arange(count * k) + (1 << 30), owners=ids.repeat_interleave(k),
        )  # fmt: skip


def rehearse(job: PairJob, world: int) -> Rehearsal:
    """Return the task, and a micro-batch of this rank in which every text is as long as it may be.

    Raises:
        ConfigError: the job names no pairs, or a text with its prompt is longer than the encoder's positions.
    """
    hf_config, tokens_of, assumed = _encoder(job)
    task = RehearsedTask(job, hf_config, tokens_of, is_here=not assumed)
    shape, n = task.shape, job.micro_batch(world)
    masked = round(job.corruption.highest_rate * shape.document) if job.mlm.weight else 0
    documents = 0 if shape.is_alone else (1 + shape.negatives) * shape.document
    tokens = job.batch.global_ * (shape.query + documents)
    # Without the vectors themselves they are taken to be as wide as the student's.
    width = task.width if job.distillation.vectors is not None else 0
    if width:
        assumed = (*assumed, f"a teacher's vectors of {width} columns, as wide as the student's")
    lengths = f"every query of {shape.query} tokens and document of {shape.document}, the longest that the job allows"
    if job.batch.micro_tokens is not None:
        # The batch that is rehearsed has the size of batch.micro.
        assumed = (*assumed, f"micro-batches of {n} pairs (batch.micro), for batch.micro_tokens depends on the texts")
    batch = _Batch.of(n, shape, masked, tokens, job.batch.global_, width)
    return Rehearsal(task, batch, (*assumed, lengths), longest=True)


def _longest(job: PairJob, tokens_of: Callable[[str], int], positions: int) -> _Shape:
    """The longest query and document of any source, each with its prompt, and the most hard negatives."""
    lengths, sources = [], list(job.data.each())
    for each in sources:
        sides = ((each.prompts.query, each.query_length), (each.prompts.document, each.document_length))
        where = f"source {each.name}"
        for prompt, _ in sides:
            require_short_prompt(prompt, positions, where, "shorten data.prompts")
        found = [longest_behind(tokens_of(side[0]), *side, positions, where, each.own_length) for side in sides]
        # Both views are spans of the query's text, which fit into it.
        if (draw := find_view(each.view).function()) is not None and found[0] - 2 >= each.spans.shortest:
            found = [2 + max(drawn_lengths(draw, found[0] - 2, each.spans, found[0] - 2))] * 2
        lengths.append(found)
    query, document = map(max, zip(*lengths, strict=True))
    negatives = max(each.negatives for each in sources)
    is_alone = not negatives and all(each.loss == NO_LOSS for each in sources)
    return _Shape(document if is_alone else query, document, negatives, is_alone)


def _encoder(job: PairJob) -> tuple[dict[str, Any], Callable[[str], int], tuple[str, ...]]:
    """Return the encoder's ``config.json``, a count of a prompt's tokens, and what was assumed; no weight is read."""
    init, sources = job.model.init, list(job.data.each())
    asked = max(length or _LENGTH for each in sources for length in (each.query_length, each.document_length))
    prompts = [text for each in sources for text in (each.prompts.query, each.prompts.document)]
    hf_config, assumed = described_encoder(init, asked + max(map(len, prompts)))
    if not assumed:
        tokenizer = encoder_tokenizer(init)
        return hf_config, lambda text: len(tokenizer.encode_batch([text])[0]) if text else 0, ()
    if any(prompts):
        assumed = (*assumed, "a token for every four characters of a prompt")
    return hf_config, lambda text: -(-len(text) // 4), assumed

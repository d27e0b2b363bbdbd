"""A ``capt_pairs`` job without its pairs, for ``capt plan``: its encoder's sizes, and a batch of its shapes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.contrastive.task import ContrastTask
from capt.pretrain.engine.checkpoint import find_best, read_job
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.models.config import RobertaConfig
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.encoder import build_encoder
from capt.pretrain.models.foreign.families import read_description
from capt.pretrain.models.foreign.read import encoder_keys
from capt.pretrain.models.hf_config import hub_id
from capt.pretrain.models.hf_folder import is_hf
from capt.pretrain.pairs.batches import MaskedTexts, PaddedTexts
from capt.pretrain.pairs.config import PairJob
from capt.pretrain.pairs.loss import PairViews
from capt.pretrain.pairs.module import PairModule
from capt.pretrain.pairs.task import PairTask
from capt.pretrain.plan.step import TEMPERATURE, Rehearsal, leaf_rows
from capt.tokenizer.encode import load_tokenizer

_VOCABULARY = 50_265
_LENGTH = 128


class _Shape(NamedTuple):
    """Tokens of a query and of a document, and the hard negatives of a query: the most that any source asks for."""

    query: int
    document: int
    negatives: int


class _Batch(NamedTuple):
    """A micro-batch whose texts are as long as they may be; the attributes are those of a `PairBatch`."""

    ids: Tensor
    shape: _Shape
    masked: int
    step_rows: tuple[int, ...]
    step_tokens: int

    @property
    def keys(self) -> Tensor:
        """All texts differ."""
        return self.ids

    @property
    def owners(self) -> Tensor:
        """Every query has the same number of negatives."""
        return self.ids.repeat_interleave(self.shape.negatives)

    @property
    def negative_keys(self) -> Tensor:
        """Texts of their own."""
        return torch.arange(len(self.ids) * self.shape.negatives) + (1 << 30)

    @property
    def labels(self) -> Tensor:
        """One for each masked token of queries and documents."""
        return torch.zeros(2 * len(self.ids), self.masked, dtype=torch.int64)

    def masked_texts(self, pad_id: int, device: torch.device) -> MaskedTexts | None:
        """Queries and documents for masked language modelling, all as long as a document."""
        if not self.masked:
            return None
        tokens = torch.zeros(2 * len(self.ids), self.shape.document, dtype=torch.int64)
        return MaskedTexts(PaddedTexts(tokens, False), torch.zeros_like(self.labels), self.labels)

    def texts(self, pad_id: int, device: torch.device) -> tuple[PaddedTexts, PaddedTexts]:
        """Queries, and documents with the negatives behind them."""
        n = len(self.ids)
        queries = torch.zeros(n, self.shape.query, dtype=torch.int64)
        documents = torch.zeros(n * (1 + self.shape.negatives), self.shape.document, dtype=torch.int64)
        return PaddedTexts(queries, False), PaddedTexts(documents, False)


class RehearsedTask(PairTask):
    """The task over no pairs, on tensors without data."""

    def __init__(self, job: PairJob, hf_config: dict[str, Any], shape: _Shape) -> None:
        ContrastTask.__init__(self, job)
        self._hf_config, self._shape = hf_config, shape
        with torch.device("meta"):
            encoder = self._build()
        self._backbone: Any = SimpleNamespace(encoder=encoder)
        self._pooling = "mean" if job.model.pooling == "auto" else job.model.pooling
        self._width = job.model.projection or encoder.hidden_size
        self.sources: Any = [
            SimpleNamespace(
                source=SimpleNamespace(
                    temperature=None, negatives=shape.negatives, in_batch=True, weight=1.0, view="text"
                ),
                loss="contrast", scores=None, has_teacher=False, is_one_column=False, flops_shape=tuple(shape),
            )
        ]  # fmt: skip
        self._several = False

    def _build(self) -> Encoder:
        model = self.job.model
        return build_encoder(
            self._hf_config, dropout=model.dropout, attention_dropout=model.attention_dropout, source=str(model.init)
        )

    def build_module(self) -> PairModule:
        """An encoder of these sizes under its pooling."""
        return PairModule(self.job, self._build(), self._pooling)

    def contrasted_views(self, count: int, width: int) -> PairViews:
        """What is contrasted of ``count`` pairs."""
        ids, k = torch.arange(count), self._shape.negatives
        return PairViews(
            leaf_rows(count, width), leaf_rows(count, width), ids, TEMPERATURE,
            negatives=leaf_rows(count * k, width) if k else None,
            negative_ids=torch.arange(count * k) + (1 << 30), owners=ids.repeat_interleave(k),
        )  # fmt: skip


def rehearse(job: PairJob, world: int) -> Rehearsal:
    """The task, and a micro-batch of this rank in which every text is as long as it may be."""
    hf_config, assumed = _encoder(job.model.init)
    data = job.data
    sources: list[Any] = [source for source in data.sources if source.weight] or [data]
    shape = _Shape(
        max(
            getattr(each, "query_length", None) or data.query_length or data.sequence_length or _LENGTH
            for each in sources
        ),
        max(getattr(each, "document_length", None) or data.sequence_length or _LENGTH for each in sources),
        max((data.negatives if each.negatives is None else each.negatives) or 0 for each in sources),
    )
    task = RehearsedTask(job, hf_config, shape)
    n, longest = job.micro_batch(world), task._backbone.encoder.max_positions
    shape = shape._replace(query=min(shape.query, longest), document=min(shape.document, longest))
    task.sources[0].flops_shape = tuple(shape)
    masked = round(job.corruption.highest_rate * shape.document) if job.mlm.weight else 0
    tokens = job.batch.global_ * (shape.query + (1 + shape.negatives) * shape.document)
    lengths = f"every query of {shape.query} tokens and document of {shape.document}, the longest that the job allows"
    return Rehearsal(task, _Batch(torch.arange(n), shape, masked, (job.batch.global_,), tokens), (*assumed, lengths))


def _encoder(init: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The encoder's ``config.json``, and what was assumed of it; no weight is read."""
    if hub_id(init) is not None or not init.is_dir():
        base = RobertaConfig(size="base", vocab_size=_VOCABULARY)
        return base.to_hf(bos_id=0, eos_id=2), (
            f"the sizes of RoBERTa-base, for model.init {init} is not on this host",
        )
    if is_hf(init):
        return encoder_keys(read_description(init)[0]), ()
    checkpoint = find_best(init)
    job = read_job(checkpoint)
    keys = job.encoder_config()
    if isinstance(job, LanguageJob):
        tokenizer = load_tokenizer(checkpoint / "tokenizer")
        config = job.model.for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
        keys = config.to_hf(bos_id=tokenizer.special.bos, eos_id=tokenizer.special.eos)
    if keys is None:
        raise ConfigError(f"model.init {init}: a checkpoint of task {job.task.type}, which has no text encoder")
    return encoder_keys(keys), ()

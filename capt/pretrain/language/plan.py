"""A ``capt_language`` job without its text, for ``capt plan``: its sizes, and a batch of its shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch

from capt.pretrain.base import distributed
from capt.pretrain.bottleneck.texts import TextSizes
from capt.pretrain.contrastive.task import ContrastTask, Scales
from capt.pretrain.data.config import DataConfig
from capt.pretrain.data.corruption import label_slots
from capt.pretrain.data.views import drawn_lengths
from capt.pretrain.language.batches import MULTIPLE, LanguageBatch
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.language.load import encoder_description
from capt.pretrain.language.task import LanguageTask
from capt.pretrain.models.architecture import EncoderConfig
from capt.pretrain.models.config import RobertaConfig
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.encoder import build_encoder
from capt.pretrain.models.hf_config import hub_id
from capt.pretrain.models.hf_folder import read_description
from capt.pretrain.plan.rehearsal import Rehearsal
from capt.tokenizer.encode import load_tokenizer

VOCABULARY = 50_265
"""Ids of RoBERTa's tokenizer, taken where the job's own is not here yet."""


class RehearsedTask(LanguageTask):
    """The task over no text, on tensors without data."""

    def __init__(self, job: LanguageJob, config: EncoderConfig, sample_tokens: int) -> None:
        ContrastTask.__init__(self, job)
        slots = label_slots(job.corruption, job.corruption.highest_rate, job.data.sequence_length)
        self._sample_tokens = sample_tokens
        whole = SimpleNamespace(tokens_seen=lambda: None)
        self.prepared: Any = SimpleNamespace(source=None, corruptor=SimpleNamespace(slots=slots), train=whole)
        self.model_config = config

    @property
    def samples(self) -> int:
        """Samples of a step, for the data are not read."""
        return self.job.batch.global_

    def scales(self, batch: list[LanguageBatch], device: torch.device) -> Scales:
        """Count masked tokens as labels, which have no values here, over all ranks."""
        here = {"mlm": sum(micro_batch.labels.numel() for micro_batch in batch), **self.bottleneck_counts(batch)}
        scales = {}
        for name, count in here.items():
            all_ = distributed.all_reduce_sum(torch.full((), count, dtype=torch.float64, device=device))
            scales[name] = distributed.world_size() * len(batch) / all_
        return scales


def rehearse(job: LanguageJob, world: int) -> Rehearsal:
    """Return the task, and a micro-batch of this rank whose rows are full documents with all masked positions.

    Rows of spans are as long as the longest of their micro-batch (`_span_lengths`).
    """
    config, assumed = _sizes(job)
    n, length, spans = job.micro_batch(world), job.data.sequence_length, _span_lengths(job.data)
    mean = length
    if spans is not None:
        length, mean = min(length, -(-max(spans) // MULTIPLE) * MULTIPLE), round(fmean(spans))
        assumed = (*assumed, f"views of {mean} tokens in the mean, {max(spans)} at most, of {_passages(job)}")
    task = RehearsedTask(job, config, mean)
    slots = task.prepared.corruptor.slots
    rows = 2 * n if job.mlm.views == "both" else n
    tokens, masked = torch.zeros(n, length, dtype=torch.int64), torch.zeros(rows, slots, dtype=torch.int64)
    documents = None
    if not job.data.cross_document_attention:
        documents = torch.zeros(n, length, dtype=torch.int64)
    texts: dict[str, Any] = {}
    if job.bottleneck.on:
        sizes = TextSizes(slots=1, texts=n, longest=length, words=n * length)
        texts = {"numbers": tokens, "words": tokens, "keys": tokens[:, 0], "sizes": sizes}
    batch = LanguageBatch(
        tokens=tokens, corrupted=tokens, positions=masked, labels=masked, ids=torch.arange(n), padded=spans is not None,
        documents=documents, runs=None if documents is None else n, **texts,
    )  # fmt: skip
    return Rehearsal(task, batch, assumed)


def _span_lengths(data: DataConfig) -> list[int] | None:
    """Lengths of some views, ``<s>`` and ``</s>`` included; None where views are windows.

    A passage is as long as ``data.passage`` allows; where that is no number, long enough for spans that fill a window.
    """
    draw, spans, room = data.views.function(), data.spans, data.sequence_length - 2
    if draw is None:
        return None
    share = max(*spans.share, *(spans.second_share or (0.0,)))
    tokens = data.passage if isinstance(data.passage, int) else max(spans.shortest, math.ceil(room / share))
    return [length + 2 for length in drawn_lengths(draw, tokens, spans, room)]


def _passages(job: LanguageJob) -> str:
    passage = job.data.passage
    return f"passages of {passage:,} tokens" if isinstance(passage, int) else f"{passage}s whose spans fill a window"


def completed(job: LanguageJob) -> LanguageJob:
    """Return the job with the sizes of the encoder of ``model.init``: of RoBERTa-base where it is not on this host.

    An encoder of another family has the sizes of the job, and the positions that the job needs.
    """
    init, model = job.model.init, job.model
    if init is None:
        return job
    if hub_id(init) is not None or not init.is_dir():
        if not isinstance(model, RobertaConfig):
            positions = max(model.max_positions, job.data.sequence_length)
            return job.model_copy(update={"model": model.model_copy(update={"max_positions": positions})})
        base = RobertaConfig(size="base", vocab_size=VOCABULARY, max_positions=max(512, job.data.sequence_length))
        # Sizes that the job names stay.
        free = [name for name in base.decided_by_init if name not in model.model_fields_set]
        sizes = {name: getattr(base, name) for name in free} | {"size": "custom"}
        return job.model_copy(update={"model": model.model_copy(update=sizes)})
    claimed, own = read_description(init)
    model = job.model.with_sizes_of(claimed.for_tokenizer(own.vocab_size, own.special.pad), str(init))
    return job.model_copy(update={"model": model.model_copy(update={"init": None})})


def _sizes(job: LanguageJob) -> tuple[EncoderConfig, tuple[str, ...]]:
    """Return the model's configuration, and what was assumed of it."""
    model, path = job.model, job.tokenizer.path
    tokenizer = load_tokenizer(path) if path is not None and path.is_dir() else None
    own = "RoBERTa-base" if isinstance(model, RobertaConfig) else "the job's model section"
    assumed = () if model.init is None else (f"the sizes of {own}, for model.init {model.init} is not on this host",)
    if model.vocab_size is not None:
        return model, assumed
    if tokenizer is not None:
        return model.for_tokenizer(tokenizer.vocab_size, model.pad_id), assumed
    if path is None and model.init is None:
        return model.for_tokenizer(job.tokenizer.vocab_size, model.pad_id), assumed
    return model.for_tokenizer(VOCABULARY, model.pad_id), (*assumed, f"a vocabulary of {VOCABULARY:,} ids")


def described_encoder(init: Path, positions: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the ``config.json`` of an encoder that other tasks start from, and what was assumed; no weight is read.

    RoBERTa-base takes the place of one that is not on this host, with the ``positions`` that the job needs.
    """
    if hub_id(init) is None and init.is_dir():
        return encoder_description(init), ()
    base = RobertaConfig(size="base", vocab_size=VOCABULARY, max_positions=max(512, positions))
    return base.to_hf(bos_id=0, eos_id=2), (f"the sizes of RoBERTa-base, for model.init {init} is not on this host",)


def rehearsed_encoder(hf_config: Mapping[str, Any], model: Any) -> Encoder:
    """Build an encoder of these sizes with the dropouts of ``model``, the section of a job of another task."""
    return build_encoder(
        hf_config, dropout=model.dropout, attention_dropout=model.attention_dropout, source=str(model.init)
    )

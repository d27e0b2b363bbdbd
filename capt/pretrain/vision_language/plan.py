"""A ``capt_vl`` job without its data, for ``capt plan``: its sizes, and a batch of its shapes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.contrastive.task import ContrastTask, Scales
from capt.pretrain.plan.rehearsal import Rehearsal
from capt.pretrain.regions.manifest import read_manifest
from capt.pretrain.vision_language.batches import VisionLanguageBatch
from capt.pretrain.vision_language.config import OBJECTIVES, VisionLanguageJob
from capt.pretrain.vision_language.task import VisionLanguageTask
from capt.tokenizer.encode import load_tokenizer

_ANSWERS = 9_500


class _Store(NamedTuple):
    """Sizes of a region store: by default of the features of bottom-up attention (Anderson et al. 2018)."""

    feature_size: int = 2048
    most_regions: int = 36
    object_classes: int = 1600
    attribute_classes: int = 400


class RehearsedTask(VisionLanguageTask):
    """The task over no data, on tensors without data."""

    def __init__(self, job: VisionLanguageJob, store: _Store) -> None:
        ContrastTask.__init__(self, job)
        words = SimpleNamespace(tokens=job.data.sequence_length)
        self.prepared: Any = SimpleNamespace(
            start=None, store=SimpleNamespace(manifest=store), train=_OnePair(record=words)
        )

    def scales(self, batch: list[VisionLanguageBatch], device: torch.device) -> Scales:
        """Exchange the counts, which have no values."""
        distributed.all_reduce_sum(torch.zeros(5, dtype=torch.float64, device=device))
        return dict.fromkeys(OBJECTIVES, torch.ones((), dtype=torch.float64, device=device))

    def _contrasted(self, batch: VisionLanguageBatch, device: torch.device) -> Tensor | None:
        """Contrast all rows: which ones match depends on values."""
        return None


class _OnePair(SimpleNamespace):
    def __len__(self) -> int:
        return 1


def rehearse(job: VisionLanguageJob, world: int) -> Rehearsal:
    """Return the task, and a micro-batch of this rank in which every sentence and picture is as long as it may be."""
    store, assumed = _store(job)
    job, more = _with_sizes(job, store)
    return Rehearsal(RehearsedTask(job, store), _batch(job, store, job.micro_batch(world)), (*assumed, *more))


def _store(job: VisionLanguageJob) -> tuple[_Store, tuple[str, ...]]:
    path = job.data.regions
    if isinstance(path, Path) and path.is_dir():
        found = read_manifest(path)
        sizes = (found.feature_size, found.most_regions, found.object_classes, found.attribute_classes)
        return _Store(*sizes), ()
    if job.data.source == "microworld":
        size = job.data.microworld.feature_size
        return _Store(feature_size=size), (f"pictures of {_Store().most_regions} regions, with 1,600 and 400 classes",)
    return _Store(), ("a region store of 36 regions a picture, 2,048 columns, 1,600 object and 400 attribute classes",)


def _with_sizes(job: VisionLanguageJob, store: _Store) -> tuple[VisionLanguageJob, tuple[str, ...]]:
    """Return the job with the sizes that its data will decide."""
    model, wants, path = job.model, job.objectives, job.tokenizer.path
    rows = load_tokenizer(path).vocab_size if path is not None and path.is_dir() else job.tokenizer.vocab_size
    answers = (model.answers or _ANSWERS) if wants.answers else 0
    update = {
        "vocab_size": model.vocab_size or rows,
        "pad_id": model.pad_id or 0,
        "feature_size": model.feature_size or store.feature_size,
        "object_classes": (model.object_classes or store.object_classes) if wants.objects else 0,
        "attribute_classes": (model.attribute_classes or store.attribute_classes) if wants.attributes else 0,
        "answers": answers,
    }
    assumed = (f"an answer table of {_ANSWERS:,} answers",) if answers and not model.answers else ()
    if not job.contrast.mismatched and job.contrast.weight:
        assumed = (*assumed, "every pair is contrasted, mismatched ones too")
    return job.model_copy(update={"model": model.model_copy(update=update)}), assumed


def _batch(job: VisionLanguageJob, store: _Store, n: int) -> VisionLanguageBatch:
    length, regions, wants = job.data.sequence_length, store.most_regions, job.objectives
    words, masked = round(n * length * wants.word_rate), round(n * regions * wants.region_rate)
    # The share that is exchanged for features of others, between _MASKED and _CHANGED of the batches.
    replaced = round(masked * 0.1)

    def ids(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int64)

    def labels(weight: float) -> tuple[Tensor | None, Tensor | None]:
        return (ids(n, regions), torch.zeros(n, regions)) if weight else (None, None)

    (object_ids, object_scores), (attribute_ids, attribute_scores) = labels(wants.objects), labels(wants.attributes)
    return VisionLanguageBatch(
        tokens=ids(n, length), corrupted=ids(n, length), masked=ids(words), labels=ids(words),
        features=torch.zeros(n, regions, store.feature_size, dtype=torch.float16),
        boxes=torch.zeros(n, regions, 4), present=torch.ones(n, regions, dtype=torch.bool),
        zeroed=torch.zeros(n, regions, dtype=torch.bool), replaced=ids(replaced),
        replacements=torch.zeros(replaced, store.feature_size, dtype=torch.float16), masked_regions=ids(masked),
        object_ids=object_ids, object_scores=object_scores, attribute_ids=attribute_ids,
        attribute_scores=attribute_scores, matched=torch.ones(n, dtype=torch.int64),
        answers=ids(n) if wants.answers else None, ids=torch.arange(n), numbers=torch.arange(n), padded=False,
        missing=False,
    )  # fmt: skip

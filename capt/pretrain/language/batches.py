"""Batches of packed windows: both views of each, the tokens to predict, and the numbers of the windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from capt.pretrain.base.randomness import derive, generator_for
from capt.pretrain.bottleneck.texts import Texts, TextSizes
from capt.pretrain.data.corruption import IGNORE, Corrupted, Corruptor
from capt.pretrain.data.mixture import MixtureSampler
from capt.pretrain.data.mixture_dataset import MixtureDataset
from capt.pretrain.data.passages import PassageDataset
from capt.pretrain.data.sampler import GroupedSampler, Sampler, validation_samples
from capt.pretrain.data.shards import PackedDataset
from capt.pretrain.data.views import Spans, draw_spans
from capt.pretrain.language.config import LanguageJob


@dataclass(frozen=True)
class LanguageBatch:
    """A micro-batch of ``n`` windows of ``L`` tokens with ``m`` prediction slots each.

    ``labels`` are token ids, ``IGNORE`` in unused slots. ``documents`` numbers the documents of a window, padding
    apart, where attention must not cross them; `to` sets ``runs``, their number of runs. ``padded`` is False
    when no row of either view holds padding. ``ids`` are window numbers: the same text in a later epoch has the same.
    ``numbers``, ``words``, ``keys`` and ``sizes`` are those of `Texts`, for a job with a bottleneck.
    Of spans, ``instances`` are the numbers of what is no negative of each other, columns from ``width`` on hold padding
    alone, and where both views are masked, ``positions`` and ``labels`` have ``2n`` rows: those of ``tokens`` first.
    ``originals`` are the tokens of which ``corrupted`` is the corruption, where these are not ``tokens``.
    """

    tokens: Int[Tensor, "n L"]
    corrupted: Int[Tensor, "n L"]
    positions: Int[Tensor, "masked m"]
    labels: Int[Tensor, "masked m"]
    ids: Int[Tensor, " n"]
    padded: bool
    documents: Int[Tensor, "n L"] | None = None
    runs: int | None = None
    width: int | None = None
    instances: Int[Tensor, " n"] | None = None
    originals: Int[Tensor, "n L"] | None = None
    numbers: Int[Tensor, "n L"] | None = None
    words: Int[Tensor, "n L"] | None = None
    keys: Int[Tensor, " n"] | None = None
    sizes: TextSizes | None = None

    @property
    def texts(self) -> Texts | None:
        """The texts of the windows, for a job with a bottleneck."""
        if self.numbers is None or self.words is None or self.keys is None or self.sizes is None:
            return None
        return Texts(self.numbers, self.words, self.keys, self.sizes)

    def to(self, device: torch.device) -> LanguageBatch:
        """The batch on a device (asynchronously from pinned memory), its runs counted where the host can."""
        runs = self.runs
        if runs is None and self.documents is not None and self.documents.is_cpu:
            # One run a row, and one more wherever the document changes.
            runs = len(self.documents) + int(np.count_nonzero(np.diff(self.documents.numpy(), axis=1)))
        cut = self
        if self.width is not None:  # as much padding as the longest row needs
            names = [
                name
                for name in ("tokens", "corrupted", "originals", "numbers", "words")
                if getattr(self, name) is not None
            ]
            narrow: dict[str, Any] = {name: getattr(self, name)[:, : self.width] for name in names}
            cut = replace(self, **narrow, width=None)
        return replace(cut._each(lambda tensor: tensor.to(device, non_blocking=True)), runs=runs)

    def _each(self, function: Callable[[Tensor], Tensor]) -> LanguageBatch:
        changed: dict[str, Any] = {name: function(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **changed)


Windows = PackedDataset | PassageDataset | MixtureDataset

MULTIPLE = 8
"""Rows of spans are as long as the longest of a micro-batch, up to a multiple of this: few shapes, and aligned ones."""


@dataclass(frozen=True)
class ViewPlan:
    """Plan for making both views of a sample.

    Attributes:
        draw: from the length of a passage to two spans (`capt.pretrain.data.views.View.draw`); None: a window.
        corrupts: the second view is its corruption in any case.
        masked: views whose masked tokens are predicted: 0, 1 (the second) or 2.
        spans: of ``draw``.
    """

    draw: Any = None
    corrupts: bool = True
    masked: int = 1
    spans: Spans = field(default_factory=Spans)

    @classmethod
    def of(cls, job: LanguageJob, split: str) -> ViewPlan:
        """Return the plan of a job; validation never masks the first view."""
        both = job.mlm.views == "both" and split == "train"
        view = job.data.views
        return cls(view.function(), view.corrupts, 0 if not job.masks else 2 if both else 1, job.data.spans)


def sampler_of(
    windows: Windows, seed: int, shuffle: bool, at_once: int | None
) -> Sampler | GroupedSampler | MixtureSampler:
    """The order of the windows: all shuffled, those of ``at_once`` shards at a time, or that of a mixture."""
    if isinstance(windows, MixtureDataset):
        return windows.order
    if at_once is not None:
        return GroupedSampler(len(windows), windows.block, at_once, seed)
    return Sampler(len(windows), seed, shuffle)


class LanguageAssembler:
    """Makes the micro-batch of any list of sample numbers; a pure function of (seed, sample numbers, rate).

    With ``ordinary``, true for ids that are no special ones, the batch has its texts for the bottleneck.
    """

    def __init__(
        self, windows: Windows, corruptor: Corruptor, *, seed: int, stream: str, shuffle: bool, pad_id: int,
        cross_document_attention: bool, at_once: int | None = None, ordinary: Bool[np.ndarray, " v"] | None = None,
        plan: ViewPlan | None = None,
    ) -> None:  # fmt: skip
        self._windows = windows
        self._corruptor = corruptor
        self._sampler = sampler_of(windows, seed, shuffle, at_once)
        self._seed, self._stream, self._pad_id = seed, stream, pad_id
        self._cross, self._ordinary, self._plan = cross_document_attention, ordinary, plan or ViewPlan()

    def __call__(self, samples: np.ndarray, rate: float | None = None) -> LanguageBatch:
        """The batch of the samples numbered ``samples``, corrupted at a ``rate``; without one at that of validation."""
        self._follow(samples)
        epochs, numbers = self._sampler.locate(samples)
        generators = [
            generator_for(self._stream, self._seed, int(epoch), int(number))
            for epoch, number in zip(epochs, numbers, strict=True)
        ]
        if self._plan.draw is not None:
            return self._spans(epochs, numbers, generators, rate)
        assert not isinstance(self._windows, PassageDataset)
        tokens = np.stack([self._windows.window(int(i)) for i in numbers])
        noisy = self._corruptor(tokens, generators, rate) if self._plan.corrupts else _plain(tokens)
        documents, texts = None, {}
        if not self._cross or self._ordinary is not None:
            documents = np.stack([self._windows.documents(int(i)) for i in numbers])
            texts = self._texts(tokens, documents, epochs, numbers)
        self._windows.release()
        return LanguageBatch(
            tokens=torch.from_numpy(tokens.astype(np.int64)),
            corrupted=torch.from_numpy(noisy.tokens.astype(np.int64)),
            positions=torch.from_numpy(noisy.positions),
            labels=torch.from_numpy(noisy.labels),
            ids=torch.from_numpy(numbers),
            # Padding is at the end, and no corruption moves it: the last token of the original tells for both views.
            padded=bool((tokens[:, -1] == self._pad_id).any()),
            documents=None if documents is None or self._cross else torch.from_numpy(documents),
            **texts,
        )

    def _texts(
        self, tokens: np.ndarray, documents: np.ndarray, epochs: np.ndarray, numbers: np.ndarray
    ) -> dict[str, Any]:
        """Return the fields of a batch for the bottleneck: its texts are the documents, whatever attends to what."""
        if self._ordinary is None:
            return {}
        words = np.where(self._ordinary[tokens], tokens, IGNORE).astype(np.int64)
        stream = f"bottleneck/{self._stream}"
        keys = [derive(self._seed, stream, int(e), int(n)) for e, n in zip(epochs, numbers, strict=True)]
        return {
            "numbers": torch.from_numpy(documents),
            "words": torch.from_numpy(words),
            "keys": torch.tensor(keys),
            "sizes": TextSizes.of(documents, words),
        }

    def _spans(
        self, epochs: np.ndarray, numbers: np.ndarray, generators: Sequence[np.random.Generator], rate: float | None
    ) -> LanguageBatch:
        """Two spans of each passage, masked as planned; a passage that is too short is whole, beside its corruption."""
        plan, room = self._plan, self._corruptor.sequence_length - 2
        assert not isinstance(self._windows, PackedDataset)
        special = self._windows.special
        views = np.full((2, len(numbers), room + 2), self._pad_id, dtype=np.int32)
        instances, whole, longest = np.zeros(len(numbers), dtype=np.int64), np.zeros(len(numbers), dtype=bool), 0
        for row, (number, generator) in enumerate(zip(numbers.tolist(), generators, strict=True)):
            tokens, instances[row] = self._windows.passage(number)
            drawn = draw_spans(plan.draw, tokens, plan.spans, room, generator)
            whole[row] = drawn is None
            for view, span in zip(views, drawn or (tokens[:room],) * 2, strict=True):
                view[row, : len(span) + 2] = [special.bos, *span, special.eos]
                longest = max(longest, len(span) + 2)
        self._windows.release()
        # The first view draws last, so that the second is the same whether the first is masked or not.
        second = self._corruptor(views[1], generators, rate) if plan.masked or whole.any() else _plain(views[1])
        first = self._corruptor(views[0], generators, rate) if plan.masked == 2 else _plain(views[0])
        corrupted = second.tokens if plan.masked else np.where(whole[:, None], second.tokens, views[1])
        masked = {0: [_plain(views[1])], 1: [second], 2: [first, second]}[plan.masked]
        width = min(room + 2, -(-longest // MULTIPLE) * MULTIPLE)
        return LanguageBatch(
            tokens=torch.from_numpy(first.tokens.astype(np.int64)),
            corrupted=torch.from_numpy(corrupted.astype(np.int64)),
            positions=torch.from_numpy(np.concatenate([each.positions for each in masked])),
            labels=torch.from_numpy(np.concatenate([each.labels for each in masked])),
            ids=torch.from_numpy(numbers),
            instances=torch.from_numpy(instances),
            padded=bool((views[:, :, width - 1] == self._pad_id).any()),
            originals=None if self._ordinary is None else torch.from_numpy(views[1].astype(np.int64)),
            width=width,
            # The bottleneck reads the second view, as the masked tokens do; a span is one text.
            **self._texts(views[1], np.where(views[1] == self._pad_id, -1, 0).astype(np.int64), epochs, numbers),
        )

    def _follow(self, samples: np.ndarray) -> None:
        """Fetch the shards in a store that the samples need, and what comes after them."""
        windows, order = self._windows, self._sampler
        if isinstance(windows, MixtureDataset):
            windows.follow(samples)
        elif isinstance(order, GroupedSampler) and len(samples):
            windows.follow(order, int(samples[0]))


def _plain(tokens: np.ndarray) -> Corrupted:
    """Tokens of which nothing is corrupted, with one label slot a row, which is not used."""
    slots = np.zeros((len(tokens), 1), dtype=np.int64)
    return Corrupted(tokens, slots, np.full_like(slots, IGNORE))


def validation_batches(
    assembler: Callable[[np.ndarray], LanguageBatch], samples: int, micro: int, world: int, rank: int
) -> Iterator[tuple[LanguageBatch, int]]:
    """This rank's validation batches, each with the number of its rows that are valid (`validation_samples`).

    The others have nothing to predict, neither masked tokens nor words of a text.
    """
    for numbers, valid in validation_samples(samples, micro, world, rank):
        batch = assembler(numbers)
        batch.labels[valid:] = IGNORE  # the second view alone is masked here
        if batch.numbers is not None and batch.words is not None:
            batch.words[valid:] = IGNORE
            batch = replace(batch, sizes=TextSizes.of(batch.numbers.numpy(), batch.words.numpy()))
        yield batch, valid

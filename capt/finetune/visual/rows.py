"""Questions and statements about pictures as batches; region features are read from the mapped store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int64
from torch import Tensor

from capt.finetune.batches import Batch, TextRows
from capt.finetune.encoding import EncodedTexts
from capt.finetune.order import RowNumbers
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.data.examples import Example

PictureRowNumbers = Int64[np.ndarray, "n pictures"]


class PictureInputs(NamedTuple):
    """``n`` sentences of ``L`` tokens, padded on the right, and the ``R`` regions of each of their ``p`` pictures.

    Attributes:
        tokens: ids.
        features: of regions, zeros where there is none; as they are stored.
        boxes: edges divided by width and height.
        present: True where there is a region; None where no region of the batch is absent.
        padded: whether any token is padding.
    """

    tokens: Int[Tensor, "n L"]
    features: Float[Tensor, "n p R f"]
    boxes: Float[Tensor, "n p R 4"]
    present: Bool[Tensor, "n p R"] | None
    padded: bool


@dataclass(frozen=True)
class SoftTargets:
    """The scores of the answers of ``n`` questions; question ``i`` has those from ``starts[i]`` on.

    Attributes:
        starts: one more than there are questions.
        ids: classes of the answers.
        scores: of these answers; all others have 0.
        classes: rows of the answer table.
    """

    starts: Int64[np.ndarray, " n1"]
    ids: Int64[np.ndarray, " total"]
    scores: Float32[np.ndarray, " total"]
    classes: int

    @classmethod
    def of(cls, answers: Sequence[Mapping[str, float]], index: Mapping[str, int]) -> SoftTargets:
        """The targets of questions with these scored answers; answers that ``index`` lacks are left out."""
        known = [[(index[text], score) for text, score in row.items() if text in index] for row in answers]
        flat = [pair for row in known for pair in row]
        return cls(
            np.cumsum([0, *(len(row) for row in known)], dtype=np.int64),
            np.array([number for number, _ in flat], dtype=np.int64),
            np.array([score for _, score in flat], dtype=np.float32),
            len(index),
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    def dense(self, numbers: RowNumbers) -> Float32[np.ndarray, "n classes"]:
        """The scores of every answer of these questions."""
        counts = self.starts[numbers + 1] - self.starts[numbers]
        rows = np.repeat(np.arange(len(numbers)), counts)
        places = np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in numbers])
        out = np.zeros((len(numbers), self.classes), dtype=np.float32)
        out[rows, self.ids[places]] = self.scores[places]
        return out

    def scores_of(self, chosen: RowNumbers) -> Float32[np.ndarray, " n"]:
        """The score of the answer ``chosen`` for each question."""
        rows = np.repeat(np.arange(len(self)), np.diff(self.starts))
        out = np.zeros(len(self), dtype=np.float32)
        hit = self.ids == chosen[rows]
        out[rows[hit]] = self.scores[hit]
        return out


class PictureRows:
    """Examples with their token ids and pictures, as a `capt.finetune.batches.RowSet`.

    Args:
        examples: the rows.
        encoded: the token ids of every row.
        store: where the regions are.
        pictures: the store's row of each picture.
        targets: soft scores of answers; the class of each statement, 1 for a true one; or None.
        pad_id: the id to pad with.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        encoded: EncodedTexts,
        store: RegionStore,
        pictures: PictureRowNumbers,
        targets: SoftTargets | Int64[np.ndarray, " n"] | None,
        pad_id: int,
    ) -> None:
        self.examples, self.targets = examples, targets
        self._texts = TextRows(encoded, None, pad_id, types=False)
        self._store, self._pictures = store, pictures
        regions = store.counts(pictures.reshape(-1)).reshape(pictures.shape)
        # What a row costs, by which batches are made of rows that are alike.
        self._lengths: Int64[np.ndarray, " n"] = encoded.lengths + regions.sum(1)
        self.mean_words, self.mean_regions = float(encoded.lengths.mean()), float(regions.mean())

    @property
    def lengths(self) -> Int64[np.ndarray, " n"]:
        """Tokens and regions of each row together."""
        return self._lengths

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, numbers: RowNumbers) -> Batch[PictureInputs]:
        """The rows with these numbers, filled up to the longest sentence and the most regions among them."""
        regions = self._store.regions(self._pictures[numbers].reshape(-1))
        text = self._texts.batch(numbers).inputs
        shape = (len(numbers), self._pictures.shape[1])

        def of_rows(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values.reshape(*shape, *values.shape[1:]))

        present = None if regions.present.all() else of_rows(regions.present)
        inputs = PictureInputs(text.tokens, of_rows(regions.features), of_rows(regions.boxes), present, text.padded)
        return Batch(inputs, self._labels(numbers))

    def _labels(self, numbers: RowNumbers) -> Any:
        if self.targets is None:
            return None
        if isinstance(self.targets, SoftTargets):
            return torch.from_numpy(self.targets.dense(numbers))
        return torch.from_numpy(self.targets[numbers])

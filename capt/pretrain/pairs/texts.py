"""Texts of a micro-batch on the device: rows of padded ids, in groups of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


class PaddedTexts(NamedTuple):
    """Texts of a micro-batch, padded on the right; ``padded`` says whether any row is."""

    tokens: Int[Tensor, "n L"]
    padded: bool


class GroupedTexts(NamedTuple):
    """Texts of a micro-batch in groups, each padded to its own longest text.

    Attributes:
        groups: the groups.
        places: row of each text among those of all groups, one group after another.
    """

    groups: list[PaddedTexts]
    places: Int[Tensor, " texts"]

    def in_order(self, rows: Sequence[Float[Tensor, "_ d"]]) -> Float[Tensor, "texts d"]:
        """The rows of all groups in the order of the texts."""
        return torch.cat(list(rows)).index_select(0, self.places)


class MaskedTexts(NamedTuple):
    """Corrupted texts, and at ``positions`` of each what its tokens were; a label of -100 marks an unused place."""

    texts: PaddedTexts
    positions: Int[Tensor, "n m"]
    labels: Int[Tensor, "n m"]


def padded(texts: Sequence[np.ndarray], pad_id: int, device: torch.device) -> PaddedTexts:
    """Rows of the tokens of some texts on ``device``."""
    lengths = torch.tensor([len(text) for text in texts])
    return padded_rows(torch.from_numpy(np.concatenate(texts)), lengths, pad_id, device)


def padded_rows(tokens: Tensor, lengths: Tensor, pad_id: int, device: torch.device) -> PaddedTexts:
    """Make rows of texts that are one after another, on the host, where their lengths are known."""
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    rows = torch.full(real.shape, pad_id, dtype=torch.int64)
    rows[real] = tokens.long()
    return PaddedTexts(rows.to(device, non_blocking=True), not bool(real.all()))


GROUP_TOKENS = 64
"""Tokens of padding that a further group must save."""


def encoded_by_length(device: torch.device, zero_stage: int) -> bool:
    """Return whether groups of similar length are encoded one after another, for which `groups_by_length` divides.

    More passes of fewer tokens pay on a CPU. Under ZeRO 3 all ranks gather the weights in each pass, so that all must
    have the same number of them.
    """
    return device.type == "cpu" and zero_stage < 3


def groups_by_length(lengths: Int[Tensor, " n"]) -> list[Int[Tensor, " _"]]:
    """Divide texts into groups of similar length, so that padded tokens and `GROUP_TOKENS` a group are fewest."""
    # Texts of equal length never part, so the program runs over the different lengths alone.
    sizes, of_text = np.unique(lengths.numpy(), return_inverse=True)
    until = np.concatenate([[0], np.bincount(of_text).cumsum()])
    least, first = np.zeros(len(sizes) + 1), np.zeros(len(sizes) + 1, dtype=np.int64)
    for end, longest in enumerate(sizes, start=1):  # the best last group of the texts of the first `end` sizes
        tokens = least[:end] + (until[end] - until[:end]) * longest + GROUP_TOKENS
        first[end] = tokens.argmin()
        least[end] = tokens[first[end]]
    # Walk back from the last group to the first.
    cuts, end = [], int(first[-1])
    while end:
        cuts.append(int(until[end]))
        end = int(first[end])
    return list(torch.from_numpy(of_text.argsort(kind="stable")).tensor_split(cuts[::-1]))

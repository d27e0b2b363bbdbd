"""The texts of a micro-batch: the runs of one document in its windows, and what the decoder sees of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from capt.pretrain.models.cross_entropy import UNUSED


class TextSizes(NamedTuple):
    """Numbers that the host knows of a micro-batch, so that no GPU is waited for.

    Attributes:
        slots: texts of the window that has most.
        texts: those that hold a word.
        longest: tokens of the longest.
        words: tokens that are no special ones, of all texts.
    """

    slots: int
    texts: int
    longest: int
    words: int

    @classmethod
    def of(cls, numbers: Int64[np.ndarray, "n L"], words: Int64[np.ndarray, "n L"]) -> TextSizes:
        """The sizes of the texts ``numbers``, whose ``words`` are as in `Texts`."""
        slots = int(numbers.max(initial=0)) + 1
        # One place for each text of each window; padding is -1, and goes beyond them.
        place = np.where(numbers < 0, len(numbers) * slots, numbers + slots * np.arange(len(numbers))[:, None])
        tokens = np.bincount(place.ravel(), minlength=len(numbers) * slots + 1)[:-1]
        holds = np.bincount(place[words != UNUSED], minlength=len(tokens))
        return cls(slots, int((holds > 0).sum()), int(tokens.max(initial=0)), int(holds.sum()))


@dataclass(frozen=True)
class Texts:
    """The texts of ``n`` windows of ``L`` tokens.

    Attributes:
        numbers: the text of its window that a token belongs to, 0, 1, ... in runs; -1 for padding.
        words: the id of every token that is no special one, ``UNUSED`` (-100) elsewhere.
        keys: of each window's random numbers.
        sizes: what the host knows of them.
    """

    numbers: Int[Tensor, "n L"]
    words: Int[Tensor, "n L"]
    keys: Int[Tensor, " n"]
    sizes: TextSizes

    def members(self) -> Bool[Tensor, "n M L"]:
        """True where token ``l`` belongs to text ``m`` of its window, of the ``M`` of the window that has most."""
        slots = torch.arange(self.sizes.slots, device=self.numbers.device)
        return self.numbers[:, None, :] == slots[:, None]

    def pool(self, hidden: Float[Tensor, "n L h"], pooling: str) -> Float[Tensor, "n M h"]:
        """Return a vector for each text: the state of its first token (``cls``), or the mean over its tokens.

        A text that a window does not have is zeros. Computed in fp32, as an export pools.
        """
        members = self.members()
        if pooling == "cls":
            members = members & (members.cumsum(2) == 1)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            weights = members.to(exact)
            weights = weights / weights.sum(2, keepdim=True).clamp_min(1)
            return weights @ hidden.to(exact)

    def held(self) -> Int[Tensor, " t"]:
        """The places, among all slots of all windows, of the texts that hold a word."""
        holds = (self.members() & (self.words != UNUSED)[:, None, :]).any(2)
        return torch.nonzero_static(holds.flatten(), size=self.sizes.texts)[:, 0]

    def bags(self) -> Int[Tensor, "t k"]:
        """The words of each text that holds one, in order, ``UNUSED`` between and behind them."""
        held = self.held()
        members = self.members().flatten(0, 1)[held]
        window = held // self.sizes.slots
        within = torch.arange(self.sizes.longest, device=self.words.device)
        columns = members.long().argmax(1)[:, None] + within
        inside = within < members.sum(1, keepdim=True)
        ids = self.words.flatten()[window[:, None] * self.words.shape[1] + torch.where(inside, columns, 0)]
        return torch.where(inside, ids, UNUSED)

    def places(self) -> Int[Tensor, "n L"]:
        """The place of each token in its text, from 1 on: 0 is that of the text's vector."""
        text = self.numbers.clamp_min(0)  # padding is read nowhere
        firsts = self.members().long().argmax(2)
        return torch.arange(1, text.shape[1] + 1, device=text.device) - firsts.gather(1, text)

    def visible(self, rate: float) -> Bool[Tensor, "n L _"]:
        """True where the decoder sees a vector of the window's texts, or a token, at each of its positions.

        That is the vector of the position's own text, always, and each other word of the text with probability
        1 - ``rate``, drawn for each two positions by the text's key. Padding sees the first text's vector, so that no
        row is empty.
        """
        numbers, places = self.numbers, self.places()
        vectors = self.members().transpose(1, 2) | (
            (numbers < 0)[:, :, None] & (torch.arange(self.sizes.slots, device=numbers.device) == 0)
        )
        words = (numbers[:, :, None] == numbers[:, None, :]) & (self.words != UNUSED)[:, None, :]
        words &= places[:, :, None] != places[:, None, :]
        keys = self.keys[:, None] + _TEXT * numbers.clamp_min(0)
        drawn = _mix((keys + _ROW * places)[:, :, None] + (_COLUMN * places)[:, None, :])
        words &= (drawn & (_LEVELS - 1)) >= round(rate * _LEVELS)
        return torch.cat([vectors, words], 2)


# Random numbers that depend on a key and two positions alone: the same on every device, in every micro-batch, after
# every resume, with nothing to store.


_LEVELS = 1 << 24
_TEXT, _ROW, _COLUMN = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xF1357AEA2E62A9C5))
"""Odd numbers of 64 bits, as int64 has them."""
_MIX_1, _MIX_2 = (word - (1 << 64) for word in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (`capt.pretrain.base.randomness.mix64`), on any device, in place."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        # int64 shifts its sign along; the bits that a shift of uint64 would not have are cut off.
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return x

"""A checksum of bits sees every change of one word, at any place of any type, and that two elements change places."""

from __future__ import annotations

import pytest
import torch

from pretrain.engine import checksums as module
from pretrain.engine.checksums import checksums


def _literal(words: list[int], piece: int) -> int:
    def signed(number: int, bits: int) -> int:
        number %= 1 << bits
        return number - (1 << bits) if number >> (bits - 1) else number

    total = 0
    for p, begin in enumerate(range(0, len(words), piece)):
        part = words[begin : begin + piece]
        total += (2 * p + 1) * sum(signed((2 * i + 1) * word, 32) for i, word in enumerate(part))
    return signed(total, 64)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool]
)
@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_a_checksum_is_the_sum_of_its_definition(
    dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", piece)
    tensors = [
        (100 * torch.randn(5, 6, generator=torch.Generator().manual_seed(1))).to(dtype),
        torch.zeros(1, dtype=dtype),
    ]
    tensors.append(tensors[0].t())  # not contiguous
    width = min(tensors[0].element_size(), 4)
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32}[width]
    expected = [_literal(tensor.contiguous().view(-1).view(word).tolist(), piece) for tensor in tensors]
    assert checksums(tensors) == expected


def test_every_flipped_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 5)
    tensor = torch.randn(17)
    (before,) = checksums([tensor])
    for place in range(17):
        for bit in range(32):
            flipped = tensor.clone()
            flipped.view(torch.int32)[place] ^= torch.tensor(1 << bit).to(torch.int32)
            assert checksums([flipped]) != [before], (place, bit)


def test_places_signs_of_zeros_and_nans_count() -> None:
    a = torch.tensor([1.0, 2.0, float("nan"), 0.0])
    swapped, negative = a[[1, 0, 2, 3]], torch.tensor([1.0, 2.0, float("nan"), -0.0])
    first, again, other, sign = checksums([a, a.clone(), swapped, negative])
    assert first == again
    assert len({first, other, sign}) == 3


def test_nothing_is_no_checksum() -> None:
    assert checksums([]) == []
    assert checksums([torch.empty(0), torch.ones(1)])[0] == 0

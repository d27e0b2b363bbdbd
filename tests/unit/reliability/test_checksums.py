"""A checksum of bits sees every change of one word, at any place of any type, and that two elements change places."""

from __future__ import annotations

import pytest
import torch

from capt.pretrain.reliability import replicas as module
from capt.pretrain.reliability.replicas import checksums


def _literal(data: bytes) -> int:
    words = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data) // 8 * 8, 8)]
    words += data[len(data) // 8 * 8 :]
    total = sum((2 * i + 1) * word for i, word in enumerate(words)) % (1 << 64)
    return total - (1 << 64) if total >> 63 else total


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool]
)
@pytest.mark.parametrize("row", [3, 512])
def test_a_checksum_is_the_sum_of_its_definition(dtype: torch.dtype, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROW", row)
    tensors = [
        (100 * torch.randn(5, 6, generator=torch.Generator().manual_seed(1))).to(dtype),
        torch.zeros(1, dtype=dtype),
    ]
    tensors.append(tensors[0].t())  # not contiguous
    tensors.append(tensors[0].view(-1)[1:])  # begins between two words
    expected = [_literal(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for tensor in tensors]
    assert checksums(tensors) == expected


def test_every_flipped_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROW", 3)
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

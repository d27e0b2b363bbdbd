from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.verification import Verifier
from capt.pretrain.data.shard_writer import write_shards
from capt.pretrain.data.shards import PackedDataset, summarize
from tests.unit.data.doubles import ByteTokenizer, ListCorpus

BOS, PAD, EOS = 0, 1, 2


def pack(folder: Path, texts: list[str], length: int, shard_tokens: int = 1 << 20) -> PackedDataset:
    shards = write_shards(
        ListCorpus(texts),
        ByteTokenizer(),
        folder,
        key="k",
        options={},
        workers=1,
        shard_tokens=shard_tokens,
        verifier=Verifier(folder.parent),
    )
    return PackedDataset(shards, length)


def ids(text: str) -> list[int]:
    """``.`` marks the end of a document."""
    return [EOS if character == "." else ord(character) + 5 for character in text]


def test_windows_cut_the_stream_and_mark_document_borders(tmp_path: Path) -> None:
    windows = pack(tmp_path / "s", ["abcd", "ef", "g"], 6)
    assert [windows.window(i).tolist() for i in range(len(windows))] == [
        [BOS, *ids("abcd"), EOS],
        [BOS, *ids(".ef."), EOS],
        [BOS, *ids("g."), EOS, PAD, PAD],
    ]
    assert windows.window(0).dtype == np.int32
    assert windows.real_tokens == 16 / 18


def test_no_window_by_shard_goes_over_the_end_of_a_shard(tmp_path: Path) -> None:
    whole = pack(tmp_path / "s", ["abcdefghij", "kl"], 6, shard_tokens=6)
    windows = PackedDataset(whole.shards, 6, by_shard=True)
    assert [windows.window(i).tolist() for i in range(len(windows))] == [
        [BOS, *ids("abcd"), EOS],
        [BOS, *ids("ef"), EOS, PAD, PAD],
        [BOS, *ids("ghij"), EOS],
        [BOS, *ids(".k"), EOS, PAD, PAD],
        [BOS, *ids("l."), EOS, PAD, PAD],
    ]


def test_documents_are_numbered_within_each_window(tmp_path: Path) -> None:
    windows = pack(tmp_path / "s", ["abcd", "ef", "g"], 6)
    assert [windows.documents(i).tolist() for i in range(len(windows))] == [
        [0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 1],  # the separator still belongs to the document that it ends
        [0, 0, 0, 0, -1, -1],
    ]


def test_tokens_that_a_token_sees_within_its_document(tmp_path: Path) -> None:
    windows = pack(tmp_path / "s", ["abcd", "ef", "g"], 6)
    pairs = [(row[:, None] == row).sum() for row in map(windows.documents, range(len(windows)))]
    assert windows.tokens_seen() == sum(pairs) / (6 * len(windows))


@pytest.mark.parametrize(("length", "shard_tokens"), [(3, 50), (8, 7), (17, 64), (128, 100), (5000, 1000)])
def test_every_token_is_in_exactly_one_window(tmp_path: Path, length: int, shard_tokens: int) -> None:
    rng = np.random.default_rng(0)
    texts = ["x" * int(n) + str(i) for i, n in enumerate(rng.integers(1, 40, 60))]
    windows = pack(tmp_path / "s", texts, length, shard_tokens)
    stream = [token for text in texts for token in [*ids(text), EOS]]
    seen: list[int] = []
    borders = 0
    for index in range(len(windows)):
        window, documents = windows.window(index), windows.documents(index)
        real = window[window != PAD]
        assert window.shape == documents.shape == (length,)
        assert (real[0], real[-1]) == (BOS, EOS)
        assert index == len(windows) - 1 or len(real) == length
        assert (documents[: len(real)] >= 0).all()
        assert (documents[len(real) :] == -1).all()
        inner = documents[1 : len(real) - 1]
        ends = np.flatnonzero(real[1:-1][:-1] == EOS)
        np.testing.assert_array_equal(np.flatnonzero(np.diff(inner)), ends)
        borders += len(ends) + (real[-2] == EOS)
        seen += real[1:-1].tolist()
    assert seen == stream
    assert borders == len(texts)
    assert windows.real_tokens == (len(stream) + 2 * len(windows)) / (length * len(windows))


def test_windows_too_short_for_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.sequence_length = 2 leaves no room"):
        pack(tmp_path / "s", ["abc"], 2)


def test_summary(tmp_path: Path) -> None:
    windows = pack(tmp_path / "s", ["abc", "def", "g" * 100], 20)  # the last window is the last document's end
    summary = summarize(windows.shards, 20, ByteTokenizer().decode, samples=2)
    assert (summary.documents, summary.tokens, summary.windows) == (3, 109, 7)
    assert (summary.shortest, summary.longest, summary.mean) == (4, 101, 109 / 3)
    assert summary.histogram == {4: 2, 64: 1}
    assert summary.real_tokens == windows.real_tokens == (109 + 14) / 140
    assert summary.samples == ["abcdef" + "g" * 10, ""]
    assert summarize(windows.shards, 20, ByteTokenizer().decode, samples=0).samples == []

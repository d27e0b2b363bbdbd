"""The search is exact: ties by id, any blocks, any number of ranks, the same result to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from capt.pretrain.contrast.kernels import Products
from capt.pretrain.retrieval.search import TopK, by_id, pair_scores, unit_rows
from tests.support import run_ranks


def reference(queries: np.ndarray, rows: np.ndarray, names: list[str], k: int) -> list[list[str]]:
    """Every product in float64, rounded to fp32; sorted by score, then by id, descending."""
    found = []
    for query in queries.astype(np.float64):
        scores = (rows.astype(np.float64) * query).sum(axis=1).astype(np.float32)
        best = sorted(sorted(range(len(names)), key=names.__getitem__, reverse=True), key=lambda i: -scores[i])
        found.append([names[i] for i in best[:k]])
    return found


def tied_rows(seed: int, count: int = 300, dimension: int = 24) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Few distinct documents, each there many times at places that share no block, and near copies of some."""
    generator = np.random.default_rng(seed)
    base = generator.standard_normal((count // 8, dimension)).astype(np.float32)
    rows = base[generator.integers(0, len(base), count)]
    rows[::5] *= np.float32(1 + 2**-20)
    queries = generator.standard_normal((19, dimension)).astype(np.float32)
    return unit_rows(queries), unit_rows(rows), [f"d{i}" for i in generator.permutation(count)]


def searched(queries: np.ndarray, rows: np.ndarray, names: list[str], k: int, block: int) -> list[list[str]]:
    best = TopK(queries, k, by_id(names))
    for start in range(0, len(rows), block):
        best.update(start, rows[start : start + block])
    return [[names[i] for i in found if i >= 0] for found in best.result().numbers.tolist()]


@pytest.mark.parametrize("k", [1, 10, 77, 400])
def test_the_best_are_those_of_brute_force(k: int) -> None:
    queries, rows, names = tied_rows(k)
    expected = reference(queries, rows, names, k)
    for block in (1, 7, 64, 300):
        assert searched(queries, rows, names, k, block) == expected


def test_products_that_fp32_confuses_are_told_apart() -> None:
    """Scores closer than the error of an fp32 product in blocks."""
    generator = np.random.default_rng(0)
    rows = np.repeat(generator.standard_normal((1, 512)), 4096, axis=0).astype(np.float32)
    rows += generator.normal(0, 1e-7, rows.shape).astype(np.float32)
    queries, rows = unit_rows(generator.standard_normal((3, 512)).astype(np.float32)), unit_rows(rows)
    names = [str(i) for i in range(len(rows))]
    assert searched(queries, rows, names, 20, 1000) == reference(queries, rows, names, 20)


class _Gpu(TorchFunctionMode):
    """Products as on a GPU: with factors of 11 bits where the process allows TF32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.matmul and torch.backends.cuda.matmul.fp32_precision == "tf32":
            args = [(x.view(torch.int32) & -8192).view(torch.float32) for x in args]
        return func(*args, **(kwargs or {}))


def test_a_process_that_allows_tf32_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(3)
    rows = unit_rows(generator.standard_normal((1, 64)) + generator.normal(0, 1e-4, (2000, 64))).astype(np.float32)
    queries, names = rows[:5] + np.float32(0.5), [str(i) for i in range(len(rows))]
    applied_on = Products.applied_on
    monkeypatch.setattr(Products, "applied_on", lambda self, _: applied_on(self, torch.device("cuda")))
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, "tf32"
    try:
        with _Gpu():
            assert searched(queries, rows, names, 10, 500) == reference(queries, rows, names, 10)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_vectors_that_are_not_normalized() -> None:
    generator = np.random.default_rng(5)
    rows = (generator.standard_normal((200, 8)) * generator.uniform(0.01, 100, (200, 1))).astype(np.float32)
    queries = generator.standard_normal((4, 8)).astype(np.float32) * 30
    names = [str(i) for i in range(200)]
    assert searched(queries, rows, names, 15, 33) == reference(queries, rows, names, 15)


def test_the_score_of_a_pair_does_not_depend_on_its_place() -> None:
    queries, rows, _ = tied_rows(1)
    left, right = np.arange(19).repeat(300), np.tile(np.arange(300), 19)
    whole = pair_scores(queries, rows, left, right)
    for i in (0, 777, 5699):
        alone = pair_scores(queries[left[i] : left[i] + 1], rows[right[i] :], np.zeros(1, int), np.zeros(1, int))
        assert alone[0] == whole[i]


def _of_rank(folder: str) -> list[list[int]]:
    from capt.pretrain.retrieval import rankings as room
    from capt.pretrain.retrieval.encode import embed, rows_of
    from capt.pretrain.retrieval.options import EncodeOptions
    from tests.unit.retrieval.toy import ToyEncoder

    room.BLOCK = 16
    texts = [f"word{i % 37} other{i % 5}" + " more" * (i % 11) for i in range(300)]
    encoder = ToyEncoder()
    store = embed(encoder, texts, "document", EncodeOptions(str(folder), tokens=64))
    queries = rows_of(store, texts[:12])
    names = [str(i) for i in range(300)]
    found = room.search(queries, iter(texts), store, 40, by_id(names), room.Scoring())
    return [found.numbers.tolist(), found.scores.tolist(), len(encoder.encoded)]  # type: ignore[list-item]


def test_ranks_give_the_result_of_one(tmp_path: Path) -> None:
    """Each text is encoded by one rank alone, and the ranking is the same to the last bit."""
    (alone,) = run_ranks(_of_rank, 1, str(tmp_path / "1"))
    for world in (2, 4):
        ranks = run_ranks(_of_rank, world, str(tmp_path / str(world)))
        assert all(each[:2] == alone[:2] for each in ranks)
        assert sum(each[2] for each in ranks) == alone[2] == len({f"{i % 37} {i % 5} {i % 11}" for i in range(300)})
        assert min(each[2] for each in ranks) > 0

"""Tables divided over ranks learn what one process learns, and a resumed run does what an uninterrupted one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.embeddings.tables import EmbeddingTables, RowExchange
from capt.pretrain.engine.checkpoint import find_checkpoint, read_weights
from capt.pretrain.engine.run import run_job
from tests.embeddings import small_job, write_text
from tests.runs import training_rows
from tests.support import run_ranks


def _run(folder: Path, name: str, resume: bool, *more: str) -> int:
    quiet_libraries(debug=False)
    job = small_job(folder, folder / name, *more)
    return run_job(job, resume=resume)


def _runs(folder: Path, runs: list[tuple[str, bool, tuple[str, ...]]]) -> list[int]:
    return [_run(folder, name, resume, *more) for name, resume, more in runs]


def _losses(run: Path) -> list[float]:
    return [row["loss"] for row in training_rows(run)]


def _tables(run: Path) -> dict[str, np.ndarray]:
    weights = read_weights(find_checkpoint(run), "discriminator")
    return {name: table.numpy() for name, table in weights.items()}


def _assert_close(one: Path, other: Path, tolerance: float) -> None:
    np.testing.assert_allclose(_losses(one), _losses(other), rtol=tolerance, atol=0)
    for name, table in _tables(one).items():
        np.testing.assert_allclose(table, _tables(other)[name], rtol=0, atol=tolerance, err_msg=name)


def test_every_world_learns_what_one_process_learns_and_resumes_at_any_other(tmp_path: Path) -> None:
    """At 1e-6, the order of float32's sums apart; the same world resumes to the last bit."""
    write_text(tmp_path / "text.txt", 6000, largest=300)
    more = ("optimizer.lr=0.02", "schedule.max_steps=9", "checkpoint.every=5", "checkpoint.keep=9")
    for world in (1, 2, 4):
        assert run_ranks(_runs, world, tmp_path, [(f"whole{world}", False, more)]) == [[0]] * world
        stop = (*more, "schedule.stop_after=5")
        assert run_ranks(_runs, world, tmp_path, [(f"part{world}", False, stop)]) == [[75]] * world
    assert len(_losses(tmp_path / "whole1")) == 9
    assert 0.01 < np.abs(_tables(tmp_path / "whole1")["context"]).max() < 10, "there was something to learn"
    for world in (2, 4):
        _assert_close(tmp_path / "whole1", tmp_path / f"whole{world}", 1e-6)
    for world, other in ((1, 1), (2, 4), (4, 2)):
        assert run_ranks(_runs, other, tmp_path, [(f"part{world}", True, more)]) == [[0]] * other
        _assert_close(tmp_path / f"whole{world}", tmp_path / f"part{world}", 0 if world == other else 1e-6)


def test_a_chunk_of_updates_is_the_same_as_one_by_one(tmp_path: Path) -> None:
    more = ("schedule.max_steps=7",)
    run_ranks(_runs, 1, tmp_path, [("one", False, more), ("many", False, (*more, "run.log_every=3"))])
    assert [_losses(tmp_path / "one")[i] for i in (2, 5, 6)] == _losses(tmp_path / "many")
    for name, table in _tables(tmp_path / "one").items():
        assert np.array_equal(table, _tables(tmp_path / "many")[name])


def test_metrics_carry_words_a_second_and_epochs_end_with_the_text(tmp_path: Path) -> None:
    run_ranks(_runs, 1, tmp_path, [("run", False, ("schedule.epochs=2", "schedule.max_steps=1000000"))])
    rows = training_rows(tmp_path / "run")
    (record,) = (tmp_path / "cache" / "embeddings").glob("*/corpus.json")
    words = json.loads(record.read_text())["words"]
    assert rows[-1]["tokens"] == 2 * words
    assert all(row["words_per_second"] > 0 for row in rows)
    assert (tmp_path / "run" / "vocabulary.txt").read_text() == (
        find_checkpoint(tmp_path / "run") / "vocabulary.txt"
    ).read_text()


def _refused(folder: Path, more: tuple[str, ...], error: type[Exception], message: str, resume: bool = True) -> None:
    with pytest.raises(error, match=message):
        _run(folder, "run", resume, *more)


def test_other_text_and_other_words_are_refused_when_a_run_is_resumed(tmp_path: Path) -> None:
    stop = ("schedule.stop_after=2",)
    run_ranks(_runs, 1, tmp_path, [("run", False, stop)])
    (tmp_path / "text.txt").write_text((tmp_path / "text.txt").read_text() * 2)
    changed = r"trained on other text than this job reads; data\.allow_change=true"
    run_ranks(_refused, 1, tmp_path, ("data.min_count=4",), CheckpointError, changed)
    run_ranks(_refused, 1, tmp_path, ("data.max_vocabulary=8",), CheckpointError, r"another architecture: input has")
    assert run_ranks(_runs, 1, tmp_path, [("run", True, ("data.min_count=4", "data.allow_change=true"))]) == [[0]]


def test_other_words_of_the_same_number_are_refused_when_a_run_is_resumed(tmp_path: Path) -> None:
    run_ranks(_runs, 1, tmp_path, [("run", False, ("schedule.stop_after=2",))])
    (tmp_path / "text.txt").write_text((tmp_path / "text.txt").read_text().replace("the1", "tho1"))
    more = ("data.allow_change=true",)
    run_ranks(_refused, 1, tmp_path, more, CheckpointError, "trained with another vocabulary")


def test_jobs_that_cannot_run_are_refused(tmp_path: Path) -> None:
    run_ranks(_refused, 1, tmp_path, ("negatives.number=999",), ConfigError, r"negatives\.number 999 is not", False)
    message = r"batch\.micro: 512: input should be None"
    run_ranks(_refused, 1, tmp_path, ("batch.micro=512",), ConfigError, message, False)


class CountedExchanges:
    """Counts the exchanges of rows in its block."""

    def __enter__(self) -> CountedExchanges:
        self.number, self._whole = 0, distributed.all_to_all
        distributed.all_to_all = self._counted  # type: ignore[assignment]
        return self

    def _counted(self, *args: Any) -> Any:
        self.number += 1
        return self._whole(*args)

    def __exit__(self, *error: object) -> None:
        distributed.all_to_all = self._whole


def _exchanged(rows: int, asked: list[list[int]]) -> dict[str, Any]:
    import torch

    rank = distributed.rank()
    exchange = RowExchange(rows)
    whole = torch.arange(2.0 * rows).view(rows, 2)
    ids = torch.tensor(asked[rank], dtype=torch.int64)
    borrowed = exchange.borrow(whole[exchange.start : exchange.end], ids)
    one, ten = ids[:, None] + 1.0, (ids[:, None] + 1.0) * 10.0 * (rank + 1)
    with CountedExchanges() as exchanges:
        mine, values = exchange.give_back(borrowed, one, ten)
    assert exchanges.number == (1 if distributed.world_size() > 1 else 0), "they travel together"
    total = torch.zeros(exchange.end - exchange.start, 2).index_add_(0, mine, torch.cat(values, dim=1))
    return {"fetched": borrowed.rows[borrowed.place].numpy(), "total": total.numpy()}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_come_from_their_owners_and_gradients_return_to_them(world: int) -> None:
    """Eighty rows on four ranks leave the last one none; a rank may ask for none, or for one row twice."""
    asked = [[64, 0, 64, 32], [], [50, 50, 20], [0]][:world]
    found = run_ranks(_exchanged, world, 80, asked)
    expected = np.zeros((80, 2))
    for rank, ids in enumerate(asked):
        np.testing.assert_array_equal(found[rank]["fetched"], [[2 * i, 2 * i + 1] for i in ids] or np.zeros((0, 2)))
        for i in ids:
            expected[i] += ((i + 1), (i + 1) * 10 * (rank + 1))
    np.testing.assert_array_equal(np.concatenate([part["total"] for part in found]), expected)


def _fresh(words: int) -> np.ndarray:
    tables = EmbeddingTables(words, 4, 3)
    return tables.input.detach().numpy()


def test_tables_start_alike_on_any_number_of_ranks() -> None:
    (alone,) = run_ranks(_fresh, 1, 9001)
    assert np.array_equal(np.concatenate(run_ranks(_fresh, 3, 9001)), alone)

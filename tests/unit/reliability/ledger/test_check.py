"""Ledgers of any history of kills, resumes and numbers of ranks pass; each way to use samples wrongly is found."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.errors import UserError
from capt.pretrain.reliability.ledger import files
from capt.pretrain.reliability.ledger.check import as_json, as_text, check
from capt.pretrain.reliability.ledger.files import ROW, Header, LedgerWriter, read_launch
from tests.support import Capt
from tests.unit.reliability.ledger.histories import BATCH, MIXED, ORDER, checkpoint, edit, file_of, launch

_WORLDS = (1, 2, 3, 4, 6)


@pytest.mark.parametrize("seed", range(40))
def test_every_history_of_kills_passes(tmp_path: Path, seed: int) -> None:
    """Ranks that are killed are not equally far; the next launch begins with any checkpoint that is not older."""
    draw = random.Random(seed)
    order = MIXED if seed >= 30 else ORDER
    committed = 0
    for _ in range(draw.randint(1, 8)):
        world = draw.choice(_WORLDS)
        ends = [committed + draw.randint(0, 7)] * world
        if draw.random() < 0.7:  # a step ends after collectives: nobody is two steps ahead
            ends = [max(committed, end - draw.randint(0, 1)) for end in ends]
        launch(tmp_path, world, committed, ends, order=order)
        for rank in range(world):
            if draw.random() < 0.3:
                with file_of(tmp_path, len(list((tmp_path / "ledger").iterdir())), rank).open("ab") as file:
                    file.write(draw.choice([b"\x07" * draw.randint(1, ROW.itemsize - 1), bytes(ROW.itemsize * 3)]))
        committed = draw.randint(committed, min(ends))
    if committed:
        checkpoint(tmp_path, committed)
    report = check(tmp_path)
    assert report.faults == []
    assert report.recorded_to >= committed
    used = sum((epochs.last - epochs.first + 1) * epochs.used for epochs in report.epochs)
    assert used == report.recorded_to * BATCH


def test_epochs_of_a_mixture_are_those_of_its_sources(tmp_path: Path) -> None:
    launch(tmp_path, 2, 0, [6, 6], order=MIXED)
    launch(tmp_path, 3, 5, [14, 14, 14], order=MIXED)
    checkpoint(tmp_path, 14)
    report = check(tmp_path)
    epochs = [(each.source, each.first, each.last, each.used, each.ids) for each in report.epochs]
    assert [each for each in epochs if each[0] == "b"] == [("b", 0, 2, 7, 7)], "it has three epochs and no more"
    assert {each[0] for each in epochs} == {"a", "b", "c"}
    assert sum((last - first + 1) * used for _, first, last, used, _ in epochs) == 14 * BATCH
    text = as_text(report)
    assert "  b\n" in text
    assert "right" in text
    assert as_json(report)["epochs"][0]["source"] == "a"


def test_a_sample_of_another_source_is_found(tmp_path: Path) -> None:
    def feed(step: int, rank: int, samples: np.ndarray) -> np.ndarray:
        return samples + (step == 4) * 12 if rank == 1 else samples

    launch(tmp_path, 2, 0, [6, 6], order=MIXED, feed=feed)
    fault = _first(tmp_path)
    assert (fault.kind, fault.step, fault.rank) == ("ids", 4, 1)


def test_epochs_are_counted(tmp_path: Path) -> None:
    launch(tmp_path, 2, 0, [6, 6])
    launch(tmp_path, 3, 5, [14, 14, 14])
    checkpoint(tmp_path, 14)
    (whole, last) = check(tmp_path).epochs
    assert (whole.first, whole.last, whole.used) == (0, 2, 53)
    assert (last.first, last.used, last.ids) == (3, 14 * BATCH - 3 * 53, 53)


def _history(run: Path, **changes: Any) -> None:
    """Two ranks, killed after step 7, resumed from step 5 by one, done after step 12."""
    launch(run, 2, 0, [7, 7], **changes)
    launch(run, 1, 5, [12])
    checkpoint(run, 10)
    checkpoint(run, 12)


def _first(run: Path, since: int = 1) -> Any:
    report = check(run, since)
    assert report.faults, "nothing was found"
    return report.faults[0]


def _exchange(step: int, rank: int, by: int) -> Any:
    def feed(at: int, of: int, samples: np.ndarray) -> np.ndarray:
        if (at, of) == (step, rank):
            samples = samples.copy()
            samples[2] = by
        return samples

    return feed


def test_an_id_that_comes_twice_is_named(tmp_path: Path) -> None:
    _history(tmp_path, feed=_exchange(4, 1, by=0))
    fault = _first(tmp_path)
    (twice,) = [int(i) for i in _ids([0])]
    assert (fault.kind, fault.step, fault.rank, fault.id) == ("ids", 4, 1, twice)
    (never,) = [int(i) for i in _ids([3 * BATCH + 5])]
    assert f"id {twice} was used in the place of id {never}" in fault.text
    assert fault.file == file_of(tmp_path, 1, 1)
    assert "a new run does these steps again" in fault.remedy


def _ids(samples: list[int]) -> np.ndarray:
    from capt.pretrain.data.sampler import Sampler

    return Sampler(ORDER.samples, ORDER.seed).locate(np.array(samples))[1]


@pytest.mark.parametrize("much", [-1, 1])
def test_an_id_too_few_or_too_many_is_named(tmp_path: Path, much: int) -> None:
    def feed(step: int, rank: int, samples: np.ndarray) -> np.ndarray:
        if (step, rank) != (4, 0):
            return samples
        return samples[1:] if much < 0 else np.append(samples, samples[0])

    _history(tmp_path, feed=feed)
    fault = _first(tmp_path)
    assert (fault.kind, fault.step, fault.rank) == ("ids", 4, 0)
    assert fault.id == int(_ids([3 * BATCH])[0])
    assert ("was not used" if much < 0 else "once too often") in fault.text


def test_a_resume_that_begins_the_epoch_again_is_found(tmp_path: Path) -> None:
    """verl#7401, accelerate#2016: after a resume the loader replays the data from its beginning."""
    launch(tmp_path, 2, 0, [7, 7])
    launch(tmp_path, 2, 5, [9, 9], feed=lambda step, rank, samples: samples - 5 * BATCH)
    checkpoint(tmp_path, 9)
    fault = _first(tmp_path)
    assert (fault.kind, fault.step, fault.rank, fault.id) == ("ids", 6, 0, None)
    shutil.rmtree(tmp_path)
    launch(tmp_path, 2, 0, [7, 7])
    launch(tmp_path, 2, 5, [9, 9], samples=0)
    fault = _first(tmp_path)
    assert (fault.kind, fault.step) == ("position", 6)
    assert "launch 2 begins step 6 at sample 0, not 60" in fault.text


def test_a_fault_in_a_step_that_was_done_again_is_noted(tmp_path: Path) -> None:
    """The model has not learnt from it; and the contents of that step are not compared."""
    _history(tmp_path, feed=_exchange(6, 1, by=0))
    report = check(tmp_path)
    assert report.faults == []
    assert ["step 6" in note and "done again" in note for note in report.notes] == [True]


def test_a_step_with_other_contents_is_found(tmp_path: Path) -> None:
    _history(tmp_path)

    def change(rows: np.ndarray) -> np.ndarray:
        rows["contents"][1] += 1
        return rows

    edit(file_of(tmp_path, 2, 0), change)
    fault = _first(tmp_path)
    assert (fault.kind, fault.step, fault.rank) == ("contents", 7, None)
    assert "launch 2 than by launch 1" in fault.text
    launch(tmp_path, 1, 6, [12])  # the same step a third time, now as at first: the second differs from both
    assert [(f.kind, f.step) for f in check(tmp_path).faults] == [("contents", 7)] * 2
    assert check(tmp_path).faults[1].rank == 0, "between launches of one size the rank is known"


def test_other_noise_is_meant_to_make_other_contents(tmp_path: Path) -> None:
    _history(tmp_path)
    noise = ORDER.model_copy(update={"noise": "a higher rate"})

    def other(step: int, rank: int, samples: np.ndarray) -> np.ndarray:
        return samples

    launch(tmp_path, 1, 10, [12], order=noise, feed=other)
    edit(file_of(tmp_path, 3, 0), _with_other_contents)
    assert check(tmp_path).faults == []


def _with_other_contents(rows: np.ndarray) -> np.ndarray:
    rows["contents"] += 1
    return rows


def test_another_seed_within_an_epoch_is_found(tmp_path: Path) -> None:
    launch(tmp_path, 2, 0, [7, 7])
    launch(tmp_path, 2, 5, [9, 9], order=ORDER.model_copy(update={"seed": 4}))
    fault = _first(tmp_path)
    assert (fault.kind, fault.step) == ("order", 6)
    assert "run.seed 4, before 3" in fault.text


def test_other_data_begin_the_epochs_anew(tmp_path: Path) -> None:
    launch(tmp_path, 2, 0, [7, 7])
    launch(tmp_path, 2, 5, [9, 9], order=ORDER.model_copy(update={"data": "more text", "samples": 97}))
    report = check(tmp_path)
    assert report.faults == []
    assert "from step 6 (launch 2) on other data" in report.notes[0]
    assert [epochs.ids for epochs in report.epochs] == [53, 53, 97, 97]


def _without(step: int) -> Any:
    return lambda rows: rows[rows["step"] != step]


def test_a_hole_is_found_wherever_it_is(tmp_path: Path) -> None:
    _history(tmp_path)
    for number, rank, step in ((1, 1, 1), (1, 0, 3), (1, 1, 5), (2, 0, 6), (2, 0, 8), (2, 0, 12)):
        path = file_of(tmp_path, number, rank)
        whole = path.read_bytes()
        edit(path, _without(step))
        fault = _first(tmp_path)
        assert (fault.kind, fault.step, fault.rank, fault.file) == ("hole", step, rank, path)
        path.write_bytes(whole)
    edit(file_of(tmp_path, 1, 0), _without(7))  # which no checkpoint contains
    assert check(tmp_path).faults == []


def test_steps_that_do_not_grow_are_found(tmp_path: Path) -> None:
    _history(tmp_path)
    edit(file_of(tmp_path, 1, 0), lambda rows: rows[[0, 1, 2, 1, 2, 3, 4, 5, 6]])
    fault = _first(tmp_path)
    assert (fault.kind, fault.step, fault.rank) == ("steps", 4, 0)
    assert "step 2 is recorded after step 3" in fault.text


def test_lost_files_are_found(tmp_path: Path) -> None:
    _history(tmp_path)
    file_of(tmp_path, 1, 1).unlink()
    fault = _first(tmp_path)
    assert (fault.kind, fault.rank) == ("damaged", 1)
    assert "rank 1 of 2 has no ledger" in fault.text
    shutil.rmtree(file_of(tmp_path, 1, 0).parent)
    faults = check(tmp_path).faults
    assert {fault.kind for fault in faults} == {"hole"}
    assert "the ledger of launch 1 is not there" in faults[0].text
    assert check(tmp_path, since=5).faults, "launch 2 began after step 5, which the lost one has done"
    assert check(tmp_path, since=6).faults == []


def test_the_beginning_may_be_taken_as_it_is(tmp_path: Path) -> None:
    """A run began without a ledger: ``since`` names the first step that is checked."""
    launch(tmp_path, 1, 5, [12])
    checkpoint(tmp_path, 12)
    fault = _first(tmp_path)
    assert (fault.kind, fault.step) == ("hole", 1)
    assert "--since 6" in fault.remedy
    assert check(tmp_path, since=6).faults == []
    edit(file_of(tmp_path, 1, 0), _without(9))
    assert _first(tmp_path, since=6).step == 9
    assert check(tmp_path, since=10).faults == []


def test_the_ledger_may_have_been_off_for_a_while(tmp_path: Path) -> None:
    launch(tmp_path, 2, 0, [5, 5])
    launch(tmp_path, 2, 10, [14, 14])
    checkpoint(tmp_path, 14)
    fault = _first(tmp_path)
    assert (fault.kind, fault.step, fault.rank) == ("hole", 6, 0)
    assert "or run.ledger was false" in fault.remedy
    assert _first(tmp_path, since=10).step == 10
    assert check(tmp_path, since=11).faults == []


def test_a_damaged_launch_may_be_passed_over(tmp_path: Path) -> None:
    _history(tmp_path)
    file_of(tmp_path, 1, 0).write_bytes(b"[]\n")
    assert _first(tmp_path, since=5).kind == "damaged"
    assert check(tmp_path, since=6).faults == []


def test_a_checkpoint_of_other_samples_is_found(tmp_path: Path) -> None:
    launch(tmp_path, 1, 0, [12])
    checkpoint(tmp_path, 12, samples=12 * BATCH + 1)
    fault = _first(tmp_path)
    assert (fault.kind, fault.step) == ("position", 12)


def test_steps_of_a_checkpoint_that_nobody_recorded_are_a_hole(tmp_path: Path) -> None:
    launch(tmp_path, 2, 0, [7, 6])
    checkpoint(tmp_path, 7)
    fault = _first(tmp_path)
    assert (fault.kind, fault.step, fault.rank) == ("hole", 7, 1)


@pytest.mark.parametrize("left", ["header", "nothing", "no file"])
def test_where_all_rows_are_lost_nothing_is_right(tmp_path: Path, left: str) -> None:
    """A disk that was restored may leave no rows: then there is nothing wrong in any row either."""
    launch(tmp_path, 2, 0, [7, 7])
    checkpoint(tmp_path, 7)
    for path in (file_of(tmp_path, 1, rank) for rank in (0, 1)):
        path.write_bytes(path.read_bytes().partition(b"\n")[0] + b"\n" if left == "header" else b"")
        if left == "no file":
            path.unlink()
    (fault,) = check(tmp_path).faults
    assert (fault.kind, fault.step) == ("hole", 1)
    assert "a checkpoint contains steps up to 7" in fault.text
    assert check(tmp_path, since=8).faults == []


def test_folders_of_odd_numbers_cost_no_time(tmp_path: Path) -> None:
    _history(tmp_path)
    shutil.copytree(file_of(tmp_path, 2, 0).parent, tmp_path / "ledger" / "launch-999999999")
    fault = _first(tmp_path, since=1)
    assert "the ledger of launches 3 to 999999998 is not there, but that of launch 999999999 is" in fault.text


def test_a_header_of_impossible_numbers_is_damaged_and_costs_no_memory(tmp_path: Path) -> None:
    launch(tmp_path, 1, 0, [7], left_out=1)
    assert "1 of the first 0 samples are left out" in _first(tmp_path).text
    path = file_of(tmp_path, 1, 0)
    path.write_bytes(
        path.read_bytes().replace(b'"left_out":1', b'"left_out":0').replace(b'"batch":12', b'"batch":%d' % 2**31)
    )
    assert "(12 and not 2147483648)" in _first(tmp_path).text
    path.write_bytes(path.read_bytes().replace(b'"step":0', b'"step":%d' % 2**62, 1))
    assert "step: Input should be less than" in _first(tmp_path).text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[1, 2]\n", "damaged or of another version"),
        (b'{"format": 2}\n', "damaged or of another version"),
        (b"\xff\xfe\n", "the first line is not a header"),
        (b"x" * 70_000, "the first line is not a header"),
    ],
)
def test_what_is_no_ledger_is_said(tmp_path: Path, content: bytes, says: str) -> None:
    _history(tmp_path)
    file_of(tmp_path, 1, 0).write_bytes(content)
    fault = _first(tmp_path)
    assert fault.kind == "damaged"
    assert says in fault.text


def test_headers_that_contradict_each_other_are_found(tmp_path: Path) -> None:
    _history(tmp_path)
    path = file_of(tmp_path, 1, 1)
    path.write_bytes(path.read_bytes().replace(b'"samples":0', b'"samples":12', 1))
    fault = _first(tmp_path)
    assert (fault.kind, fault.rank) == ("damaged", 1)


def test_a_launch_that_was_killed_before_its_first_step_changes_nothing(tmp_path: Path) -> None:
    launch(tmp_path, 2, 0, [7, 7])
    launch(tmp_path, 2, 5, [5, 5])
    file_of(tmp_path, 2, 1).write_bytes(b'{"form')
    launch(tmp_path, 2, 5, [9, 9])
    checkpoint(tmp_path, 8)
    report = check(tmp_path)
    assert report.faults == []
    assert [each.number for each in report.launches] == [1, 3]


def test_capt_ledger_check(tmp_path: Path, capt: Capt) -> None:
    code, _, err = capt("ledger", "check", tmp_path)
    assert code == 2
    assert "is not a run folder: it has no config.yaml" in err
    (tmp_path / "config.yaml").write_text("task: {type: toy}\n")
    code, _, err = capt("ledger", "check", tmp_path)
    assert code == 2
    assert "there is no ledger" in err
    _history(tmp_path)
    code, text, _ = capt("ledger", "check", tmp_path)
    assert code == 0
    assert [line.split() for line in text.splitlines()[1:3]] == [["1", "2", "1-7", "1-5"], ["2", "1", "6-12", "6-12"]]
    assert "each id once an epoch" in text
    edit(file_of(tmp_path, 2, 0), _without(8))
    code, text, _ = capt("ledger", "check", tmp_path)
    said = text.splitlines()
    assert code == 1
    assert said[-2].startswith("WRONG: step 8 is not recorded")
    assert "put back the files" in said[-1]
    code, text, _ = capt("ledger", "check", tmp_path, "--json")
    answer = json.loads(text)
    assert code == 1
    assert (answer["right"], answer["committed_to"]) == (False, 12)
    assert (answer["faults"][0]["step"], answer["faults"][0]["rank"]) == (8, 0)


def test_a_ledger_that_is_a_fifo_or_a_folder_is_refused(tmp_path: Path) -> None:
    _history(tmp_path)
    path = file_of(tmp_path, 2, 0)
    path.unlink()
    path.mkdir()
    assert _first(tmp_path).kind == "damaged"
    with pytest.raises(UserError):
        check(tmp_path / "nowhere")


def test_the_file_of_one_rank_after_the_other_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million steps of 1,024 ranks are 20 GB."""
    launch(tmp_path, 4, 0, [9, 9, 9, 9])
    launch(tmp_path, 4, 6, [12, 12, 12, 12])
    checkpoint(tmp_path, 12)
    real, read, most = files._read_file, [], 0

    def counted(path: Path, rank: int) -> files.LedgerFile | None:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in read))
        file = real(path, rank)
        assert file is not None
        read.append(weakref.ref(file.rows))
        return file

    monkeypatch.setattr(files, "_read_file", counted)
    report = check(tmp_path)
    assert (report.faults, report.recorded_to) == ([], 12)
    assert len(read) == 8
    assert most <= 1


def test_a_row_that_cannot_be_written_waits_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk took half of a row: the other half comes later; and the error names the file."""
    folder = tmp_path / "ledger" / "launch-0001"
    folder.mkdir(parents=True)
    head = Header(rank=0, world=1, step=0, samples=0, batch=BATCH, order=ORDER)
    writer, write = LedgerWriter(folder, head), os.write
    room = [7, 0]

    def full(file: int, content: bytes) -> int:
        if not (left := room.pop(0) if room else len(content)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content[:left])

    monkeypatch.setattr("os.write", full)
    with pytest.raises(OSError, match=r"rank-00000\.ledger"):
        writer.append(1, 12, 5, 6)
    writer.append(2, 12, 7, 8)
    monkeypatch.undo()
    writer.close()
    (file,) = read_launch(folder)
    assert file.rows.tolist() == [(1, 12, 5, 6), (2, 12, 7, 8)]


def test_going_back_takes_back_all_launches_since(tmp_path: Path) -> None:
    """``capt resume RUN --checkpoint``: another future begins, and what was wrong in the earlier one is only noted."""
    launch(tmp_path, 2, 0, [10, 10], feed=_exchange(6, 0, by=1))
    launch(tmp_path, 3, 8, [12, 12, 12])
    launch(tmp_path, 1, 3, [9])
    checkpoint(tmp_path, 3)
    checkpoint(tmp_path, 9)
    report = check(tmp_path)
    assert report.faults == []
    assert [each.kept for each in report.launches] == [3, 0, 6]
    assert sum((each.last - each.first + 1) * each.used for each in report.epochs) == 9 * BATCH
    assert ["step 6" in note for note in report.notes] == [True]

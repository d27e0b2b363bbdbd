"""Batches: the same samples and the same noise for any world size, worker count and restart."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from capt.pretrain.base.errors import DataError, is_passing
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.config.schema import LoaderSection
from capt.pretrain.data.corruption import IGNORE
from capt.pretrain.data.sampler import micro_batches
from capt.pretrain.engine import interruption, loading
from capt.pretrain.engine.interruption import StopSignals
from capt.pretrain.engine.loading import LoaderFailedError, training_batches
from capt.pretrain.language.batches import LanguageAssembler, LanguageBatch, validation_batches
from capt.pretrain.language.prepare import PreparedLanguage, prepare
from tests.language import language_mapping


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedLanguage:
    folder = tmp_path_factory.mktemp("batches")
    return prepare(job_from_mapping(language_mapping(folder), "test"))  # type: ignore[arg-type]


def _assembler(prepared: PreparedLanguage, *, cross: bool = True) -> LanguageAssembler:
    return LanguageAssembler(
        prepared.train, prepared.corruptor, seed=3, stream="corruption/train", shuffle=True,
        pad_id=prepared.tokenizer.special.pad, cross_document_attention=cross,
    )  # fmt: skip


def _steps(assembler: LanguageAssembler, *shape: int) -> Callable[[int], list[LanguageBatch]]:
    return lambda start: [assembler(samples) for samples in micro_batches(start, *shape)]


def _epochs(
    prepared: PreparedLanguage, world: int, start: int, steps: int, workers: int = 0
) -> list[dict[int, LanguageBatch]]:
    """Per step: sample rows by global sample number, over all ranks and micro-batches."""
    size, micro = 12, 12 // world // (2 if world < 4 else 1)
    taken: list[dict[int, LanguageBatch]] = [{} for _ in range(steps)]
    for rank in range(world):
        starts = range(start, start + steps * size, size)
        shape = (size, size // (micro * world), world, rank)
        loader = LoaderSection(workers=workers, prefetch=2)
        for step, parts in enumerate(training_batches(_steps(_assembler(prepared), *shape), starts, loader)):
            for index, part in enumerate(parts):
                for row in range(micro):
                    base = starts[step] + index * micro * world
                    sample = next(g for g in range(base, base + micro * world) if g % world == rank) + row * world
                    only = slice(row, row + 1)
                    taken[step][sample] = LanguageBatch(
                        part.tokens[only], part.corrupted[only], part.positions[only], part.labels[only],
                        part.ids[only], part.padded,
                    )  # fmt: skip
    return taken


def _same(a: LanguageBatch, b: LanguageBatch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "corrupted", "labels", "ids"))


@pytest.mark.parametrize(("world", "workers"), [(2, 0), (4, 0), (1, 2), (3, 1)])
def test_a_step_holds_the_same_samples_whoever_loads_them(prepared: PreparedLanguage, world: int, workers: int) -> None:
    reference = _epochs(prepared, 1, start=5, steps=3)
    other = _epochs(prepared, world, start=5, steps=3, workers=workers)
    for a, b in zip(reference, other, strict=True):
        assert a.keys() == b.keys()
        assert all(_same(a[sample], b[sample]) for sample in a)


def test_resuming_in_the_middle_of_an_epoch_continues_it(prepared: PreparedLanguage) -> None:
    whole = _epochs(prepared, 1, start=0, steps=6)
    rest = _epochs(prepared, 2, start=36, steps=3)
    assert [sorted(step) for step in rest] == [sorted(step) for step in whole[3:]]
    assert all(_same(a[g], b[g]) for a, b in zip(rest, whole[3:], strict=True) for g in a)


def test_an_epoch_shows_every_window_once_and_noise_changes_between_epochs(prepared: PreparedLanguage) -> None:
    n = len(prepared.train)
    assemble = _assembler(prepared)
    first, second = assemble(np.arange(n)), assemble(np.arange(n, 2 * n))
    assert sorted(first.ids.tolist()) == sorted(second.ids.tolist()) == list(range(n))
    assert first.ids.tolist() != second.ids.tolist()
    order = first.ids.argsort(), second.ids.argsort()
    assert torch.equal(first.tokens[order[0]], second.tokens[order[1]])
    assert not torch.equal(first.corrupted[order[0]], second.corrupted[order[1]])


def test_labels_are_the_original_tokens(prepared: PreparedLanguage) -> None:
    batch = _assembler(prepared)(np.arange(20))
    used = batch.labels != IGNORE
    assert used.float().mean() > 0.9
    originals = batch.tokens.gather(1, batch.positions)
    assert torch.equal(originals[used], batch.labels[used])
    assert batch.tokens.ne(batch.corrupted).any(1).float().mean() > 0.9  # a chosen token may also be kept


def test_documents_are_numbered_where_attention_must_not_cross(prepared: PreparedLanguage) -> None:
    batch = _assembler(prepared, cross=False)(np.arange(4))
    assert batch.documents is not None
    assert (batch.documents.diff(dim=1) >= 0).sum() >= 4 * 30
    assert batch.to(torch.device("cpu")).runs == sum(len(row.unique_consecutive()) for row in batch.documents)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_validation_counts_each_sample_once_and_ranks_agree_on_the_number_of_batches(
    prepared: PreparedLanguage, world: int
) -> None:
    ids, counts = [], []
    for rank in range(world):
        batches = list(validation_batches(_assembler(prepared), 11, 2, world, rank))
        counts.append([len(batch.tokens) for batch, _ in batches])
        for batch, counted in batches:
            ids += batch.ids[:counted].tolist()
            assert (batch.labels[counted:] == IGNORE).all()
    assert all(count == counts[0] for count in counts)
    expected = _assembler(prepared)(np.arange(11)).ids.tolist()
    assert sorted(ids) == sorted(expected)


class _Stuck(LanguageAssembler):
    """An assembler whose worker hangs, dies, or fails at the third step."""

    def __init__(self, prepared: PreparedLanguage, what: str) -> None:
        super().__init__(
            prepared.train, prepared.corruptor, seed=3, stream="s", shuffle=True, pad_id=1,
            cross_document_attention=True,
        )  # fmt: skip
        self.what = what

    def __call__(self, samples: np.ndarray) -> LanguageBatch:
        if samples[0] >= 8:
            if self.what == "hangs":
                time.sleep(60)
            if self.what == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, "Input/output error", "shard-00000.bin")
        return super().__call__(samples)


def _all(prepared: PreparedLanguage, what: str, **loader: float) -> int:
    shape = (4, 2, 1, 0)
    section = LoaderSection(workers=1, prefetch=1, **loader)  # type: ignore[arg-type]
    return len(list(training_batches(_steps(_Stuck(prepared, what), *shape), range(0, 16, 4), section)))


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        (
            "hangs",
            LoaderFailedError,
            r"no data for \d s: loader worker 0 of 1 has not answered.*loader\.timeout_minutes",
        ),
        ("dies", LoaderFailedError, r"a loader worker has died .*Killed.*: the host's memory is full"),
        ("fails", DataError, r"^shard-00000\.bin: Input/output error; the device is failing: look at dmesg$"),
    ],
)
def test_data_that_does_not_come_is_an_error_that_names_the_cause(
    prepared: PreparedLanguage, what: str, kind: type[Exception], words: str
) -> None:
    """A fault of the machine (exit code 1, started again) is not one of the input (exit code 2)."""
    with pytest.raises(kind, match=words) as caught:
        _all(prepared, what, timeout_minutes=0.02)
    assert is_passing(caught.value)


def test_a_stop_signal_ends_the_wait_for_data(prepared: PreparedLanguage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_GRACE", 0.5)
    signals = StopSignals()
    signals.install()
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        begin = time.monotonic()
        with pytest.raises(interruption.Interrupted, match="SIGTERM or Ctrl-C received while no data came"):
            _all(prepared, "hangs")
        assert time.monotonic() - begin < 60  # the loader itself would wait for minutes
    finally:
        signals.received = 0
        signals.restore()
        interruption.record_signal(0)
        interruption._State.reason = ""


def test_descriptors_do_not_grow_with_the_accumulation(prepared: PreparedLanguage) -> None:
    def most(micro_batches: int) -> int:
        size, open_files = 2 * micro_batches, 0
        loader = LoaderSection(workers=1, prefetch=4)
        for _ in training_batches(_steps(_assembler(prepared), size, 2, 1, 0), range(0, 3 * size, size), loader):
            open_files = max(open_files, len(os.listdir("/proc/self/fd")))
        return open_files

    # The number of batches in the queue is chance, and each holds a descriptor per tensor; a leak holds at least one
    # per micro-batch.
    assert most(64) < most(2) + (64 - 2)

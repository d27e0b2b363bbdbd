"""Prepare a corpus of any size: in units that processes of any number of hosts take, each finished once.

The folder ``.work`` in the result holds what is done: the hashes of the files of text, a part for each unit
(``capt.pretrain.data.parts``), the choice among duplicates, and the files of the shard sets. Each appears whole, by a
rename, and is not made again. So a process that is killed loses the unit that it was at, and the result does not depend
on who made what. The files of shard sets for a store are uploaded one by one (``capt.pretrain.data.targets``).
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from capt.pretrain.base.arrays import map_whole
from capt.pretrain.base.atomic import new_folder
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import read_json, write_json, write_text
from capt.pretrain.base.leases import LeasedTask, Leases
from capt.pretrain.base.parallel import ProgressCallback, run_alike
from capt.pretrain.base.records import read_record
from capt.pretrain.base.stores import StoreFile
from capt.pretrain.base.verification import Verifier, file_state, hash_file
from capt.pretrain.data.card import Card, card_of, write_card
from capt.pretrain.data.corpus import Corpus, Piece
from capt.pretrain.data.duplicates import choose
from capt.pretrain.data.files import FileCorpus, no_text, source_record
from capt.pretrain.data.formats import TextFile
from capt.pretrain.data.parts import PART, PartRecord, SourceCounts, write_part
from capt.pretrain.data.paths import identity
from capt.pretrain.data.shard_writer import ShardStream, source_records, write_file
from capt.pretrain.data.shards import MANIFEST, ShardManifest, ShardSet, TokenizerRecord, token_dtype
from capt.pretrain.data.sources import Split, source_of
from capt.pretrain.data.targets import WrittenFile, target_of
from capt.pretrain.data.units import PreparationPlan, SourceFile, Unit, key_of, open_unit

logger = logging.getLogger(__name__)

WORK = ".work"
_FORM = 2
"""Changes with what a part holds and how units are cut: the unfinished work of another release is not continued."""
NO_VALIDATION = (
    "validation is off: the text is too short to hold out %s of it, by whole documents (in .txt a blank line ends one) "
    "or pieces of long ones; set data.validation_files, or a larger data.validation_fraction"
)
"""The warning where nothing is held out."""


def prepare_plan(
    plan: PreparationPlan, workers: int, verifier: Verifier, progress: ProgressCallback | None = None
) -> dict[Split, ShardSet]:
    """Make the shard sets of ``plan`` in its folder, by this process and ``workers`` in all; others may help.

    Shard sets that are there already are kept if they are the same.

    Raises:
        DataError: the text cannot be used, the folder holds other shard sets, or a worker was killed.
    """
    worker = PreparationWorker(plan)
    for split in plan.splits:
        worker.target.require_free(split)
    # The set is there: is it the same? Only the hashes of the text can tell.
    if worker.target.manifest(plan.splits[0]) is not None:
        worker.load_hashes(verifier)
        is_there = worker.is_finished()
    else:
        is_there = False
    if not is_there:
        # More processes than units would find nothing to do.
        workers = min(workers, max(1, len(plan.units)))
        if workers == 1:
            worker.run(progress)
        else:
            watch = (lambda: None) if progress is None else (lambda: progress(worker.bytes_done(), plan.size))
            run_alike(partial(_run, plan), workers, watch)
    shutil.rmtree(worker.folder, ignore_errors=True)
    found = [split for split in plan.splits if worker.target.manifest(split) is not None]
    return {split: worker.target.open(split, verifier, is_new=not is_there) for split in found}


def _run(plan: PreparationPlan) -> None:
    PreparationWorker(plan).run()


class PreparationWorker:
    """The work of a plan, as one process sees it."""

    def __init__(self, plan: PreparationPlan) -> None:
        self.plan, self.folder = plan, plan.out / (WORK if plan.splits[0] == "train" else f"{WORK}-{plan.splits[0]}")
        self.target = target_of(plan)
        self._contents: list[dict[str, str | int]] | None = None

    def run(self, progress: ProgressCallback | None = None) -> None:
        """Work until all is done, here or elsewhere."""
        plan = self.plan
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Each phase begins when every task of the one before is done, here or in another process.
            leases = Leases(self.folder / "leases")
            leases.share([self._hash_task(sources) for sources in self._hashed])
            if self.is_finished():
                return
            done = (lambda: None) if progress is None else (lambda: progress(self.bytes_done(), plan.size))
            leases.share([self._part_task(number) for number in range(len(self._parts))], done)
            leases.share([self._task("kept", self._kept.is_dir, self._write_kept)])
            leases.share([task for split in self._splits_to_write() for task in self._file_tasks(split)])
            leases.share([self._task("finish", self.is_finished, self._finish)])
        except FileNotFoundError as error:
            if not Path(error.filename or "").is_relative_to(self.folder):
                raise
            if self._contents is None:
                self.load_hashes(Verifier(plan.data.cache))
            if not self.is_finished():  # else another process has finished, and removed what it needs no more
                raise

    def bytes_done(self) -> int:
        """Bytes of the text whose parts are there."""
        with suppress(OSError, DataError):
            names = [part.name for part in (self._place / "parts").iterdir()]
            return sum(self.plan.units[int(name)].bytes for name in names if name.isdigit())
        return 0

    # ---- the text

    def load_hashes(self, verifier: Verifier) -> None:
        """Ask ``verifier``, which may remember them, for the hashes of the files."""
        if self.plan.units:
            data, files = self.plan.data, [source.file for source in self.plan.sources]
            corpus = FileCorpus(files, data.text_column, data.document_start, verifier)
            self._contents = corpus.contents()

    @property
    def _hashed(self) -> list[tuple[SourceFile, ...]]:
        """The files of this host, in groups that are hashed by one process; of those in a store the store tells."""
        found = (tuple(each for each in unit.sources if each.modified is not None) for unit in self.plan.units)
        return list(dict.fromkeys(sources for sources in found if sources))

    def _hash_record(self, sources: Sequence[SourceFile]) -> Path:
        state = json.dumps([[str(source.file), source.modified] for source in sources])
        return self.folder / "hashes" / f"{sha256(state.encode()).hexdigest()[:32]}.json"

    def _hash_task(self, sources: Sequence[SourceFile]) -> LeasedTask:
        record = self._hash_record(sources)

        def run() -> None:
            files = [source.file for source in sources if isinstance(source.file, Path)]
            write_json(record, [hash_file(file, file_state(file.stat()), None, None, DataError, "") for file in files])

        return LeasedTask(f"hash-{record.stem}", record.is_file, run)

    @property
    def contents(self) -> list[dict[str, str | int]]:
        """The record of each file."""
        if self._contents is None:
            if self.plan.units:
                files = [source.file for source in self.plan.sources]
                digests: dict[TextFile, str] = {file: identity(file) for file in files if isinstance(file, StoreFile)}
                for sources in self._hashed:
                    found = read_json(self._hash_record(sources))
                    digests |= zip((source.file for source in sources), found, strict=True)
                self._contents = [source_record(file, digests[file]) for file in files]
            else:
                self._contents = self._other_corpus.contents()
        return self._contents

    @cached_property
    def _other_corpus(self) -> Corpus:
        plan = self.plan
        return source_of(plan.data).open(plan.data, plan.splits[0], Verifier(plan.data.cache), None)

    def _corpus(self, number: int) -> Corpus:
        plan = self.plan
        if not plan.units:
            return self._other_corpus
        return open_unit(plan.units[number], plan.data, plan.unit_bytes) or _Nothing()

    # ---- keys and places

    def key(self, split: Split) -> str:
        """The key of a shard set."""
        return key_of(self.contents, self.plan.tokenizer, self.plan.options[split])

    @cached_property
    def _place(self) -> Path:
        keys = [self.key(split) for split in self.plan.splits]
        made_of = json.dumps([_FORM, keys, self.plan.unit_bytes, self.plan.shard_tokens])
        return self.folder / sha256(made_of.encode()).hexdigest()[:16]

    def _is_there(self, split: Split) -> bool:
        manifest = self.target.manifest(split)
        if manifest is not None and manifest.key != self.key(split):
            raise DataError(
                f"{self.target.place(split)} holds other shards than this job makes: take another folder, or remove it"
            )
        return manifest is not None

    def is_finished(self) -> bool:
        """Return whether the shard sets are there. That of the first split is the last one that is put there.

        Raises:
            DataError: there are others.
        """
        return self._is_there(self.plan.splits[0])

    def _task(self, name: str, is_done: Callable[[], bool], run: Callable[[], None]) -> LeasedTask:
        def run_once() -> None:
            try:
                run()
            except DataError:
                if not is_done():  # else a process that took this one for dead has made the same
                    raise

        return LeasedTask(f"{self._place.name}-{name}", is_done, run_once)

    def _part_task(self, number: int) -> LeasedTask:
        return self._task(f"part-{number:06}", self._part(number).is_dir, partial(self._write_part, number))

    def _part(self, number: int) -> Path:
        return self._place / "parts" / f"{number:06}"

    @property
    def _parts(self) -> list[Path]:
        return [self._part(number) for number in range(max(1, len(self.plan.units)))]

    @property
    def _kept(self) -> Path:
        return self._place / "kept"

    # ---- the tasks

    def _write_part(self, number: int) -> None:
        plan = self.plan
        with new_folder(self._part(number)) as folder:
            write_part(
                folder,
                self._corpus(number),
                plan.tokenizer,
                plan.filters,
                splits=plan.splits,
                held_out=plan.data.validation_fraction,
                has_first=number == 0,
            )
            # After the part is written: a file that changed on the way makes no part.
            if plan.units:
                _require_same(plan.units[number])

    @cached_property
    def _records(self) -> list[PartRecord]:
        return [read_record(PartRecord, part / PART, error=DataError) for part in self._parts]

    def _write_kept(self) -> None:
        """Decide which documents stay, and write for each split the tokens and documents of each part that do."""
        records = self._records
        with_text = {source for source, counts in self._by_source() if counts.documents}
        # A file in several units may have all its text in one of them.
        for source in self.plan.sources:
            if source not in with_text:
                raise no_text(source.file)
        with new_folder(self._kept) as folder:
            # Filters of single documents were applied in the parts; duplicates need all of them.
            kept = choose(self._parts, [record.kept for record in records]) if self.plan.filters.exact else None
            if kept is not None:
                kept.mask.tofile(folder / "mask")
                pair = list(kept.pair) if kept.pair is not None else []
                write_json(folder / "kept.json", {"removed": kept.removed, "pair": pair})
            for split in self.plan.splits:
                counts = [record.splits[split] for record in records]
                tokens = np.array([count.tokens for count in counts], dtype=np.int64)
                rows = [tokens, np.array([count.documents for count in counts], dtype=np.int64)]
                if kept is not None:
                    stream = ShardStream(self._parts, split, tokens, self._dtype, self._by_part(kept.mask))
                    # Tokens and documents of each part that stay.
                    rows = list(np.array([stream.counts(part) for part in range(len(counts))]).T)
                np.save(folder / f"{split}.npy", np.stack(rows))

    def _by_source(self) -> Iterator[tuple[SourceFile, SourceCounts]]:
        if self.plan.units:
            for unit, record in zip(self.plan.units, self._records, strict=True):
                yield from zip(unit.sources, record.sources, strict=True)

    def _by_part(self, mask: np.ndarray) -> list[np.ndarray]:
        ends = np.cumsum([record.kept for record in self._records])
        return np.split(mask, ends[:-1])

    @property
    def _dtype(self) -> np.dtype[np.unsignedinteger]:
        return token_dtype(self.plan.tokenizer.vocab_size)

    def _stream(self, split: Split) -> tuple[ShardStream, int]:
        """The stream of a split, and its number of documents."""
        tokens, documents = np.load(self._kept / f"{split}.npy", allow_pickle=False)
        mask = None
        if (file := self._kept / "mask").is_file() and file.stat().st_size:
            mask = self._by_part(map_whole(file, np.bool_))
        return ShardStream(self._parts, split, tokens, self._dtype, mask), int(documents.sum())

    def _splits_to_write(self) -> list[Split]:
        """The splits that have text and are not there, that of the training last."""
        found: list[Split] = []
        # `is_finished` looks at the training set, so it comes last.
        for split in reversed(self.plan.splits):
            if not self._is_there(split):
                if self._stream(split)[0].total:
                    found.append(split)
                elif split == self.plan.splits[0]:
                    names = ", ".join(str(part["name"]) for part in self.contents[:3])
                    raise DataError(
                        f"no text in {names}" + (" that the filters leave" if self.plan.filters.names else "")
                    )
        return found

    def _record_of(self, split: Split, name: str) -> Path:
        return self._place / "records" / f"{split}-{name}.json"

    def _gathered(self, split: Split) -> Path:
        return self._place / "sets" / split

    def _file_tasks(self, split: Split) -> list[LeasedTask]:
        stream, _ = self._stream(split)
        self._gathered(split).mkdir(parents=True, exist_ok=True)

        def task(name: str) -> LeasedTask:
            record = self._record_of(split, name)

            def run() -> None:
                # A name of its own: a process that was taken for dead may be making the same file.
                partial = self._place / "partial" / secrets.token_hex(8)
                partial.mkdir(parents=True)
                written = write_file(stream, name, self.plan.shard_tokens, partial)
                taken = self.target.take(split, partial / name, written, self._gathered(split))
                partial.rmdir()
                write_json(record, taken.model_dump())

            return LeasedTask(f"{self._place.name}-{record.stem}", record.is_file, run)

        return [task(name) for name in stream.files(self.plan.shard_tokens)]

    def _finish(self) -> None:
        """Put the shard sets and the data card into their places."""
        counts = {}
        for split in self.plan.splits:
            stream, documents = self._stream(split)
            counts[split] = (documents, stream.total)
        if len(counts) == 2 and not counts[self.plan.splits[1]][1]:
            logger.warning(NO_VALIDATION, self.plan.data.validation_fraction)
        writes_card = self.plan.splits[0] == "train"
        made = self._place / "made"  # what a killed writer leaves there goes nowhere
        for split in self._splits_to_write():
            stream, documents = self._stream(split)
            if writes_card and split == self.plan.splits[0]:
                write_card(made, self._card(counts))
                self.target.put_card(made)
            files = {
                name: read_record(WrittenFile, self._record_of(split, name))
                for name in stream.files(self.plan.shard_tokens)
            }
            if lost := self.target.lost(split, files):
                # Forget what was lost, so that the next run makes it again.
                for name in lost:
                    self._record_of(split, name).unlink()
                raise DataError(
                    f"{self.target.place(split)}/{lost[0]} was removed or replaced by something else; see to it that "
                    "nothing but this command writes there, and run it again"
                )
            manifest = ShardManifest(
                key=self.key(split),
                tokenizer=TokenizerRecord.from_tokenizer(self.plan.tokenizer),
                source=source_records(self._described()),
                options=self.plan.options[split],
                documents=documents,
                tokens=stream.total,
                shard_tokens=self.plan.shard_tokens,
                files=tuple(written.file for written in files.values()),
            )
            write_text(made / MANIFEST, manifest.model_dump_json(indent=1))
            self.target.finish(split, made / MANIFEST, self._gathered(split))

    def _card(self, counts: dict[Split, tuple[int, int]]) -> Card:
        compared = read_json(self._kept / "kept.json") if self.plan.filters.exact else {"removed": 0, "pair": ()}
        return card_of(self.plan, self._parts, self._records, self._described(), counts, **compared)

    def _described(self) -> list[dict[str, str | int]]:
        """The records of the sources, with the rows without text that were found."""
        without: dict[str, int] = {}
        for source, counts in self._by_source():
            without[str(source.file)] = without.get(str(source.file), 0) + counts.rows_without_text
        # Text that is not in files is one corpus with one record.
        if not self.plan.units:
            without[str(self.contents[0]["name"])] = self._records[0].sources[0].rows_without_text
        return [
            {**part, "rows_without_text": count} if (count := without.get(str(part["name"]), 0)) else part
            for part in self.contents
        ]


class _Nothing(Corpus):
    """The text of a unit in which no document begins."""

    size = 0

    def pieces(self) -> Iterator[Piece]:
        """Nothing."""
        return iter(())

    def contents(self) -> list[dict[str, str | int]]:
        """Nothing."""
        return []


def _require_same(unit: Unit) -> None:
    """Raise ``DataError`` if a file was written while it was prepared."""
    for source in unit.sources:  # the reader of those in a store has asked the store
        if isinstance(source.file, Path) and source.file.stat().st_mtime_ns != source.modified:
            raise DataError(
                f"{source.file} changed while it was read: see to it that nothing writes it, and start again"
            )

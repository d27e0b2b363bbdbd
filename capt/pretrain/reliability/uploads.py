"""Checkpoints in a store: every complete one is copied there, and a fresh machine continues from there alone.

``checkpoint.upload`` looks like the run folder: the job, metrics and ledger of the run, then ``checkpoints/step-...``.
A checkpoint's ``manifest.json`` is written last, so that one without it is none.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError, DataError, LockedError, RunFailedError, machines_at_fault
from capt.pretrain.base.files import replacing
from capt.pretrain.base.locks import file_lock
from capt.pretrain.base.stores import (
    StoreFile,
    chunks,
    is_url,
    look_up,
    put_bytes,
    put_file,
    remove_tree,
    tree,
    without_secrets,
)
from capt.pretrain.config.schema import Job
from capt.pretrain.engine import heartbeat, interruption
from capt.pretrain.engine.callbacks.averager import FOLDER as AVERAGE
from capt.pretrain.engine.checkpoint.layout import point, put_in_place, set_aside
from capt.pretrain.engine.loop import NEVER, Callback, Run
from capt.pretrain.engine.metrics_file import METRICS
from capt.pretrain.engine.run_folder import BEST, CONFIG, LOCK, PATIENCE, check_is_free, holds_run, read_best
from capt.pretrain.engine.step_folders import MANIFEST, checkpoints_of, step_folder, step_of, steps_of
from capt.pretrain.engine.task import StepMetrics

logger = logging.getLogger(__name__)

_RECORDS = (METRICS, BEST, "ledger", CONFIG)
"""Files and folders that a run continues with, beside its checkpoints."""
_LOOK = 0.2


class UploadError(RunFailedError):
    """The last checkpoint is in the run folder, and not in the store."""

    passing = True


class Uploads(Callback):
    """Copies each checkpoint to ``checkpoint.upload`` in the background; the last one before the run ends.

    Where the store takes longer than ``checkpoint.every``, the newest is copied next, then those that
    ``checkpoint.average`` will average, and after the last step the average. One that cannot be copied is lost there
    with an error in the log, and the run continues. What the run folder has removed is removed there too; checkpoints
    that a fresh machine has not fetched stay in the store.
    """

    follows = ("Checkpointer", "Averager")

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._averaged: list[int] = []
        self._uploaded: set[str] = set()
        """Names in the run folder of what is in the store: checkpoints and the average."""
        self._tried: set[str] = set()
        self._sizes: dict[str, int] = {}
        self._here: set[int] = set()
        """Steps whose checkpoints the run folder has had."""
        self._last_look = -1
        """`Run.committed` at the last look that found nothing to copy."""

    def before_folder(self, job: Job, *, resumes: bool) -> None:
        """Fetch the run from the store where the run folder has none, or has lost its newest checkpoint.

        Raises ``ConfigError`` and ``DataError``.
        """
        if job.checkpoint.upload is None or distributed.rank() != 0:
            return
        url, run_dir = job.checkpoint.upload.rstrip("/"), job.run.dir
        there = _complete(url)
        if not there:
            if not holds_run(run_dir):
                check_is_free(run_dir)
            put_bytes(b"", f"{url}/{CONFIG}")  # a store that cannot be written to is told before the first step
            return
        if not resumes:
            check_is_free(run_dir)
            raise ConfigError(
                f"checkpoint.upload: {without_secrets(url)} holds a run already; continue it with --resume auto, or "
                "name another address"
            )
        # A job that trains here has saved more than the store has; one that fetches is waited for.
        if holds_run(run_dir) and max(there) <= max(steps_of(run_dir), default=-1):
            return
        steps = {max(there), *job.checkpoint.averaged_steps(job.schedule.max_steps)}
        refusal = f"run.dir {run_dir}: another process fetches the run, or trains in this folder"
        lock = file_lock(run_dir / LOCK, refusal=refusal, wait=PATIENCE, error=LockedError)
        with machines_at_fault(lambda: True), lock:  # the store says that the run has begun
            if not holds_run(run_dir):
                logger.info("%s: fetching the run up to step %d from %s", run_dir, max(there), without_secrets(url))
                _download(url, run_dir, steps, there)
            elif max(there) > max(steps_of(run_dir), default=-1):
                _fetch_lost(url, run_dir, steps, there)

    def mend(self, job: Job, checkpoint: Path) -> bool:
        if job.checkpoint.upload is None:
            return False
        there, step = _complete(job.checkpoint.upload.rstrip("/")), step_of(checkpoint)
        if step not in there:
            return False
        logger.info("%s: fetching it again from the store", checkpoint)
        _fetch_checkpoint(checkpoint, there[step], damaged=True)
        # The store's copy may be damaged too: a fresh machine has no older one to fall back on.
        older = max((each for each in there if each < step), default=None)
        if older is not None and min(steps_of(job.run.dir)) >= step:
            _fetch_checkpoint(step_folder(job.run.dir, older), there[older])
        return True

    def on_start(self, run: Run) -> None:
        self._url = (run.job.checkpoint.upload or "").rstrip("/")
        if not self._url or distributed.rank() != 0:
            return
        there = set(_complete(self._url) if run.resumed_from is not None else ())
        for step in sorted(step for step in there if step > run.progress.step):
            logger.warning("step %d in the store belongs to the run's earlier future; it is removed there", step)
            _remove(self._url, step)
            there.remove(step)
        self._averaged = run.job.checkpoint.averaged_steps(run.job.schedule.max_steps)
        self._uploaded = {_name(step) for step in there}
        self._tried = set(self._uploaded)

    def on_done(self, run: Run) -> None:
        self.on_start(run)
        self.on_end(run)

    def after_step(self, run: Run, report: StepMetrics) -> None:
        if not self._url or distributed.rank() != 0 or self._last_look == run.committed or self._is_busy():
            return  # a listing of a shared folder in every step would have all ranks wait for it
        if name := self._next(run.dir):
            self._begin(run.dir, name)
        else:
            self._last_look = run.committed

    def next_due(self, run: Run) -> int:
        return NEVER

    def on_end(self, run: Run) -> None:
        if not self._url:
            return
        # A signal that came earlier is why the run ends; only another one gives up the copy.
        heard = interruption.recorded_signal()
        while True:
            if distributed.rank() == 0 and not self._is_busy() and (name := self._next(run.dir, ended=run.finished)):
                self._begin(run.dir, name)
            busy = self._is_busy(), interruption.recorded_signal() != heard
            states = distributed.gather_objects(busy)
            if not any(writes for writes, _ in states):
                break
            if any(stopped for _, stopped in states):
                raise UploadError(f"stopped while step {run.saved_at} was copied to the store")
            # Noted anew in each round, so that the launcher sees a rank that waits and not one that hangs.
            heartbeat.enter("save")
            time.sleep(_LOOK)
        last = [_name(step) for step in steps_of(run.dir)[-1:]]
        if run.finished and (run.dir / AVERAGE).is_dir():
            last.append(AVERAGE)
        if lost := distributed.broadcast_object([name for name in last if name not in self._uploaded]):
            raise UploadError(f"{run.dir} is complete, but {', '.join(lost)} could not be copied to the store")

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _next(self, run_dir: Path, *, ended: bool = False) -> str | None:
        """Return what is copied next, by its name in the run folder."""
        here = steps_of(run_dir)
        wanted = [_name(step) for step in (*here[-1:], *(step for step in self._averaged if step in here))]
        if ended and (run_dir / AVERAGE).is_dir():
            wanted.append(AVERAGE)
        return next((name for name in wanted if name not in self._tried), None)

    def _begin(self, run_dir: Path, name: str) -> None:
        self._tried.add(name)
        self._here |= set(steps_of(run_dir))  # it may be gone when the copy ends
        self._thread = threading.Thread(target=self._upload, args=(run_dir, name), daemon=True)
        self._thread.start()

    def _has_grown(self, name: str, path: Path) -> bool:
        size = path.stat().st_size
        grown = name in (CONFIG, BEST) or self._sizes.get(name) != size
        self._sizes[name] = size
        return grown

    def _upload(self, run_dir: Path, name: str) -> None:
        try:
            for record, path in _records(run_dir):  # one at a time: the ledgers of a thousand ranks are gigabytes
                if self._has_grown(record, path):
                    put_bytes(path.read_bytes(), f"{self._url}/{record}")
            files = [path for path in sorted((run_dir / name).rglob("*")) if path.is_file()]
            for path in sorted(files, key=lambda path: path.name == MANIFEST):
                put_file(path, f"{self._url}/{path.relative_to(run_dir).as_posix()}")
            self._uploaded.add(name)
            logger.info("%s is in the store", name)
            here = set(steps_of(run_dir))
            gone, self._here = self._here - here, self._here | here
            for old, found in _listed(self._url).items():
                # Removed from the run folder, or what a copy that failed has left.
                if _name(old) != name and (old in gone or MANIFEST not in found):
                    _remove(self._url, old)
        except FileNotFoundError:
            # What the store has of the records is not known now: all are sent again.
            self._sizes.clear()
            logger.error("UPLOAD LOST: %s was removed before it was copied; raise checkpoint.keep", name)
        except (DataError, OSError) as error:
            self._sizes.clear()
            logger.error("UPLOAD LOST: %s; the next one is tried in its time", error)


def _name(step: int) -> str:
    return f"checkpoints/step-{step:08}"


def _records(run_dir: Path) -> Iterator[tuple[str, Path]]:
    for name in _RECORDS:
        path = run_dir / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                yield file.relative_to(run_dir).as_posix(), file


def _listed(url: str) -> dict[int, dict[str, StoreFile]]:
    """The files of each checkpoint in the store, by their names in it."""
    found: dict[int, dict[str, StoreFile]] = {}
    for file in tree(f"{url}/checkpoints"):
        folder, _, name = file.url.partition("/checkpoints/step-")[2].partition("/")
        if folder.isdigit():
            found.setdefault(int(folder), {})[name] = file
    return found


def _complete(url: str) -> dict[int, dict[str, StoreFile]]:
    return {step: files for step, files in _listed(url).items() if MANIFEST in files}


def _remove(url: str, step: int) -> None:
    """Remove a checkpoint from the store, its marker first."""
    folder = f"{url}/{_name(step)}"
    remove_tree(f"{folder}/{MANIFEST}")
    remove_tree(folder)


def _download(url: str, run_dir: Path, steps: set[int], there: dict[int, dict[str, StoreFile]]) -> None:
    """Fetch the records of a run, the checkpoints of ``steps`` and its best one; the job of the run comes last.

    Without its job the folder is no run, so that a fetch that was cut short is done again. What one has left counts as
    far as the store has it too.
    """
    names = {file.url.removeprefix(f"{url}/"): file for file in tree(url)}
    records = {name: file for name, file in names.items() if not name.startswith(("checkpoints/", f"{AVERAGE}/"))}
    if CONFIG not in records:
        raise DataError(f"{without_secrets(url)}: there is no {CONFIG} beside the checkpoints; not a run's folder")
    for name in records:
        if any(part in ("", ".", "..") for part in name.split("/")) or is_url(name):
            raise DataError(f"{without_secrets(url)}: {name!r} is not a name of a file of a run")
    for checkpoint in checkpoints_of(run_dir):
        files = there.get(step_of(checkpoint), {})
        if MANIFEST not in files or (checkpoint / MANIFEST).read_bytes() != b"".join(chunks(files[MANIFEST])):
            set_aside(checkpoint, "other")
    job = records.pop(CONFIG)
    for name, file in records.items():
        _fetch(file, run_dir / name)
    best = read_best(run_dir)
    if best is not None and best.step in there:
        _fetch_checkpoint(step_folder(run_dir, best.step), there[best.step])
        point("best", step_folder(run_dir, best.step))
    _fetch_checkpoints(run_dir, steps, there)
    _fetch(job, run_dir / CONFIG)


def _fetch_lost(url: str, run_dir: Path, steps: set[int], there: dict[int, dict[str, StoreFile]]) -> None:
    """Fetch checkpoints that the run folder has had and the store still has.

    Raises:
        ConfigError: the run folder has not had them: two machines have continued one run.
    """
    if not _begins_with(run_dir / METRICS, f"{url}/{METRICS}"):
        raise ConfigError(
            f"checkpoint.upload: {without_secrets(url)} has the run's step {max(there)}, {run_dir} only "
            f"{max(steps_of(run_dir), default=0)}: another machine has continued it; remove or rename {run_dir} to "
            "continue from there"
        )
    logger.warning("%s has lost step %d; fetching it from %s", run_dir, max(there), without_secrets(url))
    _fetch_checkpoints(run_dir, steps, there)


def _begins_with(path: Path, url: str) -> bool:
    """Return whether a file begins with what the store has at ``url``: rows were added to it here and nowhere else."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return all(file.read(len(chunk)) == chunk for chunk in chunks(look_up(url)))


def _fetch_checkpoints(run_dir: Path, steps: set[int], there: dict[int, dict[str, StoreFile]]) -> None:
    """Fetch those of ``steps`` that the store has; the newest one of it is the latest."""
    for step in sorted(steps & there.keys()):
        _fetch_checkpoint(step_folder(run_dir, step), there[step])
    point("latest", step_folder(run_dir, max(there)))


def _fetch_checkpoint(target: Path, files: dict[str, StoreFile], *, damaged: bool = False) -> None:
    """Fetch a checkpoint that is not whole here; one that is ``damaged`` is kept under another name."""
    if (target / MANIFEST).is_file() and not damaged:
        return
    partial = target.with_name(f".{target.name}.fetched.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for name, file in files.items():
            if any(part in ("", ".", "..") for part in name.split("/")):
                raise DataError(f"{file} is not a file of a checkpoint")
            _fetch(file, partial / name)
        if damaged:
            set_aside(target, "damaged")
        put_in_place(partial, target)
    except (DataError, OSError):
        shutil.rmtree(partial, ignore_errors=True)  # a full disk must not stay full of it
        raise


def _fetch(file: StoreFile, target: Path) -> None:
    with replacing(target) as (out, _):
        for chunk in chunks(file):
            out.write(chunk)

"""Writing of a checkpoint: the fragments of every rank, the state of the task, and a manifest that describes both."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.base.atomic import sync
from capt.pretrain.base.files import public_mode, read_bytes, write_bytes, write_json, write_text
from capt.pretrain.base.verification import sha256
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.checkpoint.fragments import (
    WEIGHT,
    fragments,
    optimizer_step_count,
)
from capt.pretrain.engine.checkpoint.layout import (
    CONFIG,
    FORMAT_VERSION,
    STATE,
    SpikeState,
    point,
    put_in_place,
    sync_tree,
)
from capt.pretrain.engine.durable import write_error, write_tensors
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.engines.places import global_shape
from capt.pretrain.engine.provenance import hardware, provenance
from capt.pretrain.engine.step_folders import MANIFEST, step_folder
from capt.pretrain.engine.task import Progress, SizedTask, Task

# A checkpoint that is being written: it is either complete, or it is not there.
#
# Every rank writes its files into a temporary folder, makes them durable and hashes them, with ``checkpoint.async`` in
# a thread of its own. At the commit rank 0 gathers the hashes, writes the manifest last and renames the folder into
# place. A failure on any rank (a full disk) fails the save on all ranks, removes what was written, and leaves the
# previous checkpoint as it was.


logger = logging.getLogger(__name__)

TensorFiles = dict[str, dict[str, Tensor]]


def state_bytes(engines: Mapping[str, Engine], task: Task) -> int:
    """Return about how many bytes of files this rank's share of a checkpoint has, before anything is written."""
    own = sum(4 * fragment.view.numel() for engine in engines.values() for fragment in fragments(engine))
    return own + (task.state_bytes() if isinstance(task, SizedTask) else 0)


class PendingSave:
    """A checkpoint being written by this rank; ``commit`` (collective) makes it real.

    Args:
        target: the checkpoint's folder.
        files: tensors that this rank writes, by file name.
        metadata: ``state.json``.
        manifest: ``manifest.json`` but for its list of files.
        token: makes the name of the temporary folder this save's own, so that a rank of an earlier job, which is not
            yet dead, cannot write into it.
    """

    def __init__(
        self, target: Path, files: TensorFiles, metadata: dict[str, Any], manifest: dict[str, Any], token: str = ""
    ) -> None:
        self.target = target
        self.temporary = target.with_name(f".{target.name}{token and '.'}{token}.partial")
        self.ready: list[str] = []
        """Names of further files of this rank that are written already."""
        self._files = files
        self.metadata = metadata
        self.manifest = manifest
        self.hashed: dict[str, dict[str, Any]] = {}
        self._mode = public_mode()
        self.leads = distributed.rank() == 0
        """True if this rank makes the folder, and clears it away after a failure."""
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def write(self, *, asynchronous: bool) -> None:
        """Write and hash this rank's files, in a background thread when ``asynchronous`` (the tensors are copies)."""
        if asynchronous:
            self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write()

    def _write(self) -> None:
        try:
            if distributed.rank() == 0:
                write_json(self.temporary / STATE, self.metadata)
                self.ready.append(STATE)
            for name in self.ready:
                self.seal(name)
            # One file at a time, whose copies are given up when it is written.
            while self._files:
                name, tensors = self._files.popitem()
                write_tensors(self.temporary / name, tensors, {"format": "pt"})
                del tensors
                self.seal(name)
        except OSError as error:  # a network file system says that it is full when a file is made durable
            self._error = write_error(self.temporary, error)
            self._files = {}
        except Exception as error:
            self._error = error
            self._files = {}

    def seal(self, name: str) -> None:
        """Make a file of this rank durable, and note its size and digest."""
        path = self.temporary / name
        path.chmod(self._mode)  # safetensors writes for the owner alone
        sync(path)
        self.hashed[name] = {"size": path.stat().st_size, "sha256": sha256(path)}

    def done(self) -> bool:
        """True when this rank has nothing left to write."""
        return self._thread is None or not self._thread.is_alive()

    def commit(self) -> Path:
        """Wait for all ranks' files, write the manifest, rename. Collective. What it returns lasts.

        Raises:
            CheckpointError: a rank could not write; nothing of this checkpoint is left.
        """
        if self._thread is not None:
            self._thread.join()
        try:
            with distributed.synchronize_errors(patient=True):  # a rank may write for longer than a collective may wait
                if self._error is not None:
                    raise self._error
            self.complete()
        except Exception:
            if self.leads:
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise
        return self.target

    def commit_alone(self) -> Path:
        """Do as `commit` where this process alone has written: not collective, also among several ranks."""
        try:
            if self._error is not None:
                raise self._error
            self._finish(self.hashed)
        except Exception:
            shutil.rmtree(self.temporary, ignore_errors=True)
            raise
        return self.target

    def complete(self) -> None:
        """Make a checkpoint of what all ranks have written. Collective."""
        hashed = distributed.gather_objects(self.hashed)
        self.replicate(hashed)
        with distributed.synchronize_errors():
            if self.leads:
                self._finish({name: record for each in hashed for name, record in each.items()})

    def replicate(self, by_rank: Sequence[dict[str, dict[str, Any]]]) -> None:
        """Copy the files of all ranks, with size and digest, to where else they belong. Collective."""

    def _finish(self, files: dict[str, dict[str, Any]]) -> None:
        folder = self.temporary
        try:
            write_json(folder / MANIFEST, {**self.manifest, "files": files})
            sync_tree(folder)
            put_in_place(folder, self.target)  # there may be an earlier save of this step, or a folder without manifest
        except OSError as error:
            raise write_error(folder, error) from error
        try:
            point("latest", self.target)
        except OSError as error:  # the checkpoint is there all the same
            logger.warning("%s: the link latest still leads to an earlier checkpoint: %s", self.target, error)


def _describe(module: nn.Module) -> dict[str, Any]:
    shapes = {name: list(global_shape(p)) for name, p in module.named_parameters()}
    # Here a tied parameter comes once, below under each of its names.
    first = {id(p): name for name, p in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {"shapes": shapes, "ties": {name: first[id(p)] for name, p in every if name != first[id(p)]}}


_NO_PAST = SpikeState()
_LARGEST = 1 << 32
"""Bytes of a file that a task has copied into every checkpoint."""


def begin_save(
    run_dir: Path, job: Job, engines: Mapping[str, Engine], task: Task, progress: Progress, *, asynchronous: bool,
    spikes: SpikeState = _NO_PAST, exports: Mapping[str, bytes] | None = None,
    make: Callable[[Path, TensorFiles, dict[str, Any], dict[str, Any], str], PendingSave] = PendingSave,
) -> PendingSave:  # fmt: skip
    """Snapshot the state of all engines and the task and start writing it. Collective.

    With ``asynchronous`` training may continue immediately; ``commit`` is called when every rank is ``done``.
    ``spikes`` is the recent past of the loss. ``exports`` is what rank 0 has read by `read_exports`; None reads it now.
    ``make`` makes the pending save; where ranks other than 0 lead (hosts with a folder each), they make theirs.
    """
    target, token = step_folder(run_dir, progress.step), distributed.broadcast_object(secrets.token_hex(4))
    modules = {name: _describe(engine.module) for name, engine in engines.items()}
    manifest = _manifest(job, modules, progress.to_json())
    files: TensorFiles = {}
    suffix = f"{distributed.rank():05d}-of-{distributed.world_size():05d}.safetensors"
    engine_state: dict[str, Any] = {}
    for name, engine in engines.items():
        weights, moments = f"{name}-weights-{suffix}", f"{name}-optimizer-{suffix}"
        files[weights], files[moments] = {}, {}
        for fragment in fragments(engine):
            file = files[weights if fragment.kind == WEIGHT else moments]
            file[f"{fragment.kind}/{fragment.name}@{fragment.start}"] = fragment.view.to(
                "cpu",
                torch.float32,
                copy=asynchronous,  # else nothing changes before it is written
            )
        engine_state[name] = {
            "optimizer_steps": optimizer_step_count(engine),
            "has_moments": bool(engine.base_optimizer.state),
            "loss_scale": engine.loss_scale_state(),
        }
    state = {"progress": progress.to_json(), "engines": engine_state, "spikes": spikes.model_dump()}
    save = make(target, files, state, manifest, token)
    # Rank 0 makes the folder before any other rank writes into it.
    with distributed.synchronize_errors():
        if distributed.rank() == 0:
            save.ready += _prepare_folder(save.temporary, job, read_exports(task) if exports is None else exports)
        elif save.leads:
            _make_folder(save.temporary)
    try:
        with distributed.synchronize_errors():  # before the task writes, which may hold collectives
            _make_own_folder(save)
        with distributed.synchronize_errors():
            save.metadata["task"] = _save_task(task, save)
    except Exception:
        if save.leads:
            shutil.rmtree(save.temporary, ignore_errors=True)
        raise
    save.write(asynchronous=asynchronous)
    return save


def _own_folder(save: PendingSave) -> Path:
    return save.temporary / f".rank-{distributed.rank()}"


def _make_own_folder(save: PendingSave) -> None:
    try:
        _own_folder(save).mkdir()
    except OSError as error:
        raise write_error(save.temporary, error) from error


def _save_task(task: Task, save: PendingSave) -> dict[str, Any]:
    """Return the task's JSON state; its files go into a folder of this rank first, which tells whose they are."""
    folder = _own_folder(save)
    try:
        state = task.save_state(folder)
        for path in sorted(folder.iterdir()):
            os.rename(path, save.temporary / path.name)
            save.ready.append(path.name)
        folder.rmdir()
    except (OSError, SafetensorError) as error:
        raise write_error(save.temporary, error) from error
    return state


def _manifest(job: Job, modules: Mapping[str, Mapping[str, Any]], progress: dict[str, int]) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "progress": progress,
        "task": job.task.type,
        "world_size": distributed.world_size(),
        "zero_stage": job.engine.zero_stage,
        "modules": {name: dict(described) for name, described in modules.items()},
        "provenance": {**provenance(), "hardware": hardware(_gpu_name())},
    }


def _gpu_name() -> str | None:
    return torch.cuda.get_device_name(distributed.device()) if torch.cuda.is_available() else None


def read_exports(task: Task) -> dict[str, bytes]:
    """Read the files that a task has copied into every checkpoint, by name. Raises ``OSError``.

    They are read once, before the first step: a tokenizer may be in the cache, which is pruned while the run trains.
    """
    content: dict[str, bytes] = {}
    for name, source in task.export_files().items():
        if source.is_dir():
            content |= {f"{name}/{inner}": read_bytes(source / inner, limit=_LARGEST) for inner in _names_in(source)}
        else:
            content[name] = read_bytes(source, limit=_LARGEST)
    return content


def _prepare_folder(folder: Path, job: Job, exports: Mapping[str, bytes]) -> list[str]:
    """Make the temporary folder with all that rank 0 puts there; returns the names of the files."""
    _make_folder(folder)
    try:
        write_text(folder / CONFIG, job_to_yaml(job))
        for name, content in exports.items():
            write_bytes(folder / name, content)
        return _names_in(folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise write_error(folder, error) from error


def _make_folder(folder: Path) -> None:
    """Make the temporary folder, and the folder of all checkpoints with the first, durably."""
    run_dir, first = folder.parents[1], not folder.parent.exists()
    try:
        folder.mkdir(parents=True)
        if first:  # all checkpoints are lost where the host crashes and forgets the folder that they are in
            sync(run_dir)
            sync(run_dir.parent)
    except OSError as error:
        raise write_error(folder, error) from error


def _names_in(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def write_weights_only(target: Path, job: Job, modules: Mapping[str, nn.Module], task_state: dict[str, Any]) -> Path:
    """Write a checkpoint at step 0 from bare modules (an imported Hugging Face model), without moments. One process.

    ``target`` is the checkpoint folder to make; other files (the tokenizer) may already be in ``target``'s partial
    folder: see :func:`partial_folder`.
    """
    weights = {
        name: {inner: p.detach().to("cpu", torch.float32, copy=True) for inner, p in module.named_parameters()}
        for name, module in modules.items()
    }
    return write_weights(target, job, {name: _describe(each) for name, each in modules.items()}, weights, task_state)


def write_weights(
    target: Path, job: Job, modules: Mapping[str, Mapping[str, Any]], weights: Mapping[str, Mapping[str, Tensor]],
    task_state: dict[str, Any],
) -> Path:  # fmt: skip
    """Do as `write_weights_only` with fp32 tensors by module and name, which ``modules`` describes for the manifest."""
    progress = Progress().to_json()
    files = {
        f"{name}-weights-00000-of-00001.safetensors": {f"{WEIGHT}/{inner}@0": t.view(-1) for inner, t in each.items()}
        for name, each in weights.items()
    }
    engines = {name: {"optimizer_steps": 0, "has_moments": False, "loss_scale": {}} for name in modules}
    metadata = {"progress": progress, "engines": engines, "task": task_state}
    save = PendingSave(target, files, metadata, {**_manifest(job, modules, progress), "world_size": 1})
    save.temporary.mkdir(parents=True, exist_ok=True)
    write_text(save.temporary / CONFIG, job_to_yaml(job))
    save.ready += _names_in(save.temporary)
    save.write(asynchronous=False)
    return save.commit_alone()


def partial_folder(target: Path) -> Path:
    """Return the folder for files to be included in the checkpoint ``target``, before :func:`write_weights_only`."""
    return PendingSave(target, {}, {}, {}).temporary

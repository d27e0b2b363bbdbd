"""What a checkpoint holds: the fragments of every rank, the state of the task, and a manifest that describes both."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from pretrain.base import distributed
from pretrain.base.atomic import sync
from pretrain.base.files import read_bytes, write_bytes, write_text
from pretrain.config.schema import Job
from pretrain.config.writer import job_to_yaml
from pretrain.engine.checkpoint.fragments import (
    WEIGHT,
    fragments,
    global_shape,
    optimizer_step_count,
    trainable,
)
from pretrain.engine.checkpoint.layout import step_folder
from pretrain.engine.checkpoint.manifest import CONFIG, FORMAT_VERSION, SpikeState
from pretrain.engine.checkpoint.pending import PendingSave, TensorFiles
from pretrain.engine.durable import write_error
from pretrain.engine.engines.base import Engine
from pretrain.engine.provenance import hardware, provenance
from pretrain.engine.task import Progress, Task


def _describe(module: nn.Module) -> dict[str, Any]:
    shapes = {name: list(global_shape(p)) for name, p in trainable(module)}
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
    modules = {name: engine.module for name, engine in engines.items()}
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


def _manifest(job: Job, modules: Mapping[str, nn.Module], progress: dict[str, int]) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "progress": progress,
        "task": job.task.type,
        "world_size": distributed.world_size(),
        "zero_stage": job.engine.zero_stage,
        "modules": {name: _describe(module) for name, module in modules.items()},
        "provenance": {**provenance(), "hardware": hardware(_gpu_name())},
    }


def _gpu_name() -> str | None:
    return torch.cuda.get_device_name(distributed.device()) if torch.cuda.is_available() else None


def read_exports(task: Task) -> dict[str, bytes]:
    """Read the files that a task has copied into every checkpoint, by name. Raises ``OSError``.

    They are read once, before the first step: a tokenizer may lie in the cache, which is pruned while the run trains.
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

    ``target`` is the checkpoint folder to make; other files (the tokenizer) may already lie in ``target``'s partial
    folder: see :func:`partial_folder`.
    """
    progress = Progress().to_json()
    files = {
        f"{name}-weights-00000-of-00001.safetensors": {
            f"{WEIGHT}/{parameter_name}@0": p.detach().to("cpu", torch.float32, copy=True).view(-1)
            for parameter_name, p in trainable(module)
        }
        for name, module in modules.items()
    }
    engines = {name: {"optimizer_steps": 0, "has_moments": False, "loss_scale": {}} for name in modules}
    metadata = {"progress": progress, "engines": engines, "task": task_state}
    save = PendingSave(target, files, metadata, _manifest(job, modules, progress))
    save.temporary.mkdir(parents=True, exist_ok=True)
    write_text(save.temporary / CONFIG, job_to_yaml(job))
    save.ready += _names_in(save.temporary)
    save.write(asynchronous=False)
    return save.commit()


def partial_folder(target: Path) -> Path:
    """Where files to be included in the checkpoint ``target`` are put before :func:`write_weights_only`."""
    return PendingSave(target, {}, {}, {}).temporary

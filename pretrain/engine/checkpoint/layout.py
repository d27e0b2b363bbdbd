"""What a checkpoint folder holds, and when it counts as complete.

``checkpoints/step-00000100/``::

    model-weights-00000-of-00002.safetensors     fragments ``weight/<parameter>@<start>`` of rank 0 of 2 (fp32, flat)
    model-optimizer-00000-of-00002.safetensors   fragments ``exp_avg/<parameter>@<start>``, ...
    queue-00000-of-00002.safetensors             the task's own shards
    tokenizer/, config.yaml                      what is needed to use the weights without the run
    state.json                                   step, samples, loss scale, the task's JSON state
    manifest.json                                sizes and SHA-256 of all of the above, shapes, ties; written LAST

A folder without a manifest is not a checkpoint. The manifest lists every file, and only files that it lists are opened:
a flipped byte, a truncated shard and a stray file are found before anything is loaded.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pretrain.base import distributed
from pretrain.base.errors import CheckpointError, quoted
from pretrain.base.hashing import ExpectedFile
from pretrain.base.verification import Verifier
from pretrain.config.load import load_job
from pretrain.config.schema import Job
from pretrain.engine.checkpoint.manifest import CONFIG, MANIFEST, Manifest, read_manifest
from pretrain.engine.verification import verify_files

_J = TypeVar("_J", bound=Job)
_STEP = re.compile(r"^step-(\d{8,18})$", re.ASCII)


def step_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of ``step``."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def checkpoints_of(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first (those whose manifest has been written)."""
    folder = run_dir / "checkpoints"
    found = [path for path in folder.iterdir() if _STEP.match(path.name)] if folder.is_dir() else []
    return sorted((path for path in found if (path / MANIFEST).is_file()), key=lambda path: int(path.name[5:]))


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that ``path`` means: a step folder itself, or the newest complete one of a run.

    Raises:
        CheckpointError: nothing is there, or the folder is half-written.
    """
    if (path / MANIFEST).is_file():
        return path
    if _STEP.match(path.name) and path.is_dir():
        others = checkpoints_of(path.parent.parent)
        offer = f"; the newest complete one is {others[-1].name}" if others else ""
        raise CheckpointError(f"{path}: no {MANIFEST}: the checkpoint is half-written{offer}")
    complete = checkpoints_of(path)
    if not complete and (path / CONFIG).is_file():
        raise CheckpointError(
            f"{path}: a run without a complete checkpoint; capt resume {quoted(path)} continues, and writes one every "
            "checkpoint.every steps and at its end"
        )
    if not complete:
        raise CheckpointError(f"{path}: neither a checkpoint (no {MANIFEST}) nor a run with complete checkpoints in it")
    return complete[-1]


def find_best(path: Path) -> Path:
    """Find the checkpoint that ``path`` means: of a run its best (``checkpoint.best``), else as `find_checkpoint`."""
    best = path / "checkpoints" / "best"
    return find_checkpoint(best.resolve() if best.exists() else path)


def open_checkpoint(checkpoint: Path, kind: type[_J], task: str) -> _J:
    """Verify every file of ``checkpoint`` and return its job, which must be one of ``kind``.

    Raises:
        CheckpointError: damaged, or of another task than ``task``.
    """
    verify(checkpoint)
    job = read_job(checkpoint)
    if not isinstance(job, kind):
        raise CheckpointError(f"{checkpoint}: a checkpoint of task {job.task.type}, not of {task}")
    return job


def read_job(checkpoint: Path) -> Job:
    """The resolved configuration the checkpoint was written with; its file is verified, and no other.

    Raises:
        CheckpointError: there is no manifest, or ``config.yaml`` is not what it says.
        ConfigError: the configuration is none of this release.
    """
    listed = {CONFIG: _recorded(read_manifest(checkpoint))[CONFIG]}
    Verifier().verify(checkpoint, listed, error=CheckpointError, hint=_offer(checkpoint))
    return load_job(checkpoint / CONFIG, resolved=True)


def read_job_of_run(run_dir: Path) -> Job:
    """The configuration of the run in a folder, as the run wrote it. Raises ``ConfigError``."""
    return load_job(run_dir / CONFIG, resolved=True)


def verify(checkpoint: Path) -> Manifest:
    """Compare every file with the manifest and return the manifest.

    Every byte is read, whatever this host remembers: it is about to be loaded, and a disk may lose bits by itself.

    Raises:
        CheckpointError: a file is missing, surplus, has another size or another content; the text names it and offers
            the previous complete checkpoint of the run.
    """
    manifest = check_listing(checkpoint)
    Verifier(again=True).verify(checkpoint, _recorded(manifest), error=CheckpointError, hint=_offer(checkpoint))
    return manifest


def verify_together(checkpoint: Path) -> Manifest:
    """Do `verify` on all ranks, which divide the files among them. Collective."""
    with distributed.synchronize_errors():
        manifest = check_listing(checkpoint) if distributed.rank() == 0 else read_manifest(checkpoint)
    verify_files(checkpoint, _recorded(manifest), error=CheckpointError, hint=_offer(checkpoint))
    return manifest


def check_listing(checkpoint: Path) -> Manifest:
    """Compare the names in the folder with those in the manifest, and return the manifest.

    Raises:
        CheckpointError: the manifest is damaged, a file is missing, or one is there that is not listed.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_offer(checkpoint)}") from None
    found = {name: regular for name, regular in _entries(checkpoint) if name != MANIFEST}
    for name in sorted(manifest.files):
        if not found.get(name):
            what = "missing" if name not in found else "not a regular file"
            raise CheckpointError(f"{checkpoint / name}: {what}{_offer(checkpoint)}")
    if surplus := found.keys() - manifest.files.keys():
        raise CheckpointError(
            f"{checkpoint}: holds {ascii(min(surplus))[1:-1]}, which its {MANIFEST} does not list; remove it"
        )
    return manifest


def _entries(folder: Path) -> Iterator[tuple[str, bool]]:
    """Names, relative to ``folder``, of what is below it (but folders), and whether each is a regular file, no link."""
    for base, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(base, name))]
        for name in (*files, *links):
            path = os.path.join(base, name)
            yield os.path.relpath(path, folder), stat.S_ISREG(os.lstat(path).st_mode)


def _recorded(manifest: Manifest) -> dict[str, ExpectedFile]:
    return {name: ExpectedFile(file.size, file.sha256) for name, file in manifest.files.items()}


def _offer(checkpoint: Path) -> str:
    run_dir = checkpoint.parent.parent
    older = [path for path in checkpoints_of(run_dir) if path.name < checkpoint.name]
    if not older:
        return "; the run has no earlier checkpoint"
    return (
        f"; the previous one is {older[-1].name}: capt resume {quoted(run_dir)} --checkpoint {quoted(older[-1].name)}"
    )

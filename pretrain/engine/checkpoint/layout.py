"""What a checkpoint folder holds, and when it counts as complete.

``checkpoints/step-00000100/``::

    model-weights-00000-of-00002.safetensors     fragments ``weight/<parameter>@<start>`` of rank 0 of 2 (fp32, flat)
    model-optimizer-00000-of-00002.safetensors   fragments ``exp_avg/<parameter>@<start>``, ...
    queue-00000-of-00002.safetensors             the task's own shards
    tokenizer/, config.yaml                      what is needed to use the weights without the run
    state.json                                   step, samples, loss scale, the task's JSON state
    manifest.json                                sizes and SHA-256 of all of the above, shapes, ties; written LAST

A folder without a manifest is not a checkpoint. Every name is covered by the manifest, so a flipped byte, a truncated
shard and a stray file are found before anything is loaded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TypeVar

from pretrain.config.load import load_job
from pretrain.config.schema import Job
from tokenizer.errors import CheckpointError
from tokenizer.files import sha256

MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.yaml"
FORMAT_VERSION = 1
_J = TypeVar("_J", bound=Job)
_STEP = re.compile(r"^step-(\d{8,})$")


def step_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lives."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first (those whose manifest has been written)."""
    folder = run_dir / "checkpoints"
    found = [path for path in folder.iterdir() if _STEP.match(path.name)] if folder.is_dir() else []
    return sorted((path for path in found if (path / MANIFEST).is_file()), key=lambda path: int(path.name[5:]))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` means: a step folder itself, or the newest complete one of a run.

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
    if not complete:
        raise CheckpointError(f"{path}: neither a checkpoint (no {MANIFEST}) nor a run with complete checkpoints in it")
    return complete[-1]


def find_best(path: Path) -> Path:
    """The checkpoint that ``path`` means: of a run its best one (``checkpoint.best``), else as `find_checkpoint`."""
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


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest, with its own format checked."""
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint}: no {MANIFEST}: not a checkpoint, or a half-written one") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}{_offer(checkpoint)}") from None
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(f"{path}: not a checkpoint of format_version {FORMAT_VERSION}")
    return manifest


def read_metadata(checkpoint: Path) -> dict[str, Any]:
    """``state.json``: progress, loss scales, and what the task stored."""
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text())
    return state


def read_job(checkpoint: Path) -> Job:
    """The resolved configuration the checkpoint was written with."""
    return load_job(checkpoint / CONFIG, resolved=True)


def verify(checkpoint: Path) -> dict[str, Any]:
    """Compare every file with the manifest and return the manifest.

    Raises:
        CheckpointError: a file is missing, has another size or another content; the text names it and offers the
            previous complete checkpoint of the run.
    """
    manifest = read_manifest(checkpoint)
    for name, expected in manifest["files"].items():
        path = checkpoint / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise CheckpointError(f"{checkpoint / MANIFEST}: file name {name!r} leaves the checkpoint")
        if not path.is_file() or path.is_symlink():
            raise CheckpointError(f"{path}: missing{_offer(checkpoint)}")
        if path.stat().st_size != expected["size"]:
            found = path.stat().st_size
            raise CheckpointError(f"{path}: {found} bytes, the manifest says {expected['size']}{_offer(checkpoint)}")
        if sha256(path) != expected["sha256"]:
            raise CheckpointError(f"{path}: damaged: its SHA-256 is not the manifest's{_offer(checkpoint)}")
    return manifest


def _offer(checkpoint: Path) -> str:
    run_dir = checkpoint.parent.parent
    older = [path for path in checkpoints_of(run_dir) if path.name < checkpoint.name]
    if not older:
        return "; the run has no earlier checkpoint"
    return f"; the previous one is {older[-1].name}: capt resume {run_dir} --checkpoint {older[-1].name}"

"""Contents of a checkpoint folder, and the sign that it is complete.

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

import math
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, FiniteFloat, model_validator

from capt.pretrain.base import distributed
from capt.pretrain.base.atomic import sync
from capt.pretrain.base.errors import CheckpointError, MissingModelError, quoted
from capt.pretrain.base.files import read_json
from capt.pretrain.base.records import Count, Record, parse_record, read_record
from capt.pretrain.base.verification import ExpectedFile, Verifier, all_ranks
from capt.pretrain.config.load import load_job
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.step_folders import MANIFEST, checkpoints_of, is_step

_J = TypeVar("_J", bound=Job)


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that ``path`` means: a step folder itself, or the newest complete one of a run.

    Raises:
        CheckpointError: nothing is there, or the folder is half-written.
    """
    if (path / MANIFEST).is_file():
        return path
    if is_step(path.name) and path.is_dir():
        others = checkpoints_of(path.parent.parent)
        offer = f"; the newest complete one is {others[-1].name}" if others else ""
        raise CheckpointError(f"{path}: no {MANIFEST}: the checkpoint is half-written{offer}")
    complete = checkpoints_of(path)
    if not complete and (path / CONFIG).is_file():
        raise CheckpointError(
            f"{path}: a run without a complete checkpoint; capt resume {quoted(path)} continues, and writes one every "
            "checkpoint.every steps and at its end"
        )
    if not complete and not path.exists():
        raise MissingModelError(f"{path}: no such folder, so neither a checkpoint nor a run")
    if not complete:
        # DeepSpeed writes this file beside every checkpoint of its own.
        of_deepspeed = (path / "zero_to_fp32.py").is_file()
        raise CheckpointError(
            f"{path}: neither a checkpoint (no {MANIFEST}) nor a run with complete checkpoints in it"
            + "; it is DeepSpeed's: let its zero_to_fp32.py write the weights with --safe_serialization, and put "
            "the model's config.json and tokenizer beside them" * of_deepspeed
        )
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
    # again: whatever this host remembers of the files
    verifier = Verifier(ranks=all_ranks(), again=True)
    verifier.verify(checkpoint, _recorded(manifest), error=CheckpointError, hint=_offer(checkpoint))
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
        # Links to folders are among the folders here, and would not be walked into.
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


# Reads ``manifest.json`` and ``state.json`` of a checkpoint as typed records.


STATE = "state.json"
CONFIG = "config.yaml"
FORMAT_VERSION = 1


def _inside(name: str) -> str:
    # A manifest may come from somebody else: no name leads out of the folder, or breaks a line.
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or str(PurePosixPath(name)) != name or {"", "..", "."} & set(parts):
        raise ValueError("not the name of a file in the checkpoint")
    return name


def _countable(shape: list[int]) -> list[int]:
    if math.prod(shape) > 1 << 48:
        raise ValueError("no tensor has that number of elements")
    return shape


Name = Annotated[str, Field(min_length=1, max_length=1000)]
FileName = Annotated[Name, AfterValidator(_inside)]
Shape = Annotated[list[Annotated[int, Field(ge=0, le=1 << 48)]], Field(max_length=16), AfterValidator(_countable)]


class FileRecord(Record):
    """Bytes and SHA-256 (hexadecimal) of a file."""

    size: Count
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ModuleRecord(Record):
    """Shapes of a module's parameters, each once, and under which other names some are known."""

    shapes: dict[Name, Shape] = Field(max_length=1_000_000)
    ties: dict[Name, Name] = Field(max_length=1_000_000)

    @model_validator(mode="after")
    def _ties_lead_somewhere(self) -> ModuleRecord:
        for alias, name in self.ties.items():
            if name not in self.shapes or alias in self.shapes:
                raise ValueError(f"ties: {ascii(alias)[:80]} leads to no parameter")
        return self


class ProgressRecord(Record):
    """Progress of the run: optimizer steps; samples and tokens over all ranks."""

    step: Count
    samples: Count
    tokens: Count = 0


class Manifest(Record):
    """Contents of a checkpoint, and the program that wrote it."""

    format_version: Literal[1]
    created: str = Field("", max_length=1000)
    progress: ProgressRecord
    task: str = Field(max_length=1000)
    world_size: int = Field(ge=1, le=10_000_000)
    zero_stage: int = Field(ge=0, le=3)
    modules: dict[Annotated[str, Field(pattern=r"^\w[\w.]{0,99}$")], ModuleRecord] = Field(max_length=1000)
    provenance: dict[str, str] = Field({}, max_length=1000)
    files: dict[FileName, FileRecord] = Field(max_length=10_000_000)

    @model_validator(mode="after")
    def _is_whole(self) -> Manifest:
        for name in (CONFIG, STATE):
            if name not in self.files:
                raise ValueError(f"files: lacks {name}, which every checkpoint has")
        if MANIFEST in self.files:
            raise ValueError(f"files: {MANIFEST} lists itself")
        return self


# The state of DeepSpeed's loss scaler, then that of torch's gradient scaler (ZeRO 0).
ScaleName = Literal[
    "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis",
    "scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker",
]  # fmt: skip


class EngineState(Record):
    """State of an engine beside its tensors: applied updates, whether moments are stored, fp16's loss scaler."""

    optimizer_steps: Count
    has_moments: bool
    loss_scale: dict[ScaleName, Annotated[int, Field(ge=-(1 << 62), le=1 << 62)] | FiniteFloat]


SpikeFigure = Literal["loss", "grad_norm"]
SPIKE_FIGURES: tuple[SpikeFigure, ...] = ("loss", "grad_norm")


class SpikeState(Record):
    """State of the guard in ``state.json``: past values, number of spikes, step of the last one, updates left out."""

    past: dict[SpikeFigure, list[FiniteFloat]] = Field(default_factory=dict, max_length=len(SPIKE_FIGURES))
    count: Count = 0
    last: Count | None = None
    skipped: Count = 0


class State(Record):
    """``state.json``: progress, the engines' numbers, what the task stored, and the recent past of the loss."""

    progress: ProgressRecord
    engines: dict[str, EngineState] = Field(max_length=1000)
    task: dict[str, Any] = Field(max_length=100_000)
    spikes: SpikeState = SpikeState()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises ``CheckpointError``: there is none, it is damaged, or of another format."""
    path = checkpoint / MANIFEST
    try:
        content = read_json(path, error=CheckpointError)
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint}: no {MANIFEST}: not a checkpoint, or a half-written one") from None
    if isinstance(content, dict) and content.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
        raise CheckpointError(f"{path}: not a checkpoint of format_version {FORMAT_VERSION}")
    return parse_record(Manifest, content, path, error=CheckpointError)


def read_metadata(checkpoint: Path) -> State:
    """Read ``state.json`` of a verified checkpoint. Raises ``CheckpointError``."""
    return read_record(State, checkpoint / STATE, error=CheckpointError)


# Links to checkpoints, and removing them so that a kill at any moment leaves nothing that looks like one.


_REPLACED = ".replaced"


def point(name: str, target: Path) -> None:
    """Let the link ``name`` (``latest``, ``best``) beside ``target`` lead to it, in one step."""
    link = target.with_name(f".{name}.tmp")
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    link.replace(target.with_name(name))
    sync(target.parent)


def sync_tree(folder: Path) -> None:
    """Make the entries of a folder and of all folders in it durable."""

    def fail(error: OSError) -> None:
        raise error

    for base, _, _ in os.walk(folder, topdown=False, onerror=fail):  # it asks nothing of each of thousands of files
        sync(Path(base))


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint to ``WHY-step-...``, which nothing takes for one, and return its new path."""
    kept = path.with_name(f"{why}-{path.name}-{time.time_ns()}")
    path.rename(kept)
    sync(path.parent)
    return kept


def put_in_place(folder: Path, target: Path) -> None:
    """Rename a complete checkpoint to ``target``; what is there now is removed only once its successor is durable.

    A kill between the two renames leaves the old one under a hidden name, for `put_back_replaced`.
    """
    aside = target.with_name(f".{target.name}{_REPLACED}")
    # An earlier save of the same step, or a folder without manifest.
    replaces = target.exists()
    if replaces:
        target.rename(aside)
    try:
        folder.rename(target)
    except OSError:
        if replaces:
            aside.rename(target)
        raise
    sync(target.parent)
    if replaces:
        shutil.rmtree(aside, ignore_errors=True)  # else `remove_leftovers` does it


def put_back_replaced(run_dir: Path) -> list[Path]:
    """Rename back what a killed `put_in_place` has moved out of the way. The caller holds the folder."""
    found = []
    for aside in (run_dir / "checkpoints").glob(f".step-*{_REPLACED}"):
        target = aside.with_name(aside.name[1:].removesuffix(_REPLACED))
        if not target.exists():
            aside.rename(target)
            sync(target.parent)
            found.append(target)
    return found


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint. What is left by a crash meanwhile has a hidden name, for `remove_leftovers`.

    Raises:
        OSError: there is a link at ``path`` or in the place of its folder: what it leads to is not ours.
    """
    hidden = f".{path.name}.removed"
    # All below goes by this descriptor, so that a link put in the folder's place meanwhile is not followed.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        shutil.rmtree(hidden, ignore_errors=True, dir_fd=folder)
        os.rename(path.name, hidden, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)  # else a host that crashes may keep the name, and lose what was below it
        shutil.rmtree(hidden, dir_fd=folder)
    finally:
        os.close(folder)


def remove_leftovers(run_dir: Path) -> list[Path]:
    """Remove what killed saves and removals left. The caller holds the folder.

    A rank of a job before may still live, where its host is cut off. A folder is renamed before it is removed, so that
    such a rank finds none to write into.
    """
    found = [
        path
        for pattern in (".step-*.partial", ".step-*.removed", f".step-*{_REPLACED}", ".latest.tmp", ".best.tmp")
        for path in (run_dir / "checkpoints").glob(pattern)
    ]
    for path in found:
        if path.is_dir() and not path.is_symlink():
            hidden = path.with_name(f"{path.name.removesuffix('.removed')}.removed")
            path.rename(hidden)
            shutil.rmtree(hidden)
        else:
            path.unlink()
    return found

"""Reads ``manifest.json`` and ``state.json`` of a checkpoint as typed records."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, FiniteFloat, model_validator

from pretrain.base.errors import CheckpointError
from pretrain.base.files import read_json
from pretrain.base.records import Count, Record, parse_record, read_record

MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.yaml"
FORMAT_VERSION = 1


def _inside(name: str) -> str:
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
    """How far the run was: optimizer steps; samples and tokens over all ranks."""

    step: Count
    samples: Count
    tokens: Count = 0


class Manifest(Record):
    """What a checkpoint holds, and who wrote it."""

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


ScaleName = Literal[
    "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis",
    "scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker",
]  # fmt: skip


class EngineState(Record):
    """What an engine has beside its tensors: applied updates, whether moments are stored, fp16's loss scaler."""

    optimizer_steps: Count
    has_moments: bool
    loss_scale: dict[ScaleName, Annotated[int, Field(ge=-(1 << 62), le=1 << 62)] | FiniteFloat]


SpikeFigure = Literal["loss", "grad_norm"]
SPIKE_FIGURES: tuple[SpikeFigure, ...] = ("loss", "grad_norm")


class SpikeState(Record):
    """What the guard keeps in ``state.json``: the values of the last steps, how many spikes there were, the last, and
    how many updates were left out."""

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

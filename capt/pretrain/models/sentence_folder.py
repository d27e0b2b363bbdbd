"""What ``modules.json`` of a sentence-transformers folder says: which modules there are, and where. No torch."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from capt.pretrain.base import files as safe_files
from capt.pretrain.base.errors import CheckpointError, quoted, shown

_ROUTERS = ("Router", "Asym")
"""Modules with a path for queries and one for documents."""


class _Module(BaseModel):
    """An entry of ``modules.json``: a class of the library itself, and the folder with its files."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Annotated[str, Field(pattern=r"^sentence_transformers\.[A-Za-z0-9_.]+$", max_length=200)]
    path: Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_-]*)?$", max_length=100)]


_MODULES = TypeAdapter(list[_Module])


def modules_of(folder: Path) -> list[tuple[str, str]]:
    """The class and the folder of each module that ``modules.json`` lists. Raises ``CheckpointError``."""
    try:
        content = safe_files.read_json(folder / "modules.json", limit=100_000, error=CheckpointError)
        return [(module.type.rpartition(".")[2], module.path) for module in _MODULES.validate_python(content)]
    except ValidationError as error:
        first = error.errors()[0]
        problem = "no class of sentence-transformers, but code" if first["loc"][-1:] == ("type",) else first["msg"]
        raise CheckpointError(f"{folder / 'modules.json'}: {shown(first['input'])}: {problem}") from None


def require_encoder(folder: Path) -> None:
    """Refuse a folder that encodes with another encoder than the one beside ``modules.json``.

    Raises:
        CheckpointError: queries and documents have modules of their own, or the encoder is in a folder within and
            differs from the one beside ``modules.json``.
    """
    if not (folder / "modules.json").is_file():
        return
    modules = modules_of(folder)
    router = next((kind for kind, _ in modules if kind in _ROUTERS), None)
    if router is not None:
        raise CheckpointError(
            f"{folder / 'modules.json'}: {router} sends queries and documents through modules of their own, and one "
            "encoder is read here; name the folder of one of its encoders"
        )
    # The first module is the encoder.
    within = folder / modules[0][1] if modules else folder
    if within != folder and within.is_dir() and not _holds_the_same(folder, within):
        raise CheckpointError(
            f"{folder / 'modules.json'}: the encoder is in {within.name}, and what is beside modules.json is not the "
            f"same; put it there: cp {quoted(within)}/* {quoted(folder)}"
        )


def poolings(folder: Path) -> list[Path]:
    """The configuration of each module of ``folder`` that pools; empty where there is no ``modules.json``."""
    if not (folder / "modules.json").is_file():
        return []
    return [folder / name / "config.json" for kind, name in modules_of(folder) if kind == "Pooling"]


def pooling_file(folder: Path) -> Path | None:
    """Where ``folder`` says how its encoder is pooled; None where it does not say.

    Raises:
        CheckpointError: ``1_Pooling`` is there without ``modules.json``: the library would ignore it and take the mean;
            or ``modules.json`` lists no pooling, or several.
    """
    usual = folder / "1_Pooling" / "config.json"
    if not (folder / "modules.json").is_file():
        if not usual.is_file():
            return None
        raise CheckpointError(
            f"{usual} is there, but not modules.json, without which sentence-transformers ignores it and takes the "
            "mean: copy modules.json, or say how to pool (model.pooling in a job, --pooler in a command)"
        )
    listed = poolings(folder)
    if len(listed) != 1:
        raise CheckpointError(
            f"{folder / 'modules.json'}: {len(listed)} modules of the class Pooling, and one is read here; set "
            "model.pooling to mean, cls or last"
        )
    return listed[0]


def _holds_the_same(folder: Path, within: Path) -> bool:
    """Whether every file of ``within`` is in ``folder`` too, byte for byte."""
    files = [path for path in within.iterdir() if path.is_file()]
    return all(
        (folder / path.name).is_file() and filecmp.cmp(path, folder / path.name, shallow=False) for path in files
    )

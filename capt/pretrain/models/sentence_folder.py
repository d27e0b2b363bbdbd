"""Modules of a sentence-transformers folder and their places, by its ``modules.json``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from capt.pretrain.base import files as safe_files
from capt.pretrain.base.errors import CheckpointError, shown

ROUTERS = ("Router", "Asym")
"""Modules with a path for queries and one for documents."""
_ENDINGS = ("json", "safetensors", "txt", "model")

SETTINGS = "config_sentence_transformers.json"
"""Its prompts and its kind of model, beside ``modules.json``."""

_OTHER_KINDS = {
    "CrossEncoder": "scores pairs of texts (capt evaluate --rerank measures it)",
    "SparseEncoder": "gives a weight to each token of its vocabulary",
    "MultiVectorEncoder": "gives a vector to each token of a text",
}
"""Uses of the models of sentence-transformers that give no vector of a text."""


def _inside(path: str) -> str:
    """``path`` in its shortest form. Raises ``ValueError`` where it may lead out of the folder, as the library does."""
    windows = PureWindowsPath(path)
    if windows.anchor or ".." in windows.parts or "\0" in path:
        raise ValueError("a folder in this one is expected, without ..")
    inner = PurePosixPath(path)
    return str(inner) if inner.parts else ""


class _Module(BaseModel):
    """An entry of ``modules.json``: a class of the library itself, and the folder with its files."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Annotated[str, Field(pattern=r"^sentence_transformers\.[A-Za-z0-9_.]+$", max_length=200)]
    path: Annotated[str, Field(max_length=1000), AfterValidator(_inside)]


_MODULES = TypeAdapter(list[_Module])


def modules_of(folder: Path) -> list[tuple[str, str]]:
    """The class and the folder of each module that ``modules.json`` lists. Raises ``CheckpointError``."""
    try:
        content = safe_files.read_json(folder / "modules.json", limit=100_000, error=CheckpointError)
        return [(module.type.rpartition(".")[2], module.path) for module in _MODULES.validate_python(content)]
    except ValidationError as error:
        first = error.errors()[0]
        problem = first["msg"].removeprefix("Value error, ")
        if first["type"] == "string_pattern_mismatch":
            problem = "no class of sentence-transformers, but code"
        raise CheckpointError(f"{folder / 'modules.json'}: {shown(first['input'])}: {problem}") from None


def module_files(folder: Path) -> list[str]:
    """Patterns of the files that the modules of ``folder`` may read within it, for the client of a hub."""
    modules = modules_of(folder)
    within = [name for _, name in modules if name]
    # A router has a folder for each of its modules.
    if any(kind in ROUTERS for kind, _ in modules):
        within.append("*")
    return [f"{name}/*.{ending}" for name in within for ending in _ENDINGS]


def encoder_folder(folder: Path) -> Path:
    """The folder of the encoder: the one of the first module that ``modules.json`` lists, else ``folder`` itself.

    Raises:
        CheckpointError: queries and documents have modules of their own.
    """
    if not (folder / "modules.json").is_file():
        return folder
    modules = modules_of(folder)
    router = next((kind for kind, _ in modules if kind in ROUTERS), None)
    if router is not None:
        raise CheckpointError(
            f"{folder / 'modules.json'}: {router} sends queries and documents through modules of their own, and one "
            "encoder is read here; name the folder of one of its encoders"
        )
    within = folder / modules[0][1] if modules else folder
    return within if (within / "config.json").is_file() else folder


def require_embedder(folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse a model that gives no vector of a text, of which the library would take the encoder alone.

    Args:
        folder: of the model.
        config: the keys of its ``config.json``; empty where it has none.
        settings: those of `SETTINGS`.

    Raises:
        CheckpointError: it is a reranker, or another kind of model of sentence-transformers.
    """
    kind = settings.get("model_type", "SentenceTransformer")
    if kind == "SentenceTransformer" and not (folder / "modules.json").is_file() and scores_pairs(config):
        kind = "CrossEncoder"
    if kind != "SentenceTransformer":
        does = _OTHER_KINDS.get(kind, "is of another kind") if isinstance(kind, str) else "is of another kind"
        raise CheckpointError(f"{folder}: a {shown(kind)}, which {does}; name a model that gives vectors of texts")


def scores_pairs(config: Mapping[str, Any]) -> bool:
    """True for the ``config.json`` of a reranker: a classifier with one score."""
    if "sentence_transformers" in config or "sbert_ce_default_activation_function" in config:
        return True
    return is_classifier(config) and labels_of(config) == 1


def is_classifier(config: Mapping[str, Any]) -> bool:
    """True for the ``config.json`` of a class with scores for whole texts."""
    named = config.get("architectures")
    return isinstance(named, list) and any(str(name).endswith("ForSequenceClassification") for name in named)


def labels_of(config: Mapping[str, Any]) -> int:
    """The scores of a classifier, of which transformers leaves two unsaid."""
    named = config.get("id2label")
    if isinstance(named, dict):
        return len(named)
    number = config.get("num_labels")
    return number if isinstance(number, int) else 2


def poolings(folder: Path) -> list[Path]:
    """The configuration of each module of ``folder`` that pools; empty where there is no ``modules.json``."""
    if not (folder / "modules.json").is_file():
        return []
    return [folder / name / "config.json" for kind, name in modules_of(folder) if kind == "Pooling"]


def pooling_file(folder: Path) -> Path | None:
    """Return the file by which ``folder`` says how its encoder is pooled; None where it does not say.

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

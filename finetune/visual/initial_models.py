"""What a report says of the model that a ``visual`` run started from, and of its data, as far as it is still there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.base.errors import UserError
from pretrain.base.files import read_json
from pretrain.config import flatten, load_mapping

SCRATCH = "scratch"
"""``model.init`` of a model with random weights."""


class Initial(NamedTuple):
    """A name for the initial model, and how it was pretrained in a few words (empty where that is not known)."""

    name: str
    pretraining: str


def describe_initial(init: Any, source: Path) -> Initial:
    """Describe ``model.init`` of a run.

    Args:
        init: the value in the configuration.
        source: the folder of the run or sweep; relative paths that lead nowhere from here are tried from there.
    """
    if init is None or str(init) == SCRATCH:
        return Initial("no pretraining", "none")
    path = Path(str(init))
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    config = _config_of(run) or _config_of(path) or _config_of(source / path)
    if not config:
        return Initial(run.name, "")
    if config.get("task.type") == "visual":
        before = describe_initial(config.get("model.init"), run)
        return Initial(run.name, f"{before.pretraining}, then {config.get('data.task')}".removeprefix(", "))
    return Initial(run.name, pretraining_of(config))


def pretraining_of(config: Mapping[str, Any]) -> str:
    """``CAPT`` or ``LXMERT objectives``, with question answering or without, of a ``capt_vl`` job's flat keys."""
    kind = "CAPT" if _number(config.get("contrast.weight", 1.0)) > 0 else "LXMERT objectives"
    answers = "with QA" if _number(config.get("objectives.answers", 0.0)) > 0 else "without QA"
    data = ", on synthetic data" if is_synthetic(config) else ""
    return f"{kind}, {answers}{data}"


def is_synthetic(config: Mapping[str, Any]) -> bool:
    """Whether the data of a job (its flat keys) come from the microworld: a number from them is called synthetic."""
    if config.get("data.source") == "microworld":
        return True
    store = config.get("data.regions")
    if not store:
        return False
    try:
        manifest = read_json(Path(str(store)) / "manifest.json", limit=10_000_000)
    except (UserError, OSError):  # a store that has moved: nothing is known of it
        return False
    features = manifest.get("features_of") if isinstance(manifest, dict) else None
    return isinstance(features, dict) and bool(features.get("synthetic"))


def _config_of(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    try:
        return flatten(load_mapping(path, resolved=True)) if path.is_file() else {}
    except UserError:
        return {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0

"""What a report says of the model that a ``visual`` run started from, as far as it is still there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from pretrain.base.errors import UserError
from pretrain.config import flatten, load_mapping
from pretrain.vision_language.report import is_pretraining, pretraining_of

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
    if config.get("task.type") == "visual":
        before = describe_initial(config.get("model.init"), run)
        return Initial(run.name, f"{before.pretraining}, then {config.get('data.task')}".removeprefix(", "))
    return Initial(run.name, pretraining_of(config) if is_pretraining(config) else "")


def _config_of(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    try:
        return flatten(load_mapping(path, resolved=True)) if path.is_file() else {}
    except UserError:
        return {}

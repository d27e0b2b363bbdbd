"""What a report says of the model that a ``visual`` run started from, as far as it is still there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.base.errors import UserError
from pretrain.config import flatten, load_mapping
from pretrain.report.compare import without_seed
from pretrain.vision_language.report import is_pretraining, pretraining_of

SCRATCH = "scratch"
"""``model.init`` of a model with random weights."""


class Initial(NamedTuple):
    """A name for the initial model, and how it was pretrained in a few words (empty where that is not known).

    Models that differ in nothing but the seed of their pretraining have the same ``key``.
    """

    name: str
    pretraining: str
    key: str


def describe_initial(init: Any, source: Path) -> Initial:
    """Describe ``model.init`` of a run.

    Args:
        init: the value in the configuration.
        source: the folder of the run or sweep; relative paths that lead nowhere from here are tried from there.
    """
    if init is None or str(init) == SCRATCH:
        return Initial("no pretraining", "none", "")
    path = Path(str(init))
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    config = _config_of(run) or _config_of(path) or _config_of(source / path)
    if not config:
        return Initial(run.name, "", str(run))
    if config.get("task.type") == "visual":
        before = describe_initial(config.get("model.init"), run)
        same = without_seed({**config, "model.init": before.key})
        return Initial(run.name, f"{before.pretraining}, then {config.get('data.task')}".removeprefix(", "), same)
    return Initial(run.name, pretraining_of(config) if is_pretraining(config) else "", without_seed(config))


def common_name(names: Sequence[str]) -> str:
    """One name for models of several seeds: what their names begin with, such as ``capt`` of ``capt-seed1``, ..."""
    letters = takewhile(lambda column: len(set(column)) == 1, zip(*names, strict=False))
    shared = "".join(column[0] for column in letters).rstrip("0123456789").removesuffix("seed").rstrip("-_. ")
    return shared if len(set(names)) > 1 and shared else names[0]


def _config_of(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    try:
        return flatten(load_mapping(path, resolved=True)) if path.is_file() else {}
    except UserError:
        return {}

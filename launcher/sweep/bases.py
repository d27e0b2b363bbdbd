"""What a sweep's trials are made of, kept in its folder: a resume with other keys would mix two experiments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from launcher import runfolder
from launcher.sweep.trials import Plan
from pretrain.base.errors import ConfigError, DataError
from pretrain.base.files import read_json
from pretrain.base.records import Record, parse
from pretrain.config.load import flatten

BASES = "bases.json"
_SHOWN = 80


class _Base(Record):
    metric: str
    mode: Literal["max", "min"]
    base: dict[str, Any]


def keep_bases(plan: Plan) -> None:
    """Write down the metric and the merged base job of each study, or compare them with what the sweep began with.

    Studies may come and go. A sweep from before these were kept is taken as it is.

    Raises:
        ConfigError: a key of a study's jobs is another one than before; the first is named.
        DataError: the record is damaged.
    """
    path = plan.folder / BASES
    now = {name: {"metric": s.metric, "mode": s.mode, "base": dict(s.base)} for name, s in plan.studies.items()}
    now = json.loads(json.dumps(now, default=str))  # as it is read back
    before: dict[str, Any] = {}
    if path.exists():
        found, hint = read_json(path), "; remove it to go on with the sweep as it is"
        if not isinstance(found, dict):
            raise DataError(f"{path}: damaged: not an object{hint}")
        before = {name: parse(_Base, value, path, hint, error=DataError).model_dump() for name, value in found.items()}
    for name in before.keys() & now.keys():
        _compare(plan, name, before[name], now[name])
    runfolder.write_private(path, json.dumps(before | now, indent=1) + "\n")


def _compare(plan: Plan, study: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    then, new = ({**flatten(x["base"]), "metric": x["metric"], "mode": x["mode"]} for x in (before, now))
    for key in sorted(then.keys() | new.keys()):
        a, b = (json.dumps(x[key])[:_SHOWN] if key in x else "unset" for x in (then, new))
        if a != b:
            raise ConfigError(
                f"study {study}: {key} is {b}, but the sweep in {plan.folder} began with {a}: resume with the same "
                "keys, or name another sweep.dir"
            )

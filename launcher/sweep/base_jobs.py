"""The base jobs of a sweep, kept in its folder: a resume with other keys would mix two experiments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from launcher.sweep.trials import SweepPlan
from pretrain.base.errors import ConfigError, DataError
from pretrain.base.files import read_json, write_text
from pretrain.base.records import Record, parse_record
from pretrain.config.load import flatten

BASES = "bases.json"
_SHOWN = 80


class _Base(Record):
    metric: str
    mode: Literal["max", "min"]
    base: dict[str, Any]


def check_base_jobs(plan: SweepPlan) -> None:
    """Write the metric and the merged base job of each study, or compare them with those that the sweep began with.

    Studies may be added and left out. A sweep folder of an older release, without this file, is accepted.

    Raises:
        ConfigError: a key of a study's jobs is another one than before; the first is named.
        DataError: the record is damaged.
    """
    path = plan.folder / BASES
    now = {name: {"metric": s.metric, "mode": s.mode, "base": dict(s.base)} for name, s in plan.studies.items()}
    now = json.loads(json.dumps(now, default=str))  # as it is read back
    before: dict[str, Any] = {}
    if path.exists():
        content, hint = read_json(path), "; remove it to continue with the sweep as it is"
        if not isinstance(content, dict):
            raise DataError(f"{path}: damaged: not an object{hint}")
        records = {name: parse_record(_Base, value, path, hint, error=DataError) for name, value in content.items()}
        before = {name: record.model_dump() for name, record in records.items()}
    for name in before.keys() & now.keys():
        _compare(plan, name, before[name], now[name])
    write_text(path, json.dumps(before | now, indent=1) + "\n", private=True)


def _compare(plan: SweepPlan, study: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    then, new = ({**flatten(x["base"]), "metric": x["metric"], "mode": x["mode"]} for x in (before, now))
    for key in sorted(then.keys() | new.keys()):
        a, b = (json.dumps(x[key])[:_SHOWN] if key in x else "unset" for x in (then, new))
        if a != b:
            raise ConfigError(
                f"study {study}: {key} is {b}, but the sweep in {plan.folder} began with {a}: resume with the same "
                "keys, or name another sweep.dir"
            )

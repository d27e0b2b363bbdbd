"""Objects planted where a file should be, and values changed within JSON."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from tests.fuzz.harness import HOSTILE


def plant(rng: random.Random, path: Path) -> None:
    """Something else in the place of a file."""
    path.unlink(missing_ok=True)
    kind = rng.randrange(7)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to("/etc/passwd")
    elif kind == 3:
        path.symlink_to(path.name)
    elif kind == 4:
        path.symlink_to("/dev/zero")
    elif kind == 5:
        path.touch()
        os.truncate(path, 8 << 30)  # sparse


def changed_json(rng: random.Random, value: Any) -> Any:
    """A hostile value somewhere in ``value``, a key more, or one less."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice(HOSTILE)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], changed_json(rng, value[at]), *value[at + 1 :]]
    key = rng.choice(sorted(value, key=str))
    action = rng.random()
    if action < 0.1:
        return {k: v for k, v in value.items() if k != key}
    if action < 0.2:
        return {**value, str(rng.choice(HOSTILE)): rng.choice(HOSTILE)}
    return {**value, key: changed_json(rng, value[key])}

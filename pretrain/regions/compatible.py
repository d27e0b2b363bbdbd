"""Features of different models are numbers of different meaning, and are never mixed: in what do two kinds differ?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pretrain.base.errors import shown


def feature_differences(a: Mapping[str, Any], b: Mapping[str, Any], most: int = 3) -> str:
    """In what two stores' ``features_of`` differ: the first ``most`` keys with the values of both; empty if in nothing.

    Keys of nested mappings are joined by dots. A key that one of them lacks counts as None.
    """
    unequal = list(_differences(a, b, ""))
    text = "; ".join(f"{key} is {shown(x, 70)} and {shown(y, 70)}" for key, x, y in unequal[:most])
    return text + (f"; and {len(unequal) - most} more" if len(unequal) > most else "")


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted(a.keys() | b.keys()):
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            yield from _differences(x, y, f"{prefix}{key}.")
        elif x != y:
            yield f"{prefix}{key}", x, y

"""Features of different models are numbers of different meaning: their stores are never mixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pretrain.base.errors import DataError, shown


def require_same_features(a: Mapping[str, Any], b: Mapping[str, Any], *, of_a: object, of_b: object) -> None:
    """Refuse to use the features of two stores, or of a store and a pretrained model, as one.

    Args:
        a: ``features_of`` of the one, as `pretrain.regions.store.StoreManifest` has it.
        b: ``features_of`` of the other.
        of_a: what the message calls the first.
        of_b: what the message calls the second.

    Raises:
        DataError: they differ; the first three keys that do are named with both values.
    """
    unequal = list(_differences(a, b, ""))
    if unequal:
        shown_ = "; ".join(f"{key} is {shown(x)} and {shown(y)}" for key, x, y in unequal[:3])
        raise DataError(
            f"{of_a} and {of_b} hold features of different kinds ({shown_}), which are never mixed: "
            "import or extract both in the same way, with the same model"
        )


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted(a.keys() | b.keys()):
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            yield from _differences(x, y, f"{prefix}{key}.")
        elif x != y:
            yield f"{prefix}{key}", x, y

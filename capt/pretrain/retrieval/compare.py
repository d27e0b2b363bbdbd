"""The comparison of two systems on the queries that evaluations have kept of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from capt.pretrain.base.errors import DataError, did_you_mean, shown
from capt.pretrain.base.paired import paired_difference
from capt.pretrain.config.retrieval import METRICS
from capt.pretrain.data.formats import ReadOptions
from capt.pretrain.data.tables import read_file


def compare(first: str, second: str, *, samples: int = 10_000, seed: int = 1) -> list[dict[str, Any]]:
    """Compare two systems on the queries that `evaluate` has kept of each; see `paired_difference`.

    Args:
        first: a file of per-query figures, or ``FILE:SYSTEM`` for a row beside the model (``bm25``, ``256``).
        second: the same.
        samples: sign flips that are drawn where there are too many to try them all.
        seed: of the draws.

    Returns:
        For each data set and figure the mean of both, and what `paired_difference` says.

    Raises:
        DataError: a file is not of the kind, or the two have not the same queries.
    """
    left, right = _figures(first), _figures(second)
    if left.keys() != right.keys():
        odd = min(left.keys() ^ right.keys())
        missing = second if odd in left else first
        raise DataError(f"{missing}: no query {odd[1]!r} of {odd[0]}, which the other file has")
    rows = []
    for name in dict.fromkeys(each for each, _ in left):
        keys = [key for key in left if key[0] == name]
        for metric in METRICS:
            a, b = ([side[key][metric] for key in keys] for side in (left, right))
            figures = {"first": float(np.mean(a)), "second": float(np.mean(b))}
            found = paired_difference(a, b, draws=samples, seed=seed)
            rows.append({"set": name, "metric": metric, "queries": len(keys), **figures, **found._asdict()})
    return rows


def _figures(given: str) -> dict[tuple[str, str], dict[str, float]]:
    path, system = Path(given), ""
    # FILE:SYSTEM, unless a file has that name.
    if not path.exists() and ":" in given:
        name, _, system = given.rpartition(":")
        path = Path(name)
    found: dict[tuple[str, str], dict[str, float]] = {}
    systems: set[str] = set()
    for where, _, row in read_file(path, ReadOptions(keys=METRICS)):
        try:
            systems.add(str(row["system"]))
            # The model comes first, and then what is beside it.
            system = system or str(row["system"])
            if row["system"] == system:
                key = f"{row['set']} {row['split']}", str(row["query"])
                if key in found:
                    raise DataError(f"{where}: query {shown(key[1])} of {key[0]} again; a file holds one evaluation")
                found[key] = {metric: float(row[metric]) for metric in METRICS}
                for metric, value in found[key].items():
                    if not np.isfinite(value):
                        raise DataError(f"{where}: {metric} is {value}; a finite number is expected")
        except DataError:
            raise
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{where}: not a line of capt evaluate --per-query") from None
    if not found:
        raise DataError(f"{path}: no figures of {system!r}; {did_you_mean(system, sorted(systems), 'it has')}")
    return found

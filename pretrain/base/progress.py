"""The type of the function that long work calls to show how far it is."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[int, int], None]
"""Called as ``callback(done, total)``, both in the caller's unit: rows, bytes or batches."""

"""JSON files that are written entry by entry, so that a world of any size needs no memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


class JsonWriter:
    """Writes the entries of one JSON list or object."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._empty = True

    def add(self, entry: Any, key: str | None = None) -> None:
        """One more entry; ``key`` in an object."""
        self._file.write("\n" if self._empty else ",\n")
        self._file.write(json.dumps(entry) if key is None else f"{json.dumps(key)}: {json.dumps(entry)}")
        self._empty = False


@contextmanager
def json_list(path: Path, within: dict[str, Any] | None = None, key: str = "") -> Iterator[JsonWriter]:
    """Write a list to ``path``: alone, or as the last entry ``key`` of the object ``within``."""
    start, end = ("[", "\n]\n") if within is None else (f"{_open(within)}{json.dumps(key)}: [", "\n]}\n")
    with path.open("w", encoding="utf-8") as file:
        file.write(start)
        yield JsonWriter(file)
        file.write(end)


@contextmanager
def json_object(path: Path) -> Iterator[JsonWriter]:
    """Write an object to ``path``."""
    with path.open("w", encoding="utf-8") as file:
        file.write("{")
        yield JsonWriter(file)
        file.write("\n}\n")


def _open(within: dict[str, Any]) -> str:
    """An object without its closing brace, ready for one more entry."""
    text = json.dumps(within)[:-1]
    return f"{text}, " if within else text

"""Reads the validation rows of a run while it writes them."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any


class Rows:
    """Each validation row of a ``metrics.jsonl`` once, in order, also when a resumed run rewrites the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0
        self._queue: deque[dict[str, Any]] = deque()
        self._last = -1
        self.count = 0
        """Rows handed out or skipped so far."""

    def next(self) -> dict[str, Any] | None:
        """The next row; None while there is none."""
        if not self.waiting():
            return None
        self.count += 1
        return self._queue.popleft()

    def waiting(self) -> bool:
        """Whether ``next`` would return a row."""
        self._read()
        return bool(self._queue)

    def skip(self, step: int) -> None:
        """Count the rows up to a step without handing them out."""
        self._read()
        while self._queue and self._queue[0]["step"] <= step:
            self._queue.popleft()
            self.count += 1

    def _read(self) -> None:
        try:
            with self._path.open("rb") as f:
                facts = self._path.stat()
                if facts.st_ino != self._inode or facts.st_size < self._offset:
                    self._inode, self._offset = facts.st_ino, 0
                f.seek(self._offset)
                text = f.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            row = _parse(line)
            if row is not None and row["step"] > self._last:
                self._last = row["step"]
                self._queue.append(row)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # torn by a crash
        return None
    is_validation = isinstance(row, dict) and row.get("split") == "validation" and isinstance(row.get("step"), int)
    return row if is_validation else None

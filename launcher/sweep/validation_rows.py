"""Reads the validation rows of a run while it writes them."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from pretrain.base.files import open_regular
from pretrain.engine.metrics_file import LINE, Row, parse_row


class ValidationRows:
    """Each validation row of a ``metrics.jsonl`` once, in order, also when a resumed run rewrites the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0
        self._queue: deque[Row] = deque()
        self._last = -1
        self.count = 0
        """Rows handed out or skipped so far."""

    def next(self) -> Row | None:
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
        while self._queue and self._queue[0].step <= step:
            self._queue.popleft()
            self.count += 1

    def _read(self) -> None:
        try:
            with open_regular(self._path) as f:
                facts = os.fstat(f.fileno())
                if facts.st_ino != self._inode or facts.st_size < self._offset:
                    self._inode, self._offset = facts.st_ino, 0
                f.seek(self._offset)
                while line := f.readline(LINE):
                    if not line.endswith(b"\n") and len(line) < LINE:
                        return  # still being written
                    self._offset += len(line)
                    row = parse_row(line)
                    if row is not None and row.is_validation and row.step > self._last:
                        self._last = row.step
                        self._queue.append(row)
        except FileNotFoundError:
            return

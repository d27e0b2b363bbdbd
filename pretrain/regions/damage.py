"""Pictures that cannot be used: each is named, and either stops the extraction or is counted."""

from __future__ import annotations

import logging

from pretrain.base.errors import DataError, counted
from pretrain.base.files import printable

logger = logging.getLogger(__name__)


class Damage:
    """What becomes of pictures that cannot be used.

    Args:
        skip: continue without them. Otherwise the first one stops the extraction.
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.skipped: list[str] = []

    def report(self, where: object, why: str) -> None:
        """Say which picture cannot be used and why. Raises ``DataError`` unless such pictures are skipped."""
        text = f"{where}: {printable(why)}"
        if not self.skip:
            raise DataError(f"{text}; --skip-damaged leaves such pictures out")
        self.skipped.append(str(where))
        logger.warning("left out: %s", text)

    def summary(self) -> str:
        """How many were left out, and the first of them; empty if none was."""
        if not self.skipped:
            return ""
        first = ", ".join(self.skipped[:3])
        return f"{counted(len(self.skipped), 'picture')} LEFT OUT as damaged: {first}" + (
            ", ..." if len(self.skipped) > 3 else ""
        )

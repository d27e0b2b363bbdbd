"""What is measured of a run and kept in its folder, where reports find it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizer.safe_files import write_json

logger = logging.getLogger(__name__)

EVALUATION = "evaluation-{split}.json"
"""Of ``capt evaluate``."""

GENERATED_TEXT = "generated.json"
"""Of ``capt latent perplexity``."""

CODES = "codes"
"""Folder of a run of clusters with the codes of each validation, ``step-00005000.npy`` of shape (K, 500, 2)."""


def keep(path: Path, name: str, result: Mapping[str, Any]) -> None:
    """Write ``result`` as ``name`` into the run folder of ``path``, a run or one of its checkpoints.

    A checkpoint that lies in no run (it has been copied) keeps nothing.
    """
    folders = [path, path.parent.parent] if path.parent.name == "checkpoints" else [path]
    for folder in folders:
        if (folder / "metrics.jsonl").is_file():
            kept = folder / name
            logger.info("%s: %s, for capt report", kept, "replaced" if kept.exists() else "written")
            write_json(kept, result)
            return

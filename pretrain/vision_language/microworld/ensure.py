"""The microworld of a job: made once, imported into a region store, and kept in the cache."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from pretrain.base.locks import cache_lock
from pretrain.regions.importing import import_regions
from pretrain.regions.manifest import MANIFEST
from pretrain.vision_language.microworld.generate import FORMAT, SPLITS, World, write_world

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UseFiles:
    """What one task reads of a microworld.

    Attributes:
        regions: the region store.
        train: files to train on.
        validation: files to select models on.
        test: files to evaluate on.
        answers: the table of all answers.
    """

    regions: Path
    train: tuple[Path, ...]
    validation: tuple[Path, ...]
    test: tuple[Path, ...]
    answers: Path


@dataclass(frozen=True)
class Microworld:
    """A microworld on disk: the folder of its files, and its region store."""

    folder: Path
    regions: Path

    def of(self, use: str) -> UseFiles:
        """The files of a task."""
        parts = {"vqa": ("_questions", "_annotations"), "gqa": ("_questions",)}.get(use, ("",))
        train, validation, test = (
            tuple(self.folder / use / f"{split}{part}.json" for part in parts) for split in SPLITS
        )
        return UseFiles(self.regions, train, validation, test, self.folder / "answers.json")


def ensure_microworld(world: World, cache: Path) -> Microworld:
    """The files and the store of ``world``, made in ``cache`` when they are not there. One process makes, others wait.

    Raises:
        DataError: the cache cannot be locked.
    """
    key = sha256(json.dumps([FORMAT, asdict(world)], sort_keys=True).encode()).hexdigest()[:32]
    root = cache / "microworld"
    made = Microworld(root / key / "world", root / key / "store")
    with cache_lock(root / f".{key}.lock"):
        if not made.folder.is_dir():
            logger.info("drawing the synthetic microworld: %s", world)
            write_world(made.folder, world)
        if not (made.regions / MANIFEST).is_file():
            files = [path for kind in ("pictures", "nlvr2") for path in sorted(made.folder.glob(f"{kind}/*.tsv"))]
            import_regions(made.regions, files, workers=1)
    return made

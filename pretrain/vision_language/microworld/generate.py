"""A whole microworld: files of every kind, in three splits."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from capt.pretrain.base.atomic import new_folder
from capt.pretrain.base.locks import cache_lock
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.regions.importing import import_regions
from capt.pretrain.regions.manifest import MANIFEST
from capt.pretrain.vision_language.microworld.pairs import write_pairs
from capt.pretrain.vision_language.microworld.pictures import Recipe, write_answers, write_pictures
from capt.pretrain.vision_language.microworld.scenes import CLASSES, COLOURS

SPLITS = ("train", "validation", "test")
FORMAT = 3
"""Raised when the files that a job reads of the same `World` would be others."""

_FOLDERS = ("pictures", "pretraining", "captions", "vqa", "gqa", "nlvr2")

_README = """\
# Synthetic microworld

Everything in this folder was computed by a program (`capt regions microworld`); no picture exists and nobody wrote a
sentence. A figure measured here says that a method learns and how fast; it says nothing about pictures or people.

| file | what |
| --- | --- |
| `pictures/*.tsv`, `nlvr2/*.tsv` | regions, as LXMERT's feature files; `capt regions import` reads them |
| `pretraining/*.json` | captions and questions, as LXMERT's pretraining files |
| `captions/*.json` | the captions alone, as COCO's |
| `vqa/*_questions.json`, `vqa/*_annotations.json` | questions with ten annotators each, as VQA v2 |
| `gqa/*_questions.json` | questions, as GQA; validation and test with the questions they entail |
| `nlvr2/*.json` | statements about two pictures, as NLVR2 |
| `objects.txt`, `attributes.txt` | names of the classes, for `capt regions inspect --objects --attributes` |
| `answers.json` | every answer, as LXMERT's `all_ans.json` |
| `microworld.json` | what was asked for, and the number of each |

Splits hold different pictures. A picture depends on the seed and its number alone.
"""


@dataclass(frozen=True)
class World:
    """What a microworld is made of.

    Attributes:
        pictures: 3 or more, of all three splits together: a tenth each for validation and test, at least one.
        seed: another seed is another world of the same kind.
        feature_size: of a region.
        noise: of the features; 0 is none, and 0.5 leaves classes and colours easy to tell.
    """

    pictures: int = 2000
    seed: int = 1
    feature_size: int = 64
    noise: float = 0.5

    @property
    def numbers(self) -> dict[str, range]:
        """The numbers of each split's pictures; the first picture has number 1."""
        held_back = max(1, self.pictures // 10)
        ends = [1, self.pictures - 2 * held_back + 1, self.pictures - held_back + 1, self.pictures + 1]
        return {split: range(start, end) for split, start, end in zip(SPLITS, ends, ends[1:], strict=False)}


def write_world(out: Path, world: World, progress: ProgressCallback | None = None) -> None:
    """Write a world into ``out``, which appears whole at the end. ``progress`` counts pictures and statements.

    Raises:
        DataError: ``out`` exists and is not an empty folder.
    """
    recipe = Recipe(world.seed, world.feature_size, world.noise)
    total = sum(len(numbers) + statements(numbers) for numbers in world.numbers.values())
    with new_folder(out) as folder:
        for name in _FOLDERS:
            (folder / name).mkdir()
        (folder / "README.md").write_text(_README)
        write_answers(folder / "answers.json")
        (folder / "objects.txt").write_text("\n".join(CLASSES) + "\n")
        (folder / "attributes.txt").write_text("\n".join(COLOURS) + "\n")
        counts = {split: len(numbers) for split, numbers in world.numbers.items()}
        record = {"format": FORMAT, "synthetic": True, **asdict(world), "splits": counts}
        (folder / "microworld.json").write_text(json.dumps(record, indent=1) + "\n")
        for done, _ in enumerate(_parts(folder, world, recipe), 1):
            if progress is not None:
                progress(done, total)


def _parts(folder: Path, world: World, recipe: Recipe) -> Iterator[int]:
    for split, numbers in world.numbers.items():
        yield from write_pictures(folder, split, numbers, recipe)
        yield from write_pairs(folder, split, statements(numbers), recipe)


def statements(numbers: range) -> int:
    """The number of statements of NLVR2's kind in a split with these pictures."""
    return max(1, len(numbers) // 2)


# The microworld of a job: made once, imported into a region store, and kept in the cache.


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

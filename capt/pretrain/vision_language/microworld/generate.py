"""A whole microworld: files of every kind, in three splits."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from capt.pretrain.base.atomic import new_folder
from capt.pretrain.base.locks import make_once
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.base.verification import digest_of
from capt.pretrain.regions.importing import import_regions
from capt.pretrain.regions.manifest import MANIFEST
from capt.pretrain.vision_language.microworld.pictures import Recipe, picture, tsv_row, write_answers, write_pictures
from capt.pretrain.vision_language.microworld.scenes import (
    CLASSES,
    COLOURS,
    Scene,
    Statement,
    draw_scene,
    draw_statement,
    random_for,
)

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
    """The settings of a microworld.

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
    """The files of a microworld that one task reads.

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
    key = digest_of([FORMAT, asdict(world)])
    root = cache / "microworld"
    made = Microworld(root / key / "world", root / key / "store")

    def is_made() -> bool:
        return made.folder.is_dir() and (made.regions / MANIFEST).is_file()

    def make() -> None:
        # Each of the two folders appears whole: what an interrupted process has finished is kept.
        if not made.folder.is_dir():
            logger.info("drawing the synthetic microworld: %s", world)
            write_world(made.folder, world)
        if not (made.regions / MANIFEST).is_file():
            files = [path for kind in ("pictures", "nlvr2") for path in sorted(made.folder.glob(f"{kind}/*.tsv"))]
            import_regions(made.regions, files, workers=1)

    make_once(root / f".{key}.lock", is_made, make)
    return made


# Statements about pairs of pictures in the format of NLVR2: four pairs a statement, two true and two false.


PAIRS = 4
"""Pairs of pictures a statement."""
PREFIXES = {"train": "train", "validation": "dev", "test": "test1"}
"""Splits, and how NLVR2's identifiers of theirs begin."""
_TRIES, _STATEMENTS = 48, 1 << 12  # pairs that a statement is tried on; scenes of a set have numbers of their own


class Pair(NamedTuple):
    """Two scenes, the number of the first in its stream (the other is the next), and whether the statement holds."""

    number: int
    left: Scene
    right: Scene
    truth: bool


def draw_set(seed: int, split: str, number: int) -> tuple[Statement, list[Pair]]:
    """Statement ``number`` of a split with its pairs; it depends on seed, split and number alone."""
    rng = random_for(f"statements/{split}", seed, number)
    for attempt in count():
        statement = draw_statement(rng)
        # Half of the pairs are true, half false: a guess without the pictures is right half of the time.
        wanted = {True: PAIRS // 2, False: PAIRS // 2}
        pairs: list[Pair] = []
        for k in range(_TRIES):
            first = (number * _STATEMENTS + attempt * _TRIES + k) * 2
            left, right = (draw_scene(seed, first + side, _stream(split)) for side in (0, 1))
            truth = statement.true_of(left, right)
            if wanted[truth]:
                wanted[truth] -= 1
                pairs.append(Pair(first, left, right, truth))
            if len(pairs) == PAIRS:
                return statement, pairs
    raise AssertionError("a statement that is true of two pairs and false of two is drawn sooner or later")


def write_pairs(out: Path, split: str, statements: int, recipe: Recipe) -> Iterator[int]:
    """Write the statements of a split and the regions of their pictures, a statement after another; yields numbers."""
    folder = out / "nlvr2"
    with (
        (folder / f"{split}.tsv").open("w", encoding="utf-8") as tsv,
        (folder / f"{split}.json").open("w", encoding="utf-8") as rows,
    ):
        for number in range(statements):
            statement, pairs = draw_set(recipe.seed, split, number)
            for k, pair in enumerate(pairs):
                identifier = f"{PREFIXES[split]}-{number}-{k}"
                for side, scene in enumerate((pair.left, pair.right)):
                    regions = picture(
                        *(f"{identifier}-img{side}", scene, recipe.seed, pair.number + side),
                        *(recipe.feature_size, recipe.noise, _stream(split)),
                    )
                    tsv.write(tsv_row(regions))
                # The last number of NLVR2's identifiers is that of the sentence, of which a set here has one.
                rows.write(json.dumps(_row(statement, f"{identifier}-0", pair.truth)) + "\n")
            yield number


def _row(statement: Statement, identifier: str, truth: bool) -> dict[str, Any]:
    label = str(truth)
    return {
        "identifier": identifier,
        "sentence": statement.words(),
        "label": label,
        "left_url": "",
        "right_url": "",
        "synset": "microworld",
        "query": "synthetic",
        "writer": "0",
        "validation": {"0": label},
        "extra_validations": {},
    }


def _stream(split: str) -> str:
    return f"pair/{split}"

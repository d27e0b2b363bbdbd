"""Statements about pairs of pictures in the format of NLVR2: four pairs a statement, two true and two false."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from capt.pretrain.vision_language.microworld.pictures import Recipe, picture, tsv_row
from capt.pretrain.vision_language.microworld.scenes import Scene, draw_scene, random_for
from capt.pretrain.vision_language.microworld.sentences import Statement, draw_statement

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

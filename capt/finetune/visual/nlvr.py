"""NLVR2 and NLVR v1: accuracy and consistency as the official scripts compute them, and their result files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
from jaxtyping import Int64

from capt.finetune.order import RowNumbers
from capt.finetune.predictions import write_checked
from capt.finetune.visual.dumps import LARGEST, Checked, Figures, checked, coverage_problems, cut
from capt.pretrain.base.errors import ConfigError, DataError, counted, shown
from capt.pretrain.base.files import read_text
from capt.pretrain.base.randomness import generator_for
from capt.pretrain.regions.nlvr1 import BOXES, COLUMNS, STEP, WIDTH
from capt.pretrain.regions.store import Regions, RegionStore
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.files import Document
from capt.pretrain.vision_language.data.read import examples_of

Version = Literal["nlvr1", "nlvr2"]

_WORDS: dict[Version, tuple[str, str]] = {"nlvr2": ("False", "True"), "nlvr1": ("false", "true")}


def nlvr2_group(identifier: str) -> str:
    """The sentence that statements share: ``dev-850-0-1`` without the number of its pair of pictures (the third)."""
    fields = identifier.split("-")
    return "-".join([*fields[:2], "", *fields[3:]])


def nlvr1_group(identifier: str) -> str:
    """The stem of an identifier: ``1572`` of ``1572-0``; the rows of one stem were written together."""
    return identifier.split("-")[0]


_GROUPS: dict[Version, Callable[[str], str]] = {"nlvr2": nlvr2_group, "nlvr1": nlvr1_group}


def nlvr_scores(predictions: Mapping[str, bool], examples: Iterable[Example], version: Version) -> dict[str, float]:
    """``accuracy`` over the statements, and ``consistency``: the part of the groups that are right in all statements.

    Statements are grouped by `nlvr2_group` or `nlvr1_group`. Statements without a label do not count.

    Raises:
        DataError: no statement has a label, or one has no prediction.
    """
    labelled = {str(example.id): example.truth for example in examples if example.truth is not None}
    if not labelled:
        raise DataError("no statement has a label; there is nothing to score")
    if missing := [key for key in labelled if key not in predictions]:
        raise DataError(f"{counted(len(missing), 'statement')} without a prediction, such as {missing[0]!r}")
    right = {key: predictions[key] == truth for key, truth in labelled.items()}
    groups: dict[str, bool] = {}
    for key, is_right in right.items():
        group = _GROUPS[version](key)
        groups[group] = groups.get(group, True) and is_right
    return {
        "accuracy": sum(right.values()) / len(right),
        "consistency": sum(groups.values()) / len(groups),
    }


def write_nlvr(predictions: Mapping[str, bool], out: Path, expected: Iterable[int | str], version: Version) -> Path:
    """Write ``identifier,True`` (NLVR2) or ``identifier,true`` (NLVR v1) lines, checked by `check_nlvr` before.

    Raises:
        DataError: the predictions are not exactly those of the statements ``expected``; nothing is written.
    """
    wanted = list(expected)

    def write(file: IO[bytes]) -> None:
        for key, value in predictions.items():
            file.write(f"{key},{_WORDS[version][value]}\n".encode())

    return write_checked(out, write, lambda path: check_nlvr(path, wanted, version))


def check_nlvr(path: Path, expected: Iterable[int | str], version: Version, *, only: bool = True) -> list[str]:
    """What the official script would not score in a result file, one line for each problem; empty for a valid one.

    It must be a CSV without a header, with ``identifier,True`` or ``identifier,False`` (NLVR v1: in lower case; upper
    and lower case count the same) for each statement of the set, and with ``only`` for no other one. The official
    scripts pass over others.

    Raises:
        DataError: the file is missing, too large or not UTF-8 text.
    """
    rows, problems = _rows(path, version)
    return problems + coverage_problems([key for key, _ in rows], expected, only=only)


def read_nlvr(path: Path, version: Version) -> dict[str, bool]:
    """The predictions of a result file. Raises ``DataError`` for one that is malformed."""
    rows, problems = _rows(path, version)
    if problems:
        raise DataError(f"{path}: {'; '.join(problems)}")
    return dict(rows)


def _rows(path: Path, version: Version) -> tuple[list[tuple[str, bool]], list[str]]:
    rows, problems = [], []
    words = [word.lower() for word in _WORDS[version]]
    for number, line in enumerate(read_text(path, limit=LARGEST).split("\n"), start=1):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 2 or cells[1].lower() not in words:
            problems.append(f"line {number}: {shown(line)} is not identifier,{'|'.join(reversed(_WORDS[version]))}")
        else:
            rows.append((cells[0], cells[1].lower() == words[1]))
    return rows, cut(problems)


def check(path: Path, documents: list[Document], task: str) -> Checked:
    """Check and score a result file of NLVR2 or NLVR v1."""
    version = cast(Version, task)
    examples = examples_of(documents, what="--data")
    ids = [str(example.id) for example in examples]

    def score(predictions: Mapping[str, bool]) -> Figures:
        return Figures(nlvr_scores(predictions, examples, version))

    labelled = any(example.truth is not None for example in examples)
    problems = check_nlvr(path, ids, version, only=False)
    return checked(task, ids, problems, lambda: read_nlvr(path, version), score if labelled else None)


def write(
    predictions: Mapping[Any, Any], examples: Sequence[Example], files: Sequence[Path], out: Path, task: str
) -> Path:
    """Write the truths of the statements ``examples``."""
    return write_nlvr(predictions, out, [str(row.id) for row in examples], cast(Version, task))


def scores(predictions: Mapping[str, bool], examples: Iterable[Example], task: str) -> dict[str, float]:
    """Return the scores of a result file (`nlvr_scores`)."""
    return nlvr_scores(predictions, examples, cast(Version, task))


# The three boxes of an NLVR v1 picture in another order. What a sentence says of them stays true or false.
#
# The data set itself came with all six orders of every picture (Suhr et al. 2017).


_FIRST = COLUMNS.index("first box")
_NUMBER = slice(_FIRST, _FIRST + BOXES)


def permuted(regions: Regions, orders: Int64[np.ndarray, "n boxes"]) -> Regions:
    """The regions with box ``k`` of picture ``i`` at place ``orders[i, k]``: other edges and another box number."""
    features, boxes = regions.features.copy(), regions.boxes.copy()
    before = features[..., _NUMBER].argmax(-1)
    after = np.take_along_axis(orders, before, axis=1)
    features[..., _NUMBER] = np.eye(BOXES, dtype=features.dtype)[after] * regions.present[..., None]
    # Boxes lie STEP pixels apart, and widths count as 1.
    shift = ((after - before) * regions.present * np.float32(STEP / WIDTH)).astype(np.float32)
    boxes[..., [0, 2]] += shift[..., None]
    return regions._replace(features=features, boxes=boxes)


@dataclass(frozen=True)
class Permute:
    """A random order of the boxes for every sample that is trained on (`capt.finetune.visual.rows.Augment`)."""

    seed: int

    def __call__(self, regions: Regions, samples: RowNumbers) -> Regions:
        """The regions of one picture a sample, permuted by the sample's number."""
        draws = [generator_for("finetune/visual/permute", self.seed, 0, int(sample)) for sample in samples]
        return permuted(regions, np.array([draw.permutation(BOXES) for draw in draws], dtype=np.int64))


def require_scenes(store: RegionStore) -> None:
    """Raise ``ConfigError`` for a store whose features do not say in which box a region lies."""
    backend = store.manifest.features_of.get("backend")
    if backend != "nlvr1" or store.manifest.feature_size != len(COLUMNS):
        raise ConfigError(
            f"model.augment permute: {store.folder} was made by {backend}, and only features of scenes (capt regions "
            "import FILE.json --format nlvr1) tell which box a region is in; set model.augment=none"
        )

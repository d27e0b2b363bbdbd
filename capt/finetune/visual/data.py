"""Read the files of a ``visual`` job: rows, the part split off for validation, the answer table, data sets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from capt.finetune.encoding import encode_texts
from capt.finetune.order import chosen_rows
from capt.finetune.visual.config import VisualData, VisualTask
from capt.finetune.visual.rows import PictureRows, SoftTargets
from capt.pretrain.base.errors import DataError, counted
from capt.pretrain.base.overlap import report_overlap, shared
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.data.answers import AnswerTable, build_table, coverage, load_table, log_coverage
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.read import read_examples
from capt.pretrain.vision_language.prepare import first_shown, with_pictures
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)


class Splits(NamedTuple):
    """The rows to train on and those to select models on."""

    train: list[Example]
    validation: list[Example]


def read_splits(data: VisualData) -> Splits:
    """The rows of both splits of a section that names its files, all labelled.

    Raises:
        DataError: a file cannot be read, a row has no label or is of another kind of task, or no row for validation
            counts.
    """
    train = read_labelled(data.train, data.visual_task, "data.train")
    if data.validation:
        validation = read_labelled(data.validation, data.visual_task, "data.validation")
    else:
        assert data.validation_share is not None, "VisualData lets no job through without it"
        train, validation = split_off(train, data.visual_task, data.validation_share)
    require_own_ids(validation, "data.validation")
    require_counted(validation, "data.validation")
    keep = chosen_rows(len(train), data.max_train)
    splits = Splits([train[i] for i in keep], validation)
    _report_overlap(splits, data.visual_task)
    return splits


def without_missing(splits: Splits, store: RegionStore) -> Splits:
    """The rows whose pictures are in the store; others are counted in the log. Raises ``DataError`` where none is."""
    kept = []
    for rows, what in zip(splits, ("data.train", "data.validation"), strict=True):
        present, missing = with_pictures(rows, store, what)
        if missing:
            logger.warning(
                "%s: %s LEFT OUT, whose pictures are not in the store: %s", what, counted(len(missing), "row"),
                first_shown(missing),
            )  # fmt: skip
        kept.append(present)
    require_counted(kept[1], "data.validation")
    return Splits(*kept)


def _report_overlap(splits: Splits, task: VisualTask) -> None:
    asked = ([(row.text, row.pictures) for row in rows] for rows in splits)
    pictures = ({name for row in rows for name in row.pictures} for rows in splits)
    report_overlap({"question" if task.answers else "statement": shared(*asked), "picture": shared(*pictures)})


def read_rows(paths: Sequence[Path], task: VisualTask, what: str) -> list[Example]:
    """The rows of these files, with labels or without. Raises ``DataError`` for rows of another kind of task."""
    rows = read_examples(paths, what=what)
    if not rows:
        raise DataError(f"{what}: no rows in {', '.join(map(str, paths))}")
    for row in rows:
        if len(row.pictures) != task.pictures:
            raise DataError(f"{what}: row {row.id} has {len(row.pictures)} pictures; {task.name} has {task.pictures}")
        statement = row.truth is not None
        if statement if task.answers else row.answers is not None and not statement:
            kind = "a question with an answer table" if task.answers else "a statement that is true or false"
            raise DataError(f"{what}: row {row.id} belongs to another task; a row of {task.name} is {kind}")
    return rows


def read_labelled(paths: Sequence[Path], task: VisualTask, what: str) -> list[Example]:
    """Read labelled rows (`read_rows`). Raises ``DataError`` where a row has no label."""
    rows = read_rows(paths, task, what)
    bare = [row.id for row in rows if not is_labelled(row, task)]
    if bare:
        raise DataError(f"{what}: {len(bare)} of {len(rows)} rows have no label, such as {bare[0]}")
    return rows


def require_own_ids(rows: Sequence[Example], what: str) -> None:
    """Raise ``DataError`` where two rows have one id: metrics and result files are by id."""
    seen = set[int | str]()
    for row in rows:
        if row.id in seen:
            raise DataError(f"{what}: the id {row.id} occurs twice; name the files of one split")
        seen.add(row.id)


def require_counted(rows: Sequence[Example], what: str) -> None:
    """Raise ``DataError`` where accuracy counts none of the rows."""
    if not any(row.counts for row in rows):
        raise DataError(f"{what}: no question is balanced, and accuracy counts only those; name other files")


def is_labelled(row: Example, task: VisualTask) -> bool:
    """Return whether the file has the label of this row."""
    return (row.answers if task.answers else row.truth) is not None


def split_off(rows: Sequence[Example], task: VisualTask, share: float) -> Splits:
    """About ``share`` of ``rows`` for validation, the same rows for every seed.

    Rows that were written together stay together: statements with the same stem of their identifier, questions about
    the same picture. Groups are ordered by a digest of their names.

    Raises:
        DataError: there are fewer than two groups.
    """
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(group_of(row, task), []).append(number)
    if len(groups) < 2:
        raise DataError("data.validation_share: all rows belong together; name data.validation instead")
    wanted, chosen = share * len(rows), set[int]()
    # The last group stays for training, whatever the share.
    for name in sorted(groups, key=lambda name: sha256(name.encode()).digest())[:-1]:
        # A group is taken when this comes nearer to the share than to leave it.
        if chosen and len(chosen) + len(groups[name]) / 2 > wanted:
            break
        chosen.update(groups[name])
    logger.info("data.validation_share %g: %d of %d rows are for validation", share, len(chosen), len(rows))
    kept = [row for number, row in enumerate(rows) if number not in chosen]
    return Splits(kept, [rows[number] for number in sorted(chosen)])


def group_of(row: Example, task: VisualTask) -> str:
    """Return the name of a row's group: NLVR2's ``dev-850-0-1`` and ``dev-850-1-0`` share ``dev-850``."""
    if not task.stem:
        return " ".join(row.pictures)
    return "-".join(str(row.id).split("-")[: task.stem])


def answer_table(data: VisualData, splits: Splits) -> AnswerTable | None:
    """The answers of a task of questions: those of ``data.answers``, or those of the rows; None for statements.

    VQA's are the answers of ``data.minimum_answers`` questions or more in both splits (9, as Anderson et al. 2018 and
    LXMERT have it), GQA's are all.

    Raises:
        DataError: the table cannot be read, would be empty, or has no answer of any question.
    """
    if not data.visual_task.answers:
        return None
    if data.answers is not None:
        table = load_table(data.answers)
        found = coverage(splits.train, table)
        if found.uncovered == found.questions:
            raise DataError(f"data.answers {data.answers}: it has no answer of any question in data.train")
        return table
    least = 1 if data.visual_task.rare_answers else data.minimum_answers
    return build_table([*splits.train, *splits.validation], least)


def data_digest(splits: Splits, store: RegionStore, answers: AnswerTable | None) -> str:
    """A digest of what a job trains and validates on: rows, regions and answers."""
    digest = sha256(store.manifest.key.encode())
    for part in (*splits, () if answers is None else answers.answers):
        digest.update(f"{len(part)}\n".encode())
        for row in part:
            digest.update(f"{row!r}\n".encode())
    return digest.hexdigest()[:32]


def row_set(
    rows: Sequence[Example],
    data: VisualData,
    tokenizer: TextTokenizer,
    store: RegionStore,
    answers: AnswerTable | None,
    what: str | None,
) -> PictureRows:
    """Rows as a data set that batches can be made of.

    Args:
        rows: all labelled, or else without targets.
        data: the section of the job.
        tokenizer: that of the model.
        store: where the pictures are.
        answers: the table of a task of questions.
        what: what to call the rows in errors and in the log; None = they are some of many, which were looked at before.

    Raises:
        DataError: a picture is not in the store.
    """
    pictures = store.rows([name for row in rows for name in row.pictures], what or "rows")
    encoded = encode_texts(
        [row.text for row in rows],
        None,
        tokenizer,
        data.sequence_length,
        source=what,
        cache=data.cache / "finetune",
    )
    shape = (len(rows), data.visual_task.pictures)
    targets = _targets(rows, data.visual_task, answers, what or "rows")
    return PictureRows(rows, encoded, store, pictures.reshape(shape), targets, tokenizer.special.pad)


def _targets(
    rows: Sequence[Example], task: VisualTask, answers: AnswerTable | None, what: str
) -> SoftTargets | np.ndarray | None:
    if not all(is_labelled(row, task) for row in rows):
        return None
    if answers is None:
        return np.array([row.truth for row in rows], dtype=np.int64)
    log_coverage(what, coverage(rows, answers), answers)
    return SoftTargets.of([row.answers or {} for row in rows], answers.index)

"""Read labelled texts of one's own: the rows to train on and those that are held out, with labels as numbers."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from capt.finetune.glue.files import Examples
from capt.finetune.labels.config import LabelsData
from capt.finetune.labels.kinds import parsed_label, resolved
from capt.finetune.labels.rows import Labelled, read_rows
from capt.pretrain.base.errors import DataError, counted, shown
from capt.pretrain.base.overlap import report_overlap, shared

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Splits:
    """The examples that a job trains and validates on; ``data`` is its section with all that was found."""

    data: LabelsData
    train: Examples
    validation: Examples
    digest: str


def read_splits(data: LabelsData) -> Splits:
    """Read the files of a job, find out what the labels are, and hold rows out.

    Raises:
        DataError: a file cannot be read, or a row has no text or no label that fits; the message names file, line and
            what would be right.
        ConfigError: the labels are not of ``data.kind``, or what they are has to be said.
    """
    rows = read_rows(data.train, data)
    # The training rows alone decide what the labels are; the held-out file is read by that.
    data = resolved(data, rows)
    held_out = None if data.validation is None else read_rows(data.validation, data)
    labels = [parsed_label(rows, i, data) for i in range(len(rows))]
    if data.kind != "regression":
        _report_contradictions(rows, labels)
    if held_out is None:
        chosen = held_out_rows(rows, labels, data.validation_share, data.split_seed)
        taken = set(chosen)
        train, validation = rows.chosen([i for i in range(len(rows)) if i not in taken]), rows.chosen(chosen)
    else:
        train, validation = rows, held_out
        report_overlap({"text": shared(train.texts(), validation.texts())})
    if data.kind == "regression":
        # Scale and offset are those of the rows that are trained on.
        scores = np.array([parsed_label(train, i, data) for i in range(len(train))], dtype=np.float64)
        if scores.max() == scores.min() and data.scale is None:  # rounding gives equal ones a deviation above 0
            raise DataError(f"{rows.path}: every score is {scores[0]:g}; there is nothing to learn")
        scale = float(scores.std()) if data.scale is None else data.scale
        data = data.model_copy(
            update={"scale": scale, "offset": float(scores.mean()) if data.offset is None else data.offset}
        )
    splits = Splits(data, examples(train, data), examples(validation, data), _digest(rows, held_out))
    _report(splits)
    return splits


def held_out_rows(rows: Labelled, labels: Sequence[Any], share: float, seed: int) -> list[int]:
    """The rows that are held out: about ``share`` of each class (of each range of scores), chosen by ``seed``.

    Rows with the same texts stay together, so that none is trained on and measured. Every class keeps a text in
    training: one with a single text is not held out.

    Raises:
        DataError: there are too few different texts for both sets.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for i in range(len(rows)):
        key = (rows.first[i],) if rows.second is None else (rows.first[i], rows.second[i])
        groups.setdefault(key, []).append(i)
    if len(groups) < 2:
        raise DataError(f"{rows.path}: {counted(len(groups), 'different text')}; name held-out rows in data.validation")
    members = list(groups.values())
    shuffled = [members[i] for i in np.random.default_rng(seed).permutation(len(members))]
    ordered = sorted(shuffled, key=lambda group: labels[group[0]])  # stable: by chance within a class
    wanted = min(max(1, round(share * len(ordered))), len(ordered) - 1)
    # At equal distances in the order of labels, so that each class gives its share.
    places = (np.arange(wanted) + 0.5) * len(ordered) / wanted
    chosen = set(places.astype(np.int64).tolist())
    if not isinstance(labels[0], float):
        chosen = _with_every_class(rows, [[labels[i] for i in group] for group in ordered], chosen, seed)
    return sorted(i for place in chosen for i in ordered[place])


def _with_every_class(rows: Labelled, labels: Sequence[Sequence[Any]], chosen: set[int], seed: int) -> set[int]:
    """The groups that are held out, so that every class keeps one in training; others are held out in their place.

    Args:
        rows: those that are split.
        labels: of each group of rows.
        chosen: the groups that chance has held out.
        seed: chooses those that take their place.

    Raises:
        DataError: every group is the only one of a class.
    """
    classes = [{name for label in group for name in ([label] if isinstance(label, str) else label)} for group in labels]
    # How many groups each class keeps in training; 0 where all of them are held out.
    staying = Counter({name: 0 for group in classes for name in group})
    staying.update(name for i, group in enumerate(classes) if i not in chosen for name in group)
    held_out = set(chosen)
    for i in sorted(chosen):
        if any(not staying[name] for name in classes[i]):
            held_out.remove(i)
            staying.update(classes[i])
    missing = len(chosen) - len(held_out)
    for i in np.random.default_rng(seed).permutation(len(labels)).tolist() if missing else ():
        if missing and i not in chosen and all(staying[name] > 1 for name in classes[i]):
            held_out.add(i)
            staying.subtract(classes[i])
            missing -= 1
    if not held_out:
        raise DataError(f"{rows.path}: every text is the only one of a label; name held-out rows in data.validation")
    groups = Counter(name for group in classes for name in group)
    if alone := sorted(name for name, count in groups.items() if count == 1):
        logger.warning(
            "%s with one text alone, which is trained on, so that validation has none of it: %s",
            counted(len(alone), "label"), ", ".join(map(repr, alone))[:300],
        )  # fmt: skip
    return held_out


def examples(rows: Labelled, data: LabelsData) -> Examples:
    """Rows with their labels as numbers: classes (int64), scores (float32), or 0 and 1 a label (float32).

    Raises:
        DataError: a label is missing or not one of ``data``.
    """
    parsed: list[Any] = [parsed_label(rows, i, data) for i in range(len(rows))]
    labels: np.ndarray
    if data.kind == "regression":
        labels = np.array(parsed, dtype=np.float32)
    else:
        assert data.labels is not None, "resolved fills it in"
        number = {name: i for i, name in enumerate(data.labels)}
        for place, label in zip(rows.places, parsed, strict=True):
            for name in label if isinstance(label, tuple) else (str(label),):
                if name not in number:
                    listed = ", ".join(map(repr, data.labels))[:300]
                    raise DataError(
                        f"{place}: label {shown(name)} is none of {listed}; correct it, or list all in data.labels"
                    )
        if data.kind == "classification":
            labels = np.array([number[str(label)] for label in parsed], dtype=np.int64)
        else:
            labels = np.zeros((len(rows), len(data.labels)), dtype=np.float32)
            for i, label in enumerate(parsed):
                labels[i, [number[name] for name in label]] = 1.0
    return Examples(rows.first, rows.second, labels, list(range(len(rows))), str(rows.path))


def _digest(*parts: Labelled | None) -> str:
    digest = hashlib.sha256()
    for rows in parts:
        content = None if rows is None else [rows.first, rows.second, rows.cells]
        digest.update(json.dumps(content, default=str).encode())
    return digest.hexdigest()[:32]


def _report_contradictions(rows: Labelled, labels: Sequence[Any]) -> None:
    """Warn of texts that have several labels in different rows: no model can have both right."""
    seen: dict[tuple[str, ...], Any] = {}
    places = [
        place
        for text, label, place in zip(rows.texts(), labels, rows.places, strict=True)
        if seen.setdefault(text, label) != label
    ]
    if places:
        logger.warning("rows whose text has another label above: %d, the first is %s", len(places), places[0])


def _report(splits: Splits) -> None:
    """Log what was found, and warn of what a class or a text without training rows makes meaningless."""
    data, train = splits.data, splits.train
    second = "" if data.second is None else f" and {data.second!r}"
    logger.info("%s: text %r%s, label %r", data.train, data.text, second, data.label)
    if data.kind == "regression":
        logger.info("regression: scores of mean %.4g and standard deviation %.4g", data.offset, data.scale)
        return
    assert data.labels is not None, "resolved fills it in"
    assert train.labels is not None, "examples fills it in"
    many = data.kind == "multi_label"
    counts = train.labels.sum(0) if many else np.bincount(train.labels, minlength=len(data.labels))
    listed = ", ".join(f"{name} ({int(count)})" for name, count in zip(data.labels, counts, strict=True))
    logger.info("%s of %d labels: %s", data.kind, len(data.labels), listed[:1000])
    if absent := [name for name, count in zip(data.labels, counts, strict=True) if not count]:
        logger.warning("no row that is trained on has the label %s", ", ".join(map(repr, absent))[:300])
    if many and isinstance(data.label, str) and train.labels.sum(1).max() < 2:
        logger.warning("no row has two labels: is data.label_separator=%r right?", data.label_separator)

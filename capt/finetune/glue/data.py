"""Read and encode the splits of a ``glue`` job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from capt.finetune.batches import TextRows
from capt.finetune.config import TextData
from capt.finetune.encoding import encode_texts
from capt.finetune.glue.config import GlueData
from capt.finetune.glue.files import Examples, read_split, warn_of_row_count
from capt.finetune.glue.tasks import GlueTask
from capt.finetune.order import chosen_rows
from capt.pretrain.base.errors import DataError
from capt.pretrain.data.sts_files import MAX_SCORE
from capt.tokenizer.encode import TextTokenizer

if TYPE_CHECKING:
    import datasets


def read_examples(data: GlueData, task: GlueTask, split: str) -> Examples:
    """The examples of a split, from the files or the hub as the job says. Raises as `read_split` and `read_hub` do."""
    if data.source == "hub":
        return read_hub(task, split, str(data.path or HUB))
    assert data.path is not None, "GlueData lets no job through without it"
    return read_split(data.path, task, split)


def train_rows(data: GlueData, tokenizer: TextTokenizer, length: int, *, types: bool) -> TextRows:
    """The training split, or ``data.max_train`` rows of it. Arguments are those of `row_set`."""
    task = data.text_task
    examples = read_examples(data, task, "train")
    return row_set(examples.rows(chosen_rows(len(examples), data.max_train)), data, tokenizer, length, types=types)


def dev_rows(data: GlueData, tokenizer: TextTokenizer, length: int, *, types: bool) -> dict[str, TextRows]:
    """Every dev split by the suffix of its metrics: ``""``, and ``_mismatched`` for MNLI's second.

    Arguments are those of `row_set`.

    Raises:
        DataError: a split has no labels, or cannot be read.
    """
    task = data.text_task
    sets = {}
    for split in task.splits:
        if not split.startswith("dev"):
            continue
        examples = read_examples(data, task, split)
        if examples.labels is None:
            raise DataError(f"{examples.source}: no labels; the dev split is what the model is measured on")
        # MNLI's matched set has the plain names of the metrics, like the dev set of other tasks.
        suffix = split.removeprefix("dev").removesuffix("_matched")
        sets[suffix] = row_set(examples, data, tokenizer, length, types=types)
    return sets


def row_set(examples: Examples, data: TextData, tokenizer: TextTokenizer, length: int, *, types: bool) -> TextRows:
    """Examples as a data set that batches can be made of.

    Args:
        examples: the rows of a split.
        data: the section of the job, which names the cache of token ids.
        tokenizer: that of the encoder.
        length: tokens that a row may have, special tokens included.
        types: whether the encoder reads token types.
    """
    cache = data.cache / "finetune"
    encoded = encode_texts(
        examples.first, examples.second, tokenizer, length, source=examples.source, types=types, cache=cache
    )
    return TextRows(encoded, examples.labels, tokenizer.special.pad, types=types)


# Read GLUE through ``datasets``: the same examples as in the files, from the hub or from folders that it saved.


HUB = "nyu-mll/glue"


def read_hub(task: GlueTask, split: str, name: str = HUB) -> Examples:
    """A split of ``task`` from the dataset ``name``, with our class numbers whatever order its own have.

    ``name`` may be a folder with what ``save_to_disk`` wrote for each task (``rte/``, ``cola/``, ...).

    Raises:
        DataError: the dataset cannot be had, a column is missing, its label names are not the task's, or a row has no
            label or a score outside 0 to 5.
        ConfigError: the task has no such split.
    """
    split = task.split(split)
    hub_split = split.replace("dev", "validation")
    where = f"{name}/{task.name} ({hub_split})"
    rows = _load(name, task.name, hub_split)
    wanted = (*task.hub_columns, *(() if split.startswith("test") else ("label",)))
    missing = [repr(column) for column in wanted if column not in rows.column_names]
    if missing:
        raise DataError(f"{where}: no column {', '.join(missing)}; it has {', '.join(rows.column_names)}")
    if not len(rows):
        raise DataError(f"{where}: the split is empty")
    warn_of_row_count(task, split, len(rows), where)
    texts = [_texts(rows, column, where) for column in task.hub_columns]
    labels = None if split.startswith("test") else _labels(rows, task, where)
    # A row of a test set goes to the leaderboard under the number that it has there.
    own = split.startswith("test") and "idx" in rows.column_names
    index = [int(i) for i in rows["idx"]] if own else list(range(len(rows)))
    return Examples(texts[0], texts[1] if task.pair else None, labels, index, where)


def _load(name: str, subset: str, split: str) -> datasets.Dataset:
    from capt.pretrain.data.hub import is_saved, load_split  # which takes a second

    saved = Path(name, subset)
    if is_saved(saved):
        return load_split(str(saved), None, split, "data.path")
    try:
        return load_split(name, subset, split, "data.path")
    except DataError as error:
        raise DataError(f"{error}; without a hub use data.source: files") from error


def _texts(rows: datasets.Dataset, column: str, where: str) -> list[str]:
    texts = list(rows[column])
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"{where}, row {number}: {column!r} must be text, it is {type(text).__name__}")
    return texts


def _labels(rows: datasets.Dataset, task: GlueTask, where: str) -> np.ndarray:
    cells = list(rows["label"])
    if task.regression:
        for number, score in enumerate(cells):
            if not isinstance(score, int | float) or not 0 <= score <= MAX_SCORE:
                raise DataError(f"{where}, row {number}: score {score!r} is outside 0 to 5")
        return np.array(cells, dtype=np.float32)
    theirs = getattr(rows.features["label"], "names", None)
    if theirs is None or sorted(theirs) != sorted(task.names):
        listed = ", ".join(map(str, theirs)) if theirs else "no names"
        raise DataError(f"{where}: the labels have {listed}; {task.folder} has {', '.join(task.names)}")
    ours = {number: task.names.index(name) for number, name in enumerate(theirs)}
    for number, label in enumerate(cells):
        if label not in ours:
            raise DataError(f"{where}, row {number}: label {label!r} is none of {', '.join(theirs)}")
    return np.array([ours[label] for label in cells], dtype=np.int64)

"""The splits of a ``glue`` job, read and encoded."""

from __future__ import annotations

import numpy as np

from finetune.batches import RowSet
from finetune.encoding import encode
from finetune.glue.config import GlueData
from finetune.glue.files import Examples, read_split
from finetune.glue.tasks import GlueTask
from pretrain.base.errors import DataError
from tokenizer.encode import TextTokenizer


def read(data: GlueData, task: GlueTask, split: str) -> Examples:
    """The rows of a split, from where the job says. Raises as `read_split` and `read_hub` do."""
    if data.source == "hub":
        from finetune.glue.hub import HUB, read_hub  # datasets takes a second to import

        return read_hub(task, split, str(data.path or HUB))
    assert data.path is not None, "GlueData lets no job through without it"
    return read_split(data.path, task, split)


def chosen_rows(total: int, wanted: int | None) -> np.ndarray:
    """The rows that ``data.max_train`` leaves, in order; the same for every seed of a run."""
    if wanted is None or wanted >= total:
        return np.arange(total)
    return np.sort(np.random.default_rng(0).permutation(total)[:wanted])


def train_rows(data: GlueData, task: GlueTask, tokenizer: TextTokenizer, length: int, *, types: bool) -> RowSet:
    """The training split, or ``data.max_train`` rows of it."""
    examples = read(data, task, "train")
    keep = chosen_rows(len(examples), data.max_train)
    if len(keep) < len(examples):
        second = None if examples.second is None else [examples.second[i] for i in keep]
        labels = None if examples.labels is None else examples.labels[keep]
        first = [examples.first[i] for i in keep]
        examples = Examples(first, second, labels, [examples.index[i] for i in keep], examples.source)
    return row_set(examples, data, tokenizer, length, types=types)


def dev_rows(
    data: GlueData, task: GlueTask, tokenizer: TextTokenizer, length: int, *, types: bool
) -> dict[str, RowSet]:
    """Every dev split under the suffix of its metrics: ``""``, and ``_mismatched`` for MNLI's second."""
    splits = [split for split in task.splits if split.startswith("dev")]
    found = {}
    for split in splits:
        examples = read(data, task, split)
        if examples.labels is None:
            raise DataError(f"{examples.source}: no labels; the dev split is what the model is measured on")
        suffix = split.removeprefix("dev").removesuffix("_matched")
        found[suffix] = row_set(examples, data, tokenizer, length, types=types)
    return found


def row_set(examples: Examples, data: GlueData, tokenizer: TextTokenizer, length: int, *, types: bool) -> RowSet:
    """Examples as batches can be made of them; ``types``: the encoder reads token types."""
    cache = data.cache / "finetune"
    encoded = encode(examples.first, examples.second, tokenizer, length, source=examples.source, cache=cache)
    return RowSet(encoded, examples.labels, tokenizer.special.pad, types=types)

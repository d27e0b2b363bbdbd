"""Read and encode the splits of a ``glue`` job."""

from __future__ import annotations

from capt.finetune.batches import TextRows
from capt.finetune.config import TextData
from capt.finetune.encoding import encode_texts
from capt.finetune.glue.config import GlueData
from capt.finetune.glue.files import Examples, read_split
from capt.finetune.glue.tasks import GlueTask
from capt.finetune.order import chosen_rows
from capt.pretrain.base.errors import DataError
from capt.tokenizer.encode import TextTokenizer


def read_examples(data: GlueData, task: GlueTask, split: str) -> Examples:
    """The examples of a split, from the files or the hub as the job says. Raises as `read_split` and `read_hub` do."""
    if data.source == "hub":
        from capt.finetune.glue.hub import HUB, read_hub  # datasets takes a second to import

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
    encoded = encode_texts(examples.first, examples.second, tokenizer, length, source=examples.source, cache=cache)
    return TextRows(encoded, examples.labels, tokenizer.special.pad, types=types)

"""Small GLUE files and small pretrained encoders, shared by tests of fine-tuning."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capt.finetune.glue.tasks import GLUE

_TEXT = """
river stone house door child book letter night bird tree road city bread king queen water fire wind
opens closes reads writes walks runs sings sleeps leads falls
"""
_WORDS = _TEXT.split()
_MODEL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "initializer_range": 0.1,
}  # fmt: skip


def sentence(generator: random.Random, longest: int = 14) -> str:
    """Words of a fixed vocabulary."""
    words = generator.choices([*_WORDS, "the", "a", "and", "no"], k=generator.randint(2, longest))
    return " ".join(words).capitalize() + "."


def rows(task: str, count: int, seed: int) -> Iterator[tuple[str, str | None, str]]:
    """Texts and a label that can be learnt: class 1 begins with "No"; a score counts the fifths of such rows."""
    generator = random.Random(f"{task}/{seed}")
    labels = GLUE[task].labels or ("0.500", "4.250")
    for _ in range(count):
        number = generator.randrange(len(labels))
        first = ("Yes ", "No ", "Perhaps ")[number] + sentence(generator)
        yield first, sentence(generator, 25) if GLUE[task].pair else None, labels[number]


def write_task(folder: Path, task: str, train: int = 40, dev: int = 13) -> Path:
    """``folder/RTE/train.tsv`` and so on, as they are distributed; returns ``folder``."""
    home = folder / GLUE[task].folder
    home.mkdir(parents=True, exist_ok=True)
    for seed, (split, columns) in enumerate(GLUE[task].columns.items()):
        if columns.label is None:
            continue
        lines = []
        if columns.width is None:
            names = [str(name) for name in (columns.first, columns.second, columns.label) if name is not None]
            lines.append("\t".join(["index", *names]))
        for number, (first, second, label) in enumerate(rows(task, train if split == "train" else dev, seed)):
            if columns.width is not None:
                lines.append(f"gj04\t{label}\t\t{first}")
            else:
                lines.append("\t".join([str(number), first, *([] if second is None else [second]), label]))
        (home / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def write_vocabulary(folder: Path, bert: bool = False) -> int:
    """A tokenizer that knows the words above, of RoBERTa's or BERT's kind; returns its size."""
    folder.mkdir(parents=True, exist_ok=True)
    if bert:
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "the", "a", "and", "no", "yes", "perhaps"]
        words += [*_WORDS, *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
        words = list(dict.fromkeys(words))
        (folder / "vocab.txt").write_text("\n".join(words) + "\n")
        return len(words)
    for name, content in _byte_pairs().items():
        (folder / name).write_bytes(content)
    return 150


@functools.cache
def _byte_pairs() -> dict[str, bytes]:
    """The files of a tokenizer of RoBERTa's kind, which is trained once."""
    from capt.tokenizer.train import train

    generator = random.Random(0)
    lines = [f"{start} {sentence(generator)}" for start in ("Yes", "No", "Perhaps") for _ in range(100)]
    with tempfile.TemporaryDirectory() as name:
        train(iter(lines), Path(name, "tokenizer"), vocab_size=150, type="bpe", byte_fallback=False)
        return {path.name: path.read_bytes() for path in Path(name, "tokenizer").iterdir()}


def write_encoder(folder: Path, cls: str = "RobertaForMaskedLM", **changes: Any) -> Path:
    """A folder that ``transformers`` wrote: a small model of a class with random weights, and its tokenizer."""
    import torch
    import transformers

    bert = not cls.startswith(("Roberta", "XLMRoberta", "MPNet", "Camembert"))
    vocabulary = write_vocabulary(folder, bert)
    architecture = getattr(transformers, cls)
    settings: dict[str, Any] = {**_MODEL, "vocab_size": vocabulary, "max_position_embeddings": 64}
    if not bert:
        settings |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "max_position_embeddings": 66}
        settings |= {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
    else:
        settings["pad_token_id"] = 0
    torch.manual_seed(0)
    model = architecture(architecture.config_class(**settings | changes))
    model.save_pretrained(folder)
    return folder


def drop_key(path: Path, key: str) -> None:
    """Remove a key from a JSON file."""
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))


def glue_mapping(folder: Path, task: str = "rte", **changes: Any) -> dict[str, Any]:
    """A job mapping with everything small; ``changes`` are merged section by section."""
    mapping: dict[str, Any] = {
        "task": {"type": "glue"},
        "run": {"dir": str(folder / "run"), "log_every": 1, "tensorboard": False, "threads": 1},
        "data": {"task": task, "path": str(folder / "glue"), "cache": str(folder / "cache")},
        "model": {"init": str(folder / "encoder"), "dropout": 0.0, "attention_dropout": 0.0},
        "batch": {"global": 8, "micro": 2},
        "schedule": {"epochs": 2},
        "optimizer": {"lr": 3e-3},
        "engine": {"zero_stage": 0},
        "checkpoint": {"every": 0, "keep": 1},
    }
    for key, value in changes.items():
        mapping[key] = {**mapping.get(key, {}), **value} if isinstance(value, dict) else value
    return mapping

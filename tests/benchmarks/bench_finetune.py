"""Fine-tuning a small encoder on RTE and SST-2, against the transformers Trainer with and without grouping by length.

``python -m tests.benchmarks.bench_finetune`` needs the real data that CAPT_DATA names (``glue``, ``vocab/roberta``).
Both sides start from one Hugging Face folder (RoBERTa with CAPT-small's sizes, vocabulary 50,265, fresh weights), train
in fp32 on 2 threads with the same recipe (dropout 0.1, AdamW, no clipping), live in a process of their own, and make
the C library keep freed memory alike (``capt.pretrain.engine.rank``). They take turns of some steps, tokenization left
out, collation included. The other side is ``transformers.Trainer`` with ``RobertaForSequenceClassification`` and
``DataCollatorWithPadding``, as ``run_glue.py`` sets it up with dynamic padding.

Ours has batches of like lengths. So the ratio with the bound is that over the Trainer with
``train_sampling_strategy="group_by_length"`` (``group_by_length`` in older versions), which also has such batches; a
second row has the Trainer in its default, random order. The grouped Trainer goes from long batches to short ones
some times an epoch, so turns differ in work, and a ratio is that of the seconds of all turns, which are an epoch (all
but its first turn, and the first of the next). Prints one JSON object and exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.benchmarks.paired import answer, in_turns, trainer_turns
from tests.realdata import real_data

BOUND, THREADS = 1.3, 2
SIZE = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
LR, LENGTH, EXAMPLES, TURNS = 2e-5, 512, 2432, 19


class Turn(NamedTuple):
    """Samples of a step, and steps of a turn. ``TURNS`` turns are an epoch of ``EXAMPLES`` examples."""

    batch: int
    steps: int


TASKS = {"rte": Turn(16, 8), "sst2": Turn(32, 4)}


def make_model(folder: Path, data: Path) -> Path:
    """A RoBERTa folder with fresh weights and the official vocabulary."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5, **SIZE
    )
    RobertaForMaskedLM(config).save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(data / "vocab" / "roberta" / name, folder)
    return folder


def ours(pipe: Connection, task: str, model: Path, data: Path) -> None:
    """Steps of the ``glue`` task under DeepSpeed each time the parent asks."""
    torch.set_num_threads(THREADS)
    from capt.pretrain.base import distributed
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.engine.rank import keep_freed_memory

    keep_freed_memory()
    quiet_libraries(debug=False)
    from capt.pretrain.config.load import load_job

    settings = [f"data.path={data / 'glue'}", f"model.init={model}", f"data.max_train={EXAMPLES}", f"optimizer.lr={LR}"]
    from capt.finetune.glue.task import GlueFineTuning
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.engine.rank import seed_step
    from capt.pretrain.engine.task import Progress

    tuning = GlueFineTuning(load_job(task, settings), Path(tempfile.gettempdir()) / "unused")
    distributed.initialize(timeout_minutes=10)
    engines, progress = build_engines(tuning.build_modules(), tuning.job, tuning.optimizers()), Progress()
    steps = tuning.build_batches(progress)

    def turn(number: int) -> None:
        for _ in range(TASKS[task].steps):
            seed_step(1, progress.step)
            tuning.step(engines, next(steps), progress)
            progress.step += 1

    answer(pipe, turn)


def make_trainer(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], folder: str, batch: int, *, grouped: bool
) -> Any:
    """The Trainer of ``model`` on tokenized rows; ``grouped`` batches hold examples of like lengths."""
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, per_device_train_batch_size=batch, max_steps=100_000,
        train_sampling_strategy="group_by_length" if grouped else "random",
        learning_rate=LR, adam_beta1=0.9, adam_beta2=0.98, adam_epsilon=1e-6, weight_decay=0.1, max_grad_norm=0.0,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer))


def trainer(pipe: Connection, task: str, model: Path, data: Path, *, grouped: bool) -> None:
    """Steps of ``transformers.Trainer`` each time the parent asks."""
    torch.set_num_threads(THREADS)
    from transformers import AutoTokenizer, RobertaForSequenceClassification

    from capt.finetune.glue.files import read_split
    from capt.finetune.glue.tasks import glue_task
    from capt.finetune.order import chosen_rows
    from capt.pretrain.engine.rank import keep_freed_memory

    keep_freed_memory()
    examples = read_split(data / "glue", glue_task(task), "train")
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert examples.labels is not None
    rows = []
    for i in chosen_rows(len(examples), EXAMPLES):
        texts = (examples.first[i],) if examples.second is None else (examples.first[i], examples.second[i])
        rows.append({**tokenizer(*texts, truncation=True, max_length=LENGTH), "label": int(examples.labels[i])})

    encoder = RobertaForSequenceClassification.from_pretrained(model)
    with tempfile.TemporaryDirectory() as folder:
        training = make_trainer(encoder, tokenizer, rows, folder, TASKS[task].batch, grouped=grouped)
        training.add_callback(trainer_turns(pipe, TASKS[task].steps))
        training.train()


def measure(task: str, model: Path, data: Path, turns: int, *, grouped: bool) -> dict[str, Any]:
    """A row: samples per second of ours over those of the Trainer; bounded where it groups by length as well."""
    timings = in_turns(ours, partial(trainer, grouped=grouped), (task, model, data), turns, warmup=1)
    batch, steps = TASKS[task]
    samples, ratio = turns * steps * batch, timings.ratio_of_sums
    order = "grouped by length" if grouped else "in random order"
    return {
        "name": f"fine-tuning on {task}, batch {batch}: samples/s / Trainer's {order}",
        "value": round(ratio, 2),
        **({"bound": BOUND, "ok": ratio >= BOUND} if grouped else {}),
        "samples/s": round(samples / sum(timings.ours), 1),
        "samples/s of the Trainer": round(samples / sum(timings.other), 1),
    }


def main() -> int:
    """Measure, print, and say whether every bound is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS, help=f"{TURNS} are an epoch")
    arguments = parser.parse_args()
    data = real_data(parser, "glue", "vocab/roberta")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), data)
        rows = [
            measure(task, model, data, arguments.turns, grouped=grouped) for grouped in (True, False) for task in TASKS
        ]
    print(json.dumps({"rows": rows}))
    return 0 if all(row["ok"] for row in rows if "ok" in row) else 1


if __name__ == "__main__":
    raise SystemExit(main())

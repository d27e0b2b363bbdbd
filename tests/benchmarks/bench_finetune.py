"""Fine-tuning a small encoder on RTE and SST-2, against the transformers Trainer with its padding collator.

``python -m tests.benchmarks.bench_finetune`` needs the real data that CAPT_DATA names (``glue``, ``vocab/roberta``).
Both sides start from one Hugging Face folder (RoBERTa with CAPT-small's sizes, vocabulary 50,265, fresh weights), train
in fp32 on 2 threads with the same recipe (dropout 0.1, AdamW, no clipping), and live in a process of their own. They
take turns of some steps, tokenization left out, collation included; a ratio is the median over the turns of the
samples a second within a turn, so that a busy machine shifts both sides alike. Prints one JSON object and exits with 1
when a bound is missed. The other side is ``transformers.Trainer`` with ``RobertaForSequenceClassification`` and
``DataCollatorWithPadding``, as ``run_glue.py`` sets it up with dynamic padding.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.paired import answer, in_turns

BOUND, THREADS, STEPS = 1.3, 2, 8
SIZE = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
TASKS = {"rte": 16, "sst2": 32}
LR, LENGTH, EXAMPLES = 2e-5, 512, 2490


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
    from pretrain.engine import distributed
    from pretrain.engine.allocator import keep_freed_memory
    from pretrain.engine.quiet import quiet_libraries

    keep_freed_memory()
    quiet_libraries(debug=False)
    from pretrain.config.load import load_job

    settings = [f"data.path={data / 'glue'}", f"model.init={model}", f"data.max_train={EXAMPLES}", f"optimizer.lr={LR}"]
    from finetune.glue.task import GlueFineTuning
    from pretrain.engine.engines.build import build_engines
    from pretrain.engine.seeding import seed_step
    from pretrain.engine.task import Progress

    tuning = GlueFineTuning(load_job(task, settings), Path(tempfile.gettempdir()) / "unused")
    distributed.initialize(timeout_minutes=10)
    engines, progress = build_engines(tuning.build_modules(), tuning.job, tuning.optimizers()), Progress()
    steps = tuning.build_batches(progress)

    def turn(number: int) -> None:
        for _ in range(STEPS):
            seed_step(1, progress.step)
            tuning.step(engines, next(steps), progress)
            progress.step += 1

    answer(pipe, turn)


def trainer(pipe: Connection, task: str, model: Path, data: Path) -> None:
    """Steps of ``transformers.Trainer`` each time the parent asks."""
    torch.set_num_threads(THREADS)
    from transformers import (
        AutoTokenizer,
        DataCollatorWithPadding,
        RobertaForSequenceClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )  # fmt: skip

    from finetune.glue.files import read_split
    from finetune.glue.tasks import glue_task
    from finetune.order import chosen_rows

    examples = read_split(data / "glue", glue_task(task), "train")
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert examples.labels is not None
    rows = []
    for i in chosen_rows(len(examples), EXAMPLES):
        texts = (examples.first[i],) if examples.second is None else (examples.first[i], examples.second[i])
        rows.append({**tokenizer(*texts, truncation=True, max_length=LENGTH), "label": int(examples.labels[i])})

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % STEPS == 0:
                if not pipe.recv():
                    raise SystemExit(0)
                self.begin = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % STEPS == 0:
                pipe.send(time.perf_counter() - self.begin)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=TASKS[task], max_steps=100_000,
            learning_rate=LR, adam_beta1=0.9, adam_beta2=0.98, adam_epsilon=1e-6, weight_decay=0.1, max_grad_norm=0.0,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Trainer(
            model=RobertaForSequenceClassification.from_pretrained(model), args=arguments, train_dataset=rows,
            data_collator=DataCollatorWithPadding(tokenizer), callbacks=[Turns()],
        ).train()  # fmt: skip


def measure(task: str, model: Path, data: Path, turns: int) -> dict[str, Any]:
    """The row for one task: samples per second of ours over those of the Trainer."""
    timings = in_turns(ours, trainer, (task, model, data), turns, warmup=1)
    samples = STEPS * TASKS[task]
    ratio = timings.ratio
    return {
        "name": f"fine-tuning on {task}, batch {TASKS[task]}: samples/s / Trainer's",
        "value": round(ratio, 2),
        "bound": BOUND,
        "ok": ratio >= BOUND,
        "samples/s": round(samples / statistics.median(timings.ours), 1),
        "samples/s of the Trainer": round(samples / statistics.median(timings.other), 1),
    }


def main() -> int:
    """Measure, print, and say whether every bound is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args()
    if "CAPT_DATA" not in os.environ:
        parser.error("CAPT_DATA does not name a folder with the real data")
    data = Path(os.environ["CAPT_DATA"])
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), data)
        rows = [measure(task, model, data, arguments.turns) for task in TASKS]
    print(json.dumps({"rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

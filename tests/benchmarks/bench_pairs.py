"""Training on pairs: a step against the trainer of sentence-transformers, and memory by the batch.

``python -m tests.benchmarks.bench_pairs`` needs the real data that CAPT_DATA names (``glue/QNLI``, ``vocab/roberta``).
Both sides start from one Hugging Face folder (RoBERTa of 6 layers x 256, vocabulary 50,265, fresh weights), train in
fp32 on questions and the sentences that answer them (at most 128 tokens) with AdamW and clipping at 1, live in a
process of their own, make the C library keep freed memory alike, and take turns of a step with its batch.

- *ranking*: one forward pass of all pairs, against ``MultipleNegativesRankingLoss``.
- *cached*: one contrast over several micro-batches, against ``CachedMultipleNegativesRankingLoss``, whose mini-batch
  has the pairs of our micro-batch.

The other side tokenises as it trains, as its trainer does; ours has tokenised before. A second row has its batches
tokenised before as well. ``--memory`` measures the most that a process ever held at 1,024, 4,096 and 16,384 pairs a
step in micro-batches of 64, and nothing else. Prints one JSON object and exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import tempfile
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.benchmarks.paired import answer, in_turns, trainer_turns
from tests.realdata import real_data
from tests.support import run_ranks

BOUND, MOST_GROWTH = 2.0, 1.1
SIZE = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
LR, LENGTH, TAU = 2e-5, 128, 0.05
GROWING, MICRO = (1024, 4096, 16_384), 64


class Case(NamedTuple):
    """Pairs of a step, and of a forward pass."""

    batch: int
    micro: int


CASES = {"ranking": Case(64, 64), "cached": Case(256, 32)}


def make_model(folder: Path, data: Path, size: dict[str, int]) -> Path:
    """A RoBERTa folder with fresh weights and the official vocabulary."""
    from transformers import RobertaConfig, RobertaModel

    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1, **size)
    RobertaModel(config).save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(data / "vocab" / "roberta" / name, folder)
    return folder


def write_pairs(path: Path, data: Path) -> Path:
    """Questions and the sentences that answer them, of QNLI."""
    rows = []
    for line in (data / "glue" / "QNLI" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        _, question, sentence, label = line.split("\t")
        if label == "entailment":
            rows.append(json.dumps({"anchor": question, "positive": sentence}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def stepper(model: Path, pairs: Path, batch: int, micro: int, steps: int, threads: int) -> Any:
    """Prepare a step of ``capt_pairs`` with its batch."""
    torch.set_num_threads(threads)
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.config.load import load_job
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.engine.rank import keep_freed_memory
    from capt.pretrain.engine.task import Progress
    from capt.pretrain.pairs.task import PairTask

    keep_freed_memory()
    quiet_libraries(debug=False)
    job = load_job("capt_pairs", [
        f"data.files={pairs}", f"model.init={model}", f"data.cache={pairs.parent / 'cache'}",
        f"data.sequence_length={LENGTH}", "data.validation_fraction=0", f"batch.global={batch}", f"batch.micro={micro}",
        f"schedule.max_steps={steps}", "schedule.warmup_steps=0", f"optimizer.lr={LR}", "optimizer.weight_decay=0.0",
        "loader.workers=0",
        f"run.dir={pairs.parent / 'run'}", f"contrast.temperature.value={TAU}", "run.log_every=1000000",
    ])  # fmt: skip
    task = PairTask(job, job.run.dir)
    engines = build_engines(task.build_modules(), task.job, task.optimizers())
    progress = Progress()
    batches = iter(task.build_batches(progress))

    def step(turn: int) -> None:
        task.step(engines, next(batches), progress)
        progress.step += 1

    return step


def ours(pipe: Connection, name: str, model: Path, pairs: Path, threads: int) -> None:
    """A step each time the parent asks."""
    from capt.pretrain.base import distributed

    distributed.initialize(timeout_minutes=10)
    case = CASES[name]
    answer(pipe, stepper(model, pairs, case.batch, case.micro, 1000, threads))


def theirs(pipe: Connection, name: str, model: Path, pairs: Path, threads: int, *, ready: bool) -> None:
    """A step of sentence-transformers' trainer each time the parent asks; ``ready``: texts are tokenised before."""
    torch.set_num_threads(threads)
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses, modules

    from capt.pretrain.engine.rank import keep_freed_memory

    keep_freed_memory()
    case = CASES[name]
    transformer = modules.Transformer(str(model), max_seq_length=LENGTH)
    layers = [transformer, modules.Pooling(SIZE["hidden_size"], "mean"), modules.Normalize()]
    encoder: Any = SentenceTransformer(modules=layers, device="cpu")
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    if name == "ranking":
        loss: Any = losses.MultipleNegativesRankingLoss(encoder, scale=1 / TAU)
    else:
        loss = losses.CachedMultipleNegativesRankingLoss(encoder, scale=1 / TAU, mini_batch_size=case.micro)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=case.batch, max_steps=100_000,
            learning_rate=LR, weight_decay=0.0, max_grad_norm=1.0, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        training = SentenceTransformerTrainer(
            model=encoder, args=arguments, train_dataset=Dataset.from_list(rows), loss=loss
        )
        if ready:
            training.data_collator = _Ready(training.data_collator)
        training.add_callback(trainer_turns(pipe, 1))
        training.train()


class _Ready:
    """A collator whose first eight batches come again, so that nothing is tokenised for a batch."""

    def __init__(self, collator: Any) -> None:
        self._collator = collator
        self._known: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collator, name)

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        if len(self._known) == 8:
            return {**random.choice(self._known)}
        self._known.append(self._collator(features))
        return {**self._known[-1]}


def most_memory(model: Path, pairs: Path, batch: int) -> float:
    """MiB that this process held at most over three steps of ``batch`` pairs."""
    step = stepper(model, pairs, batch, MICRO, 3, 1)
    for turn in range(3):
        step(turn)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory_rows(folder: Path, data: Path) -> list[dict[str, Any]]:
    """Peak memory of a process by the pairs of a step."""
    model, pairs = make_model(folder / "tiny", data, TINY), folder / "many.jsonl"
    generator = random.Random(0)
    words = [line for line in (data / "vocab" / "roberta" / "merges.txt").read_text(encoding="utf-8").split() if
             line.isalpha()][:5000]  # fmt: skip
    with pairs.open("w", encoding="utf-8") as file:
        for number in range(GROWING[-1]):
            text = " ".join(generator.choices(words, k=generator.randint(4, 24)))
            file.write(json.dumps({"anchor": f"{text} {number}", "positive": f"{number} {text}"}) + "\n")
    most = {batch: run_ranks(most_memory, 1, model, pairs, batch, timeout=1800.0)[0] for batch in GROWING}
    growth = most[GROWING[-1]] / most[GROWING[1]]
    return [{
        "name": f"peak memory of the process, {GROWING[-1]:,} pairs a step / {GROWING[1]:,}, micro-batches of {MICRO}",
        "value": round(growth, 3), "bound": MOST_GROWTH, "ok": growth <= MOST_GROWTH,
        **{f"MiB at {batch:,}": round(value) for batch, value in most.items()},
    }]  # fmt: skip


def time_row(name: str, model: Path, pairs: Path, turns: int, threads: int, *, ready: bool) -> dict[str, Any]:
    """Pairs per second of ours over theirs; bounded where both are as they come."""
    timings = in_turns(
        ours, partial(theirs, ready=ready), (name, model, pairs, threads), turns, warmup=8 if ready else 2
    )
    case = CASES[name]
    how = "its texts tokenised before" if ready else "sentence-transformers' trainer"
    return {
        "name": f"{name}, {case.batch} pairs in micro-batches of {case.micro}: pairs/s / {how}",
        "value": round(timings.ratio, 2),
        **({} if ready else {"bound": BOUND, "ok": timings.ratio >= BOUND}),
        "pairs/s": round(case.batch / statistics.median(timings.ours), 1),
        "pairs/s of theirs": round(case.batch / statistics.median(timings.other), 1),
        "threads": threads,
    }


def main() -> int:
    """Measure, print, and say whether every bound is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true", help="measure memory alone")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    data = real_data(parser, "glue", "vocab/roberta")
    rows = []
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        if not options.memory:
            model, pairs = make_model(folder / "model", data, SIZE), write_pairs(folder / "pairs.jsonl", data)
            rows += [
                time_row(name, model, pairs, options.turns, options.threads, ready=ready)
                for ready in (False, True)
                for name in CASES
            ]
        rows += memory_rows(folder, data)
    print(json.dumps({"rows": rows}))
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

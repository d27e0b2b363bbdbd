"""Training of a reranker: a step against the trainer of sentence-transformers' CrossEncoder.

``python -m tests.benchmarks.bench_rerank --encoder FOLDER`` needs the real data that CAPT_DATA names (``glue/QNLI``)
and a BERT of Hugging Face (all-MiniLM-L6-v2). Both sides start from its weights, train in fp32 with dropout 0.1, AdamW
and clipping at 1 on the same batches in the same order (8 questions of QNLI, each with its answer and 3 other
sentences, at most 128 tokens a pair), live in a process of their own, make the C library keep freed memory alike, and
take turns of a step with its batch.

- *infonce*: against ``ListNetLoss``, whose labels make it InfoNCE, all pairs in one forward pass as ours.
- *bce*: against ``BinaryCrossEntropyLoss`` of the same pairs.

The other side tokenises as it trains, as its trainer does; ours has tokenised before. A second row has its texts
tokenised before as well. ``tests/parity`` shows that the losses of both are equal. Prints a row as soon as it is
measured, and one JSON object in the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.paired import answer, begin_rank, in_turns, trainer_turns
from tests.realdata import real_data

LR, LENGTH, QUERIES, NEGATIVES, BATCHES = 2e-5, 128, 8, 3, 4
"""A file has four batches, so that texts which come again are tokenised once."""
ENCODER_FILES = (
    "config.json", "model.safetensors", "vocab.txt", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json",
)  # fmt: skip


def copy_encoder(source: Path, folder: Path) -> Path:
    """Copy the weights and the tokenizer alone: a CrossEncoder would take the pooling of a sentence encoder too."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name in ENCODER_FILES:
            shutil.copy(path, folder)
    return folder


def write_groups(path: Path, data: Path) -> Path:
    """Questions with the sentence that answers each, and with sentences that answer the questions after it."""
    pairs: dict[str, str] = {}
    for line in (data / "glue" / "QNLI" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        _, question, sentence, label = line.split("\t")
        if label == "entailment":
            pairs.setdefault(question, sentence)
    answers = list(dict.fromkeys(pairs.values()))
    rows = []
    for question, sentence in list(pairs.items())[: QUERIES * BATCHES]:
        others = [other for other in answers if other != sentence]
        first = NEGATIVES * len(rows)
        rows.append({"query": question, "pos": [sentence], "neg": others[first : first + NEGATIVES]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def ours(pipe: Connection, loss: str, model: Path, rows: Path, threads: int) -> None:
    """A step of the ``rerank`` job each time the parent asks."""
    begin_rank(threads)
    from capt.finetune.rerank.task import RerankTraining
    from capt.pretrain.config.load import load_job
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.engine.rank import seed_step
    from capt.pretrain.engine.task import Progress

    job = load_job("rerank", [
        f"data.train={rows}", f"data.cache={rows.parent / 'cache'}", f"data.sequence_length={LENGTH}",
        f"data.negatives={NEGATIVES}", "data.validation_fraction=0", "data.shuffle=false", f"model.init={model}",
        f"batch.global={QUERIES}", "schedule.epochs=null", "schedule.max_steps=1000", "schedule.warmup_ratio=null",
        "schedule.warmup_steps=0", f"optimizer.lr={LR}", "optimizer.weight_decay=0.0", f"loss.type={loss}",
        "engine.precision=fp32", "checkpoint.best=null", f"run.dir={rows.parent / 'run'}",
    ])  # fmt: skip
    task = RerankTraining(job, job.run.dir)
    engines, progress = build_engines(task.build_modules(), task.job, task.optimizers()), Progress()
    batches = iter(task.build_batches(progress))

    def step(turn: int) -> None:
        seed_step(1, progress.step)
        task.step(engines, next(batches), progress)
        progress.step += 1

    answer(pipe, step)


def theirs(pipe: Connection, loss: str, model: Path, rows: Path, threads: int, *, ready: bool) -> None:
    """A step of sentence-transformers' trainer each time the parent asks; ``ready``: texts are tokenised before."""
    torch.set_num_threads(threads)
    from datasets import Dataset
    from sentence_transformers.cross_encoder import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
        losses,
    )
    from torch.utils.data import BatchSampler, SequentialSampler

    from capt.pretrain.engine.rank import keep_freed_memory

    keep_freed_memory()
    reranker: Any = CrossEncoder(str(model), num_labels=1, device="cpu", max_length=LENGTH)
    if ready:
        tokenise = reranker.preprocess
        known: dict[Any, dict[str, Any]] = {}

        def preprocess(pairs: Any, **options: Any) -> dict[str, Any]:
            key = tuple(map(tuple, pairs))
            if key not in known:
                known[key] = tokenise(pairs, **options)
            return {**known[key]}

        reranker.preprocess = preprocess
    groups = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    lists = [{"query": row["query"], "docs": [*row["pos"], *row["neg"]]} for row in groups]
    if loss == "infonce":
        # The softmax of such labels is 1 at the positive.
        data = [{**row, "labels": [1e4] + [0.0] * NEGATIVES} for row in lists]
        size = QUERIES
        function: Any = losses.ListNetLoss(reranker, mini_batch_size=-1)
    else:
        data = [
            {"query": row["query"], "doc": text, "label": float(number == 0)}
            for row in lists
            for number, text in enumerate(row["docs"])
        ]
        size = QUERIES * (1 + NEGATIVES)
        function = losses.BinaryCrossEntropyLoss(reranker)

    class InOrder(CrossEncoderTrainer):  # type: ignore[misc]
        def get_batch_sampler(self, dataset: Any, batch_size: int, drop_last: bool, **_: Any) -> Any:
            return BatchSampler(SequentialSampler(dataset), batch_size, drop_last)

    with tempfile.TemporaryDirectory() as folder:
        arguments = CrossEncoderTrainingArguments(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=size, max_steps=100_000, learning_rate=LR,
            weight_decay=0.0, max_grad_norm=1.0, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        training = InOrder(model=reranker, args=arguments, train_dataset=Dataset.from_list(data), loss=function)
        training.add_callback(trainer_turns(pipe, 1))
        training.train()


def measure(loss: str, model: Path, rows: Path, turns: int, threads: int, *, ready: bool) -> dict[str, Any]:
    """A row: how many times as fast a step of ours is."""
    timings = in_turns(ours, partial(theirs, ready=ready), (loss, model, rows, threads), turns, warmup=BATCHES)
    how = "its texts tokenised before" if ready else "sentence-transformers' CrossEncoderTrainer"
    return {
        "name": f"{loss}, {QUERIES} questions with {1 + NEGATIVES} texts a step: steps/s / {how}",
        "value": round(timings.ratio, 2),
        "seconds a step": round(statistics.median(timings.ours), 3),
        "seconds a step of theirs": round(statistics.median(timings.other), 3),
        "turns": turns,
        "threads": threads,
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", type=Path, required=True, help="folder of a BERT of Hugging Face")
    parser.add_argument("--losses", nargs="+", choices=["infonce", "bce"], default=["infonce", "bce"])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    data = real_data(parser, "glue")
    measured = []
    with tempfile.TemporaryDirectory() as home:
        model, rows = copy_encoder(options.encoder, Path(home) / "model"), write_groups(Path(home) / "g.jsonl", data)
        for loss in options.losses:
            for ready in (False, True):
                measured.append(measure(loss, model, rows, options.turns, options.threads, ready=ready))
                print(json.dumps(measured[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"rows": measured}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

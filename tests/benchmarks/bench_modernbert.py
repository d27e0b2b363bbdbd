"""A masked-language-modelling step of ModernBERT through our engine, against transformers' own model.

``python -m tests.benchmarks.bench_modernbert`` takes steps of Ettin's 17M encoder in fp32 with 30% masks on batches of
4,096 tokens with their padding: 32, 8 or 4 texts of full length, or the longest of full length and the others of
lengths drawn uniformly from 16 on. Local attention is over 128 tokens, as shipped. The other side is
``ModernBertForMaskedLM`` on the same padded batch with torch's fused AdamW, the same allocator and the same number of
threads: as it comes, with all logits, and with ``sparse_prediction``, which computes those of masked tokens alone.
Each side lives in a process of its own and they take steps in turn; a ratio is the median over the turns of the ratio
within a turn. Times are processor time, which other work on the machine lengthens least. It exits with 1 when a ratio
to transformers' model as it comes is below its bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.paired import answer, begin_rank, in_turns

SIZE = {"layers": 7, "hidden": 256, "heads": 4, "ffn": 384}
VOCABULARY, TOKENS, SHORTEST = 50_368, 4096, 16
SHAPES = [(128, True), (512, True), (1024, True), (512, False), (1024, False)]
"""Longest text, and whether the others are of mixed lengths."""
BOUND, CLIP = 1.5, 1.0
ADAM: dict[str, Any] = {"lr": 5e-4, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}


def texts(turn: int) -> tuple[Tensor, Tensor, Tensor]:
    """Padded texts, their masked copy, and labels (-100 elsewhere); turns go through ``SHAPES``."""
    longest, mixed = SHAPES[turn % len(SHAPES)]
    generator = torch.Generator().manual_seed(turn)
    lengths = torch.randint(SHORTEST, longest + 1, (TOKENS // longest, 1), generator=generator)
    lengths[0] = longest
    shape = len(lengths), longest
    real = torch.arange(longest) < (lengths if mixed else longest)
    tokens = torch.randint(5, VOCABULARY, shape, generator=generator).masked_fill_(~real, 1)
    masked = (torch.rand(shape, generator=generator) < 0.3) & real
    masked[:, 0] = True
    return tokens, tokens.masked_fill(masked, 4), tokens.masked_fill(~masked, -100)


def ours(pipe: Connection, threads: int, sparse: bool) -> None:
    """Make a step through our engine each time the parent asks; always with the logits of masked tokens alone."""
    begin_rank(threads)
    from capt.pretrain.config.schema import Job
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.models.capt import CaptModel
    from capt.pretrain.models.modernbert.config import ModernBertConfig

    job = Job.model_validate(
        {
            "task": {"type": "capt_language"},
            "optimizer": {**ADAM, "clip": CLIP},
            "engine": {"precision": "fp32", "zero_stage": 0},
        }
    )
    config = ModernBertConfig(size="custom", **SIZE, vocab_size=VOCABULARY, max_positions=1024)
    engine = build_engines({"model": CaptModel(config, contrast=False)}, job)["model"]

    def step(turn: int) -> None:
        tokens, corrupted, labels = texts(turn)
        slots = int((labels != -100).sum(1).max())
        positions = (labels == -100).int().argsort(dim=1, stable=True)[:, :slots]
        padded = bool((tokens == 1).any())
        out = engine(tokens, corrupted, positions, labels.gather(1, positions), padded=padded)
        engine.backward(out.mlm_loss_sum / out.mlm_count)
        engine.step()

    answer(pipe, step, time.process_time)


def theirs(pipe: Connection, threads: int, sparse: bool) -> None:
    """The same step with ``ModernBertForMaskedLM``, which prefers torch's scaled-dot-product attention on a CPU."""
    torch.set_num_threads(threads)
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    from capt.pretrain.engine.rank import keep_freed_memory

    keep_freed_memory()
    config = ModernBertConfig(
        vocab_size=VOCABULARY, hidden_size=SIZE["hidden"], num_hidden_layers=SIZE["layers"],
        num_attention_heads=SIZE["heads"], intermediate_size=SIZE["ffn"], pad_token_id=1, bos_token_id=0,
        eos_token_id=2, cls_token_id=0, sep_token_id=2, sparse_prediction=sparse, sparse_pred_ignore_index=-100,
    )  # fmt: skip
    model = ModernBertForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)

    def step(turn: int) -> None:
        tokens, corrupted, labels = texts(turn)
        model(input_ids=corrupted, attention_mask=(tokens != 1).long(), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    answer(pipe, step, time.process_time)


def measure(rounds: int, threads: int, *, sparse: bool) -> list[dict[str, Any]]:
    """A row for each shape: how many times as fast ours is."""
    timings = in_turns(ours, theirs, (threads, sparse), rounds * len(SHAPES), warmup=len(SHAPES))
    rows = []
    for number, (longest, mixed) in enumerate(SHAPES):
        us, them = (side[number :: len(SHAPES)] for side in (timings.ours, timings.other))
        ratios = [b / a for a, b in zip(us, them, strict=True)]
        ratio = statistics.median(ratios)
        rows.append(
            {
                "texts": f"{TOKENS // longest} of {SHORTEST if mixed else longest} to {longest} tokens",
                "logits of transformers": "of masked tokens" if sparse else "all, as it comes",
                "ratio": round(ratio, 2),
                "of rounds": f"{min(ratios):.2f} to {max(ratios):.2f}",
                **({} if sparse else {"bound": BOUND, "ok": ratio >= BOUND}),
                "processor seconds": round(statistics.median(us), 3),
                "of transformers": round(statistics.median(them), 3),
            }
        )
    return rows


def main() -> int:
    """Measure, print, and say whether every bound is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each shape and side")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    rows = [row for sparse in (False, True) for row in measure(arguments.rounds, arguments.threads, sparse=sparse)]
    print(json.dumps({"rows": rows}), flush=True)
    return 0 if all(row["ok"] for row in rows if "ok" in row) else 1


if __name__ == "__main__":
    raise SystemExit(main())

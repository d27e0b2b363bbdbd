"""A CAPT-small training step through our engine, against the transformers Trainer doing the same.

``python -m tests.benchmarks.bench_step`` trains CAPT-small (6 layers x 256, vocabulary 50,265) on micro-batches of
16 x 128 tokens on 2 threads, in fp32 and under bf16 autocast, prints one JSON object and exits with 1 when a bound is
missed. The other side is ``transformers.Trainer`` with ``RobertaForMaskedLM`` as a user would write CAPT with it: MLM
labels over all positions, one forward pass a view, a plain in-batch contrastive loss, its fused AdamW. Both sides live
in a process of their own and take steps in turn; a ratio is the median over the turns of the ratio within a turn, so
that a busy machine shifts both sides alike. Tokens are counted once, not once a view.

Ours makes the C library keep freed memory (``capt.pretrain.engine.rank``). The ratios with a bound are those with the
same setting in the Trainer's process; a second row each has the Trainer under glibc's defaults, as it comes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.paired import answer, begin_rank, in_turns, trainer_turns

BATCH, LENGTH, MASKED, VOCABULARY, TAU, THREADS = 16, 128, 19, 50_265, 0.05, 2
BOUNDS = {"fp32": 2.0, "bf16": 2.5}
SIZE = {"layers": 6, "hidden": 256, "heads": 4, "ffn": 1024}
ADAM = {"lr": 5e-4, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}
CLIP = 1.0


def sample(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a packed sequence, its masked copy, and the 19 masked positions (15 % of the 126 ordinary tokens)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, VOCABULARY, (LENGTH,), generator=generator)
    tokens[0], tokens[-1] = 0, 2
    positions = 1 + torch.randperm(LENGTH - 2, generator=generator)[:MASKED]
    return tokens, tokens.scatter(0, positions, 4), positions


def ours(pipe: Connection, precision: str, zero_stage: int) -> None:
    """Make a step of CAPT-small through our engine each time the parent asks."""
    begin_rank(THREADS)
    from capt.pretrain.config.schema import Job
    from capt.pretrain.contrast import capt_loss
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.models.capt import CaptModel
    from capt.pretrain.models.config import RobertaConfig

    job = Job.model_validate(
        {
            "task": {"type": "capt_language"},
            "batch": {"global": BATCH, "micro": BATCH},
            "optimizer": {**ADAM, "clip": CLIP},
            "engine": {"precision": precision, "zero_stage": zero_stage},
        }
    )
    model = CaptModel(RobertaConfig(size="small", vocab_size=VOCABULARY))
    engine = build_engines({"model": model}, job)["model"]

    def step(turn: int) -> None:
        rows = [sample(turn * BATCH + i) for i in range(BATCH)]
        tokens, corrupted, positions = (torch.stack(column) for column in zip(*rows, strict=True))
        out = engine(tokens, corrupted, positions, tokens.gather(1, positions))
        contrast = capt_loss(out.s, out.s_hat, temperature=TAU)
        engine.backward(out.mlm_loss_sum / out.mlm_count + contrast)
        engine.step()

    answer(pipe, step)


class TrainerModel(nn.Module):
    """``RobertaForMaskedLM`` and the aggregation head; the loss is MLM + CAPT of two forward passes."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import RobertaConfig, RobertaForMaskedLM

        h, inner = SIZE["hidden"], SIZE["ffn"]
        config = RobertaConfig(
            vocab_size=VOCABULARY, hidden_size=h, num_hidden_layers=SIZE["layers"], num_attention_heads=SIZE["heads"],
            intermediate_size=inner, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5,
        )  # fmt: skip
        self.encoder = RobertaForMaskedLM(config)
        self.head = nn.Sequential(nn.Linear(h, inner), nn.GELU(), nn.Linear(inner, h))

    def forward(self, tokens: Tensor, corrupted: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss that the Trainer minimises."""
        masked = self.encoder(input_ids=corrupted, labels=labels, output_hidden_states=True)
        original = self.encoder(input_ids=tokens, output_hidden_states=True)
        s, s_hat = (F.normalize(self.head(x.hidden_states[-1][:, 0]).float(), dim=-1) for x in (original, masked))
        both = torch.cat([s, s_hat])
        similarity = (both @ both.T / TAU).fill_diagonal_(float("-inf"))
        other_view = torch.arange(2 * BATCH).roll(BATCH)
        return {"loss": masked.loss + 2 * F.cross_entropy(similarity, other_view)}


def trainer(pipe: Connection, precision: str, zero_stage: int, *, keeps_freed_memory: bool) -> None:
    """Make a step of ``transformers.Trainer`` (which runs without ZeRO) each time the parent asks."""
    torch.set_num_threads(THREADS)
    from transformers import Trainer, TrainingArguments

    from capt.pretrain.engine import rank

    if keeps_freed_memory:
        rank.keep_freed_memory()

    class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            tokens, corrupted, positions = sample(index)
            labels = torch.full_like(tokens, -100).scatter(0, positions, tokens[positions])
            return {"tokens": tokens, "corrupted": corrupted, "labels": labels}

    turns = trainer_turns(pipe, 1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, bf16=precision == "bf16", per_device_train_batch_size=BATCH,
            max_steps=100_000, learning_rate=ADAM["lr"], adam_beta1=ADAM["betas"][0], adam_beta2=ADAM["betas"][1],
            adam_epsilon=ADAM["eps"], weight_decay=ADAM["weight_decay"], max_grad_norm=CLIP, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        Trainer(model=TrainerModel(), args=arguments, train_dataset=Samples(), callbacks=[turns]).train()


def measure(precision: str, zero_stage: int, turns: int, *, same_allocator: bool) -> dict[str, Any]:
    """A row: tokens per second of ours over those of the Trainer; bounded where both have the same allocator."""
    other = partial(trainer, keeps_freed_memory=same_allocator)
    timings = in_turns(ours, other, (precision, zero_stage), turns, warmup=2)
    tokens = BATCH * LENGTH
    ratio, bound = timings.ratio, BOUNDS[precision]
    condition = "same allocator" if same_allocator else "Trainer with glibc's default allocator"
    return {
        "name": f"CAPT-small step, {precision}: tokens/s / Trainer's, {condition}",
        "value": round(ratio, 2),
        **({"bound": bound, "ok": ratio >= bound} if same_allocator else {}),
        "tokens/s": round(tokens / statistics.median(timings.ours)),
        "tokens/s of the Trainer": round(tokens / statistics.median(timings.other)),
    }


def main() -> int:
    """Measure, print, and say whether every bound is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--zero-stage", type=int, default=0, help="of ours; 0 is what the Trainer does")
    arguments = parser.parse_args()
    rows = [
        measure(precision, arguments.zero_stage, arguments.turns, same_allocator=same)
        for same in (True, False) for precision in BOUNDS
    ]  # fmt: skip
    print(json.dumps({"rows": rows}))
    return 0 if all(row["ok"] for row in rows if "ok" in row) else 1


if __name__ == "__main__":
    raise SystemExit(main())

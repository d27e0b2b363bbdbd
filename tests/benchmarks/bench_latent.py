"""A training step of clVAE+_MI at PTB's size against the released recipe rendered step by step in time.

Ours: both views in one pass, torch's fused LSTM over whole sequences, one softmax product for all time steps with its
gradient in the same pass, critics that share one pass for posterior and prior. The other side is plain PyTorch as the
recipe reads: each view by itself, an ``LSTMCell`` a word, output layer and cross entropy a word, ``nn.Dropout``, one
Adam for each part. Same sizes, same losses, same number of critic updates; random words of PTB's average length.
Ours is measured in bf16, as the preset has it, and in fp32; the other side is fp32, as released. Each side lives in a
process of its own and takes steps in turn; the ratio is the median over the turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.benchmarks.paired import answer, begin_rank, in_turns

BATCH, WORDS, VOCABULARY, THREADS, BOUND = 32, 21, 10_002, 2, 2.0
PRESET = Path(__file__).parents[2] / "configs" / "pretrain" / "latent" / "ptb" / "clvae_plus_mi.yaml"


def sentences(turn: int) -> Tensor:
    """``<s> w1 .. w21 </s>``."""
    words = torch.randint(4, VOCABULARY, (BATCH, WORDS), generator=torch.Generator().manual_seed(turn))
    edge = torch.ones(BATCH, 1, dtype=torch.int64)
    return torch.cat([2 * edge, words, 3 * edge], dim=1)


def ours(pipe: Connection, threads: int, precision: str) -> None:
    """The preset's step, on engines."""
    begin_rank(threads)
    from capt.pretrain.config.load import load_job
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.latent.batches import LatentBatch, StepNoise, sample_batch
    from capt.pretrain.latent.config import LatentJob
    from capt.pretrain.latent.models import build, optimizers
    from capt.pretrain.latent.training import train_step

    job = load_job(PRESET, ["data.path=unread", f"engine.precision={precision}"])
    assert isinstance(job, LatentJob)
    engines = build_engines(build(job, VOCABULARY), job, optimizers(job))

    def step(turn: int) -> None:
        batch = LatentBatch(sentences(turn), torch.arange(BATCH), BATCH, BATCH)
        noise = StepNoise(job.run.seed, ("step", turn), batch.rows, BATCH, torch.device("cpu"))
        train_step(job, engines, sample_batch(job, batch, noise), beta=0.5)

    answer(pipe, step)


class Plain(nn.Module):
    """Encoder and decoder of the recipe, a word at a time."""

    def __init__(self, hidden: int = 256, latent: int = 32) -> None:
        super().__init__()
        self.read, self.write = nn.Embedding(VOCABULARY, hidden), nn.Embedding(VOCABULARY, hidden)
        self.encoder, self.head = nn.LSTMCell(hidden, hidden), nn.Linear(hidden + latent, latent)
        self.start, self.decoder = nn.Linear(latent, hidden), nn.LSTMCell(hidden + latent, hidden)
        self.output, self.drop, self.hidden, self.latent = (
            nn.Linear(hidden, VOCABULARY),
            nn.Dropout(0.5),
            hidden,
            latent,
        )
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def encode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """z and h."""
        words = self.drop(self.read(tokens))
        state = (words.new_zeros(BATCH, self.hidden), words.new_zeros(BATCH, self.hidden))
        for t in range(tokens.shape[1]):
            state = self.encoder(words[:, t], state)
        return self.head(torch.cat([state[0], torch.randn(BATCH, self.latent)], dim=1)), state[0]

    def reconstruct(self, z: Tensor, tokens: Tensor) -> Tensor:
        """-log p(x | z), the batch's mean."""
        words = self.drop(self.write(tokens[:, :-1]))
        state, loss = (self.start(z), z.new_zeros(BATCH, self.hidden)), z.new_zeros(())
        for t in range(tokens.shape[1] - 1):
            state = self.decoder(torch.cat([words[:, t], z], dim=1), state)
            loss = loss + F.cross_entropy(self.output(self.drop(state[0])), tokens[:, t + 1], reduction="sum")
        return loss / BATCH


def _critic(inputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((inputs, 512), (512, 512), (512, 512)):
        layers += [nn.Linear(before, after), nn.LeakyReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 1))


def plain(pipe: Connection, threads: int, precision: str) -> None:
    """The recipe, as it reads."""
    torch.set_num_threads(threads)
    model, f, g = Plain(), _critic(288), _critic(32)
    parts = [[*model.read.parameters(), *model.encoder.parameters(), *model.head.parameters()],
             [*model.write.parameters(), *model.start.parameters(), *model.decoder.parameters(),
              *model.output.parameters()]]  # fmt: skip
    adams = [torch.optim.Adam(part, lr=1e-3) for part in parts]
    critics = [torch.optim.Adam(critic.parameters(), lr=1e-5) for critic in (f, g)]

    def circle(q: Tensor, p: Tensor) -> Tensor:
        zero = q.new_zeros(1)
        return torch.logsumexp(torch.cat([zero, p.exp()]), 0) + torch.logsumexp(torch.cat([zero, -q]), 0)

    def step(turn: int) -> None:
        tokens = sentences(turn)
        views = [model.encode(tokens) for _ in range(2)]
        for _ in range(5):
            priors = [torch.randn(BATCH, 32) for _ in views]
            loss_f = sum(
                circle(f(torch.cat([z.detach(), h.detach()], 1))[:, 0], f(torch.cat([prior, h.detach()], 1))[:, 0])
                for (z, h), prior in zip(views, priors, strict=True)
            )
            g_q, g_p = [g(z.detach())[:, 0] for z, _ in views], [g(prior)[:, 0] for prior in priors]
            loss_g = sum(circle(q, p) for q, p in zip(g_q, g_p, strict=True))
            loss_g = loss_g + (g_q[0] - g_q[1]).square().sum() + (g_p[0] - g_p[1]).square().sum()
            for loss, adam in ((loss_f, critics[0]), (loss_g, critics[1])):
                adam.zero_grad()
                loss.backward()
                adam.step()
        g_z = [g(z)[:, 0] for z, _ in views]
        pairs = [F.normalize(torch.cat([z.mean(0, keepdim=True), z]), dim=1) for z, _ in views]
        loss = sum(model.reconstruct(z, tokens) for z, _ in views) + 0.5 * sum(value.mean() for value in g_z)
        loss = loss + 0.5 * (g_z[0] - g_z[1]).square().sum()
        loss = loss + F.cross_entropy(pairs[0] @ pairs[1].t() / 0.05, torch.arange(BATCH + 1))
        for adam in adams:
            adam.zero_grad()
        loss.backward()
        for part, adam in zip(parts, adams, strict=True):
            nn.utils.clip_grad_norm_(part, 5.0)
            adam.step()

    answer(pipe, step)


def measure(turns: int, threads: int, precision: str) -> dict[str, Any]:
    """Tokens a second (each sentence counted once) of ours over those of the plain rendering."""
    timings = in_turns(ours, plain, (threads, precision), turns, warmup=2)
    tokens = BATCH * (WORDS + 1)
    ratio = timings.ratio
    return {
        "name": f"clVAE+_MI step, {precision}, {threads} threads: tokens/s / plain rendering's",
        "value": round(ratio, 2),
        "bound": BOUND,
        "ok": ratio >= BOUND,
        "tokens/s": round(tokens / statistics.median(timings.ours)),
        "tokens/s of the plain one": round(tokens / statistics.median(timings.other)),
    }


def main() -> int:
    """Measure, print, and say whether the bound is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--threads", type=int, default=THREADS)
    arguments = parser.parse_args()
    rows = [measure(arguments.turns, arguments.threads, precision) for precision in ("bf16", "fp32")]
    print(json.dumps({"rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

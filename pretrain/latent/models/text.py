"""The LSTM encoder and decoder of sentences (Bowman et al. 2016; sizes and wiring of the released code).

Whole sequences go through torch's fused LSTM (oneDNN on CPUs, cuDNN on GPUs); the softmax over the vocabulary is one
matrix product for all time steps, its gradient taken in the same pass.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pretrain.latent.config import ModelSection
from pretrain.latent.data.vocabulary import END, PAD, START
from pretrain.latent.models.posterior import Encoded, build_head
from pretrain.models.cross_entropy import UNUSED, masked_cross_entropy

_BLOCK = 1024
"""Rows of logits in one matrix product of the evaluation: 40 MB for PTB's vocabulary."""

_CACHED = 1 << 19
"""Logits that are summed at once on a CPU: 2 MB, what stays in a core's L2 cache."""


def initialise(module: nn.Module, bound: float) -> None:
    """Every parameter uniform in plus or minus ``bound``, as in the released code."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-bound, bound)


class TextEncoder(nn.Module):
    """h(x): the LSTM's state at ``</s>``; and the posterior's head on it."""

    def __init__(self, vocabulary: int, section: ModelSection) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, section.embedding)
        self.lstm = nn.LSTM(section.embedding, section.hidden)
        self.head = build_head(section, section.hidden)
        initialise(self, section.init_range)

    def forward(
        self, tokens: Int[Tensor, "n length"], eps: Float[Tensor, "n e"], keep: Float[Tensor, "length n w"] | None
    ) -> Encoded:
        """Encode ``<s> w1 .. wn </s>`` with posterior noise ``eps`` and dropout factors ``keep`` on word vectors."""
        h = self.represent(tokens, keep)
        with torch.autocast(h.device.type, enabled=False):  # densities and critics take z as it is: in fp32
            encoded: Encoded = self.head(h, eps)
        return encoded

    def represent(
        self, tokens: Int[Tensor, "n length"], keep: Float[Tensor, "length n w"] | None = None
    ) -> Float[Tensor, "n k"]:
        """h(x) of each row."""
        words = self.embedding(tokens.t())
        if keep is not None:
            words = words * keep
        _, (state, _) = self.lstm(words)
        last: Tensor = state[0].to(words.dtype)
        return last


class TextDecoder(nn.Module):
    """p(x | z): an LSTM that sees z beside every word, and in its first hidden state."""

    def __init__(self, vocabulary: int, section: ModelSection) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, section.embedding)
        self.start = nn.Linear(section.latent, section.hidden)
        self.lstm = nn.LSTM(section.embedding + section.latent, section.hidden)
        self.output = nn.Linear(section.hidden, vocabulary)
        initialise(self, section.init_range)

    def forward(
        self,
        z: Float[Tensor, "n d"],
        tokens: Int[Tensor, "n length"],
        counted: Tensor,
        keep: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Float[Tensor, ""]:
        """Sum of -log p(x | z) over the rows that ``counted`` (a boolean each) marks.

        Args:
            z: latent variables.
            tokens: ``<s> w1 .. wn </s>``.
            counted: rows to count.
            keep: dropout factors, ``(length - 1, n, *)`` each, on the word vectors and before the softmax.
        """
        hidden = self._hidden(z, tokens[:, :-1], keep)
        labels = torch.where(counted[:, None], tokens[:, 1:], UNUSED).t()
        loss, _, _ = masked_cross_entropy(hidden.flatten(0, 1), self.output.weight, self.output.bias, labels.flatten())
        return loss

    def _hidden(self, z: Tensor, inputs: Tensor, keep: tuple[Tensor | None, Tensor | None]) -> Tensor:
        words = self.embedding(inputs.t())
        if keep[0] is not None:
            words = words * keep[0]
        beside = z.to(words.dtype).expand(len(words), *z.shape)
        start = self.start(z).unsqueeze(0)
        hidden, _ = self.lstm(torch.cat([words, beside], dim=-1), (start, torch.zeros_like(start)))
        dropped: Tensor = hidden if keep[1] is None else hidden * keep[1]
        return dropped

    @torch.no_grad()
    def log_likelihood(self, z: Float[Tensor, "n d"], tokens: Int[Tensor, "n length"]) -> Float[Tensor, " n"]:
        """log p(x | z) of each row, without dropout."""
        hidden = self._hidden(z, tokens[:, :-1], (None, None)).flatten(0, 1)
        labels = tokens[:, 1:].t().reshape(-1)
        out = torch.empty(len(hidden), device=hidden.device)
        sub = max(1, _CACHED // len(self.output.bias)) if hidden.device.type == "cpu" else _BLOCK
        for first in range(0, len(hidden), _BLOCK):
            rows = slice(first, first + _BLOCK)
            logits = torch.addmm(self.output.bias, hidden[rows], self.output.weight.t())
            total = torch.cat([torch.logsumexp(part, 1) for part in logits.split(sub)])
            out[rows] = logits.gather(1, labels[rows, None]).squeeze(1) - total
        return out.view(-1, len(tokens)).sum(0)

    @torch.no_grad()
    def generate(self, z: Float[Tensor, "n d"], max_words: int) -> list[list[int]]:
        """Greedy decoding: word numbers up to ``</s>``, at most ``max_words``."""
        state = (self.start(z).unsqueeze(0), z.new_zeros(1, len(z), self.lstm.hidden_size))
        word = torch.full((1, len(z)), START, device=z.device)
        rows: list[Tensor] = []
        ended = torch.zeros(len(z), dtype=torch.bool, device=z.device)
        while len(rows) < max_words and not bool(ended.all()):
            hidden, state = self.lstm(torch.cat([self.embedding(word), z.unsqueeze(0)], dim=-1), state)
            logits = self.output(hidden[0])
            logits[:, [PAD, START]] = -torch.inf
            word = logits.argmax(-1).unsqueeze(0)
            rows.append(word[0])
            ended |= word[0] == END
        sentences = torch.stack(rows, 1).tolist()
        return [row[: row.index(END)] if END in row else row for row in sentences]

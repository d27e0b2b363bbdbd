"""Encoder and decoder of a job (LSTM, or of the clusters), their weights and optimizers; models of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.engine.checkpoint import find_best, load_module, open_checkpoint, read_metadata
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.latent.config import LatentJob, ModelSection
from capt.pretrain.latent.corpus import END, PAD, START, VOCABULARY, LatentVocabulary, ends_of, predicted
from capt.pretrain.latent.posterior import Critics, EncoderOutput, GaussianHead, build_head, mlp
from capt.pretrain.models.cross_entropy import UNUSED, masked_cross_entropy
from capt.pretrain.models.lstm import LSTM

# The LSTM encoder and decoder of sentences (Bowman et al. 2016; sizes and wiring of the released code).
#
# Whole sequences go through torch's fused LSTM (oneDNN on CPUs, cuDNN on GPUs); the softmax over the vocabulary is one
# matrix product for all time steps, its gradient taken in the same pass.


_BLOCK = 1024
"""Rows of logits in one matrix product of the evaluation: 40 MB for PTB's vocabulary."""

_CACHED = 1 << 19
"""Logits that are summed in one pass on a CPU: 2 MB, what stays in a core's L2 cache."""


def _initialise(module: nn.Module, bound: float) -> None:
    """Draw every parameter uniformly from plus or minus ``bound``, as the released code does."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-bound, bound)


class LatentTextEncoder(nn.Module):
    """The representation h(x), an LSTM's state at ``</s>``, and the posterior's head on it."""

    def __init__(self, vocabulary: int, section: ModelSection) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, section.embedding)
        self.lstm = LSTM(section.embedding, section.hidden)
        self.head = build_head(section, section.hidden)
        _initialise(self, section.init_range)

    def forward(
        self, tokens: Int[Tensor, "n length"], eps: Float[Tensor, "n e"], dropout: Float[Tensor, "length n w"] | None
    ) -> EncoderOutput:
        """Encode ``<s> w1 .. wn </s> <pad> ..`` with noise ``eps`` and dropout factors on the word vectors."""
        h = self.represent(tokens, dropout)
        with torch.autocast(h.device.type, enabled=False):  # densities and critics take z as it is: in fp32
            encoded: EncoderOutput = self.head(h, eps)
        return encoded

    def represent(
        self, tokens: Int[Tensor, "n length"], dropout: Float[Tensor, "length n w"] | None = None
    ) -> Float[Tensor, "n k"]:
        """Compute the representation h(x) of each row, the state at its own ``</s>``."""
        words = self.embedding(tokens.t())
        if dropout is not None:
            words = words * dropout
        states, _ = self.lstm(words)
        last: Tensor = states[ends_of(tokens), torch.arange(len(tokens), device=tokens.device)].to(words.dtype)
        return last


class TextDecoder(nn.Module):
    """p(x | z): an LSTM that reads z beside every word, and whose first hidden state is made of z."""

    def __init__(self, vocabulary: int, section: ModelSection) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, section.embedding)
        self.start = nn.Linear(section.latent, section.hidden)
        self.lstm = LSTM(section.embedding + section.latent, section.hidden)
        self.output = nn.Linear(section.hidden, vocabulary)
        _initialise(self, section.init_range)

    def forward(
        self,
        z: Float[Tensor, "n d"],
        tokens: Int[Tensor, "n length"],
        valid: Bool[Tensor, " n"],
        dropout: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Float[Tensor, ""]:
        """The sum of -log p(x | z) over the valid rows.

        Args:
            z: latent variables.
            tokens: ``<s> w1 .. wn </s> <pad> ..``; ``<pad>`` is not predicted.
            valid: False for rows that have no weight.
            dropout: dropout factors, ``(length - 1, n, *)`` each, on the word vectors and before the softmax.
        """
        hidden = self._hidden(z, tokens[:, :-1], dropout)
        labels = torch.where(valid[:, None] & predicted(tokens), tokens[:, 1:], UNUSED).t()
        loss, _, _ = masked_cross_entropy(hidden.flatten(0, 1), self.output.weight, self.output.bias, labels.flatten())
        return loss

    def _hidden(self, z: Tensor, inputs: Tensor, dropout: tuple[Tensor | None, Tensor | None]) -> Tensor:
        words = self.embedding(inputs.t())
        if dropout[0] is not None:
            words = words * dropout[0]
        beside = z.to(words.dtype).expand(len(words), *z.shape)
        start = self.start(z).unsqueeze(0)
        hidden, _ = self.lstm(torch.cat([words, beside], dim=-1), (start, torch.zeros_like(start)))
        dropped: Tensor = hidden if dropout[1] is None else hidden * dropout[1]
        return dropped

    @torch.no_grad()
    def log_likelihood(self, z: Float[Tensor, "n d"], tokens: Int[Tensor, "n length"]) -> Float[Tensor, " n"]:
        """Compute log p(x | z) of each row, without dropout."""
        return self.token_log_likelihoods(z, tokens).sum(0)

    @torch.no_grad()
    def token_log_likelihoods(
        self, z: Float[Tensor, "n d"], tokens: Int[Tensor, "n length"]
    ) -> Float[Tensor, "length_minus_1 n"]:
        """Compute log p(w_t | w_<t, z) of each token after ``<s>``, time first, without dropout; 0 at ``<pad>``."""
        hidden = self._hidden(z, tokens[:, :-1], (None, None)).flatten(0, 1)
        labels = tokens[:, 1:].t().reshape(-1)
        out = torch.empty(len(hidden), device=hidden.device)
        sub = max(1, _CACHED // len(self.output.bias)) if hidden.device.type == "cpu" else _BLOCK
        for first in range(0, len(hidden), _BLOCK):
            rows = slice(first, first + _BLOCK)
            logits = torch.addmm(self.output.bias, hidden[rows], self.output.weight.t())
            total = torch.cat([torch.logsumexp(part, 1) for part in logits.split(sub)])
            out[rows] = logits.gather(1, labels[rows, None]).squeeze(1) - total
        return out.view(-1, len(tokens)).masked_fill_(~predicted(tokens).t(), 0.0)

    @torch.no_grad()
    def generate(
        self,
        z: Float[Tensor, "n d"],
        max_words: int,
        *,
        never: Sequence[int] = (),
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> list[list[int]]:
        """Decode; returns the word numbers before ``</s>`` of each row, at most ``max_words``.

        Args:
            z: codes.
            max_words: words of a row, at most.
            never: word numbers that are not written.
            top_p: draw each word from the most probable ones that together have this probability (nucleus sampling,
                Holtzman et al. 2020, arXiv:1904.09751); None = the most probable word.
            generator: of these draws, on the CPU.
        """
        state = (self.start(z).unsqueeze(0), z.new_zeros(1, len(z), self.lstm.hidden_size))
        word = torch.full((1, len(z)), START, device=z.device)
        rows: list[Tensor] = []
        ended = torch.zeros(len(z), dtype=torch.bool, device=z.device)
        while len(rows) < max_words and not bool(ended.all()):
            hidden, state = self.lstm(torch.cat([self.embedding(word), z.unsqueeze(0)], dim=-1), state)
            logits = self.output(hidden[0])
            logits[:, [PAD, START, *never]] = -torch.inf
            chosen = logits.argmax(-1) if top_p is None else _nucleus(logits, top_p, generator)
            word = chosen.unsqueeze(0)
            rows.append(word[0])
            ended |= word[0] == END
        # A row that has ended is continued with the others; what it then writes is cut off here.
        sentences = torch.stack(rows, 1).tolist()
        return [row[: row.index(END)] if END in row else row for row in sentences]


def _nucleus(logits: Float[Tensor, "n v"], top_p: float, generator: torch.Generator | None) -> Int[Tensor, " n"]:
    """Draw a word for each row from the smallest set of most probable words whose probability reaches ``top_p``."""
    probabilities, words = logits.double().softmax(-1).sort(-1, descending=True)
    before = probabilities.cumsum(-1) - probabilities  # of more probable words; 0 for the first, which always stays
    kept = probabilities.masked_fill(before >= top_p, 0.0)
    drawn = torch.multinomial(kept.cpu(), 1, generator=generator).to(words.device)
    return words.gather(-1, drawn).squeeze(-1)


# Encoder and decoder of the synthetic clusters (section 4.4 of the paper, and its released toy).


class ClusterEncoder(nn.Module):
    """Three hidden layers from ``[x; noise]`` to z (LeakyReLU), or from x to the parameters of a Gaussian (ELU)."""

    one_hot: Tensor

    def __init__(self, classes: int, section: ModelSection) -> None:
        super().__init__()
        self.classes = classes
        self.register_buffer("one_hot", torch.eye(classes), persistent=False)
        hidden = [section.hidden] * 3
        self.head = GaussianHead(section.hidden, section.latent) if section.posterior == "gaussian" else None
        self.layers = (
            mlp(classes + section.noise, *hidden, section.latent)
            if self.head is None
            else nn.Sequential(*mlp(classes, *hidden, activation=nn.ELU), nn.ELU())
        )

    def forward(self, tokens: Int[Tensor, "n 1"], eps: Float[Tensor, "n e"], dropout: None = None) -> EncoderOutput:
        """Encode class numbers; the representation ``h``, which f reads, is the one-hot vector itself."""
        x = F.embedding(tokens[:, 0], self.one_hot)
        if self.head is not None:
            z, _, density = self.head(self.layers(x), eps)
            return EncoderOutput(z, x, density)
        return EncoderOutput(self.layers(torch.cat([x, eps], dim=1)), x, None)


class ClusterDecoder(nn.Module):
    """K independent class probabilities given z; -log p(x | z) is their binary cross entropy, summed over classes."""

    one_hot: Tensor

    def __init__(self, classes: int, section: ModelSection) -> None:
        super().__init__()
        self.register_buffer("one_hot", torch.eye(classes), persistent=False)
        activation = nn.ELU if section.posterior == "gaussian" else nn.LeakyReLU
        self.layers = mlp(section.latent, *[section.hidden] * 3, classes, activation=activation)

    def forward(
        self, z: Float[Tensor, "n d"], tokens: Int[Tensor, "n 1"], valid: Bool[Tensor, " n"],
        dropout: tuple[None, None] = (None, None),
    ) -> Float[Tensor, ""]:  # fmt: skip
        """The sum of -log p(x | z) over the valid rows."""
        return self._cross_entropy(z, tokens, weight=valid[:, None].float(), reduction="sum")

    def log_likelihood(self, z: Float[Tensor, "n d"], tokens: Int[Tensor, "n 1"]) -> Float[Tensor, " n"]:
        """Compute log p(x | z) of each row."""
        return -self._cross_entropy(z, tokens, reduction="none").sum(1)

    def _cross_entropy(self, z: Tensor, tokens: Tensor, **options: Any) -> Tensor:
        x = F.embedding(tokens[:, 0], self.one_hot)
        return F.binary_cross_entropy_with_logits(self.layers(z), x, **options)


def build(job: LatentJob, words: int) -> dict[str, nn.Module]:
    """Build ``decoder``, ``encoder`` unless the job is a language model, and ``critics`` for an implicit posterior.

    Args:
        job: its sections ``model`` and ``critic`` give the sizes.
        words: size of the vocabulary; not used for clusters.
    """
    model, classes = job.model, job.data.clusters
    modules: dict[str, nn.Module] = {}
    if classes is not None:
        modules = {"encoder": ClusterEncoder(classes, model), "decoder": ClusterDecoder(classes, model)}
    else:
        if model.posterior != "none":
            modules["encoder"] = LatentTextEncoder(words, model)
        modules["decoder"] = TextDecoder(words, model)
    if job.has_critics:
        modules["critics"] = Critics(model.latent, model.hidden if classes is None else classes, job.critic)
    return modules


@dataclass(frozen=True)
class LatentTextModel:
    """The modules of a model of sentences; a language model has no encoder, only an implicit posterior has critics."""

    encoder: LatentTextEncoder | None
    decoder: TextDecoder
    critics: Critics | None

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> LatentTextModel:
        """Make the model from a job's modules by name."""
        encoder, decoder, critics = (modules.get(name) for name in ("encoder", "decoder", "critics"))
        assert encoder is None or isinstance(encoder, LatentTextEncoder)
        assert isinstance(decoder, TextDecoder)
        assert critics is None or isinstance(critics, Critics)
        return cls(encoder, decoder, critics)

    @property
    def device(self) -> torch.device:
        """The device that the parameters are on."""
        return next(self.decoder.parameters()).device


def optimizers(job: LatentJob) -> Mapping[str, ModuleOptimizer]:
    """The critics are never clipped and learn at the constant rate ``critic.lr``; the rest is ``job.optimizer``."""
    if not job.has_critics:
        return {}
    section = job.optimizer.model_copy(update={"lr": job.critic.lr, "clip": 0.0})
    return {"critics": ModuleOptimizer(section, schedule=False)}


# Loading a trained model from a checkpoint, to evaluate it or to write sentences with it.


@dataclass(frozen=True)
class LoadedLatentModel:
    """The modules of a checkpoint in evaluation mode, its vocabulary (None for clusters) and its job.

    ``unknown_in_training`` is the number of unknown words in the training text; None where the checkpoint does not say.
    """

    checkpoint: Path
    modules: dict[str, nn.Module]
    vocabulary: LatentVocabulary | None
    job: LatentJob
    unknown_in_training: int | None = None

    @property
    def text(self) -> tuple[LatentTextModel, LatentVocabulary]:
        """The modules and the vocabulary of a model of text. Raises ``CheckpointError``: it is a model of clusters."""
        if self.vocabulary is None:
            raise CheckpointError(f"{self.checkpoint}: a model of synthetic clusters, not of text")
        return LatentTextModel.of(self.modules), self.vocabulary

    @property
    def draws_text(self) -> bool:
        """True if the model draws sentences from a prior: it is neither one of clusters nor a language model."""
        return self.vocabulary is not None and self.job.model.posterior != "none"


def load_model(path: Path) -> LoadedLatentModel:
    """Load a checkpoint, or a run's best one (its newest where none is kept), after verifying every file.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it is that of another kind of job.
    """
    checkpoint = find_best(path)
    job = open_checkpoint(checkpoint, LatentJob, "latent")
    vocabulary = LatentVocabulary.load(checkpoint / VOCABULARY) if job.data.clusters is None else None
    words = len(vocabulary) if vocabulary is not None else 0
    # Only the names are asked for: nothing is allocated.
    with torch.device("meta"):
        names = tuple(build(job, words))
    modules = {name: load_module(checkpoint, name, lambda name=name: build(job, words)[name]) for name in names}  # type: ignore[misc]
    for module in modules.values():
        module.eval()
    unknown = read_metadata(checkpoint).task.get("unknown_in_training")
    return LoadedLatentModel(checkpoint, modules, vocabulary, job, unknown if isinstance(unknown, int) else None)

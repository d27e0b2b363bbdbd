"""The heads on an encoder: the masked-language-model head and CAPT's aggregation head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.traits import traits
from capt.pretrain.models.cross_entropy import UNUSED, in_blocks, masked_cross_entropy

# From hidden states at all positions to those that a head reads: chosen positions, or the mean over tokens.


def take_rows(x: Float[Tensor, "b L h"], rows: Int[Tensor, "b r"]) -> Float[Tensor, "b r h"]:
    """Row ``rows[i, j]`` of sequence ``i``."""
    return x.gather(1, rows.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def mean_over_tokens(hidden: Float[Tensor, "b L h"], tokens: Int[Tensor, "b L"], pad_id: int) -> Float[Tensor, "b h"]:
    """The mean hidden state of the tokens of each sequence that are not padding (zeros where all are padding)."""
    real = (tokens != pad_id).unsqueeze(-1)
    return (hidden * real).sum(1) / real.sum(1).clamp_min(1)


class MLMOutput(NamedTuple):
    """Sums over the masked positions, so that they add up over micro-batches and ranks.

    Attributes:
        loss_sum: the cross entropies in nats.
        correct: the number of right predictions.
        masked: the number of masked positions.
    """

    loss_sum: Tensor
    correct: Tensor
    masked: Tensor


_LINEAR_FROM = 4.0
"""GELU is the identity within 2e-4 from here on, and most values of a normalised hidden state are above minus 3."""


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""Functions of the language-model head, by the value of ``hidden_act`` in ``config.json``."""


def leaves_out_unused(x: Tensor) -> bool:
    """True where the head computes nothing for rows without a label: on a CPU. A GPU would have to wait for them."""
    return traits().has_values and not traits().is_gpu(x.device)


class MLMHead(nn.Module):
    """BERT's language-model head: dense, an activation, LayerNorm, and the word embedding as the output matrix.

    The weight of ``word`` is registered here as well, the same Parameter: ZeRO-3 gathers the parameters of the
    module that runs, and the product with it runs here.

    Args:
        word: the table of token embeddings.
        vocab_size: the number of rows, the first ones, that are predicted; those after them fill the table up.
        eps: of the LayerNorm.
        hidden_size: columns of the hidden states, ``h``, which ``dense`` maps to the columns of ``word``; None = those.
        activation: the function after ``dense``, a key of `ACTIVATIONS`.
        bias: of ``dense`` and of the LayerNorm (ModernBERT has none); that of the vocabulary is always there.
    """

    def __init__(
        self,
        word: nn.Embedding,
        vocab_size: int,
        eps: float,
        hidden_size: int | None = None,
        activation: str = "gelu",
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        rows, width = word.weight.shape
        self.dense = nn.Linear(hidden_size or width, width, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.norm = nn.LayerNorm(width, eps=eps, bias=bias)
        self.vocab_size = vocab_size
        self.weight = word.weight
        self.bias = nn.Parameter(torch.zeros(rows))

    @torch.no_grad()
    def begin_near_identity(self) -> None:
        """Set the weights so that the logits are nearly ``LayerNorm(hidden) @ weight.T``, in place.

        ``dense`` adds a constant, beyond which GELU is nearly linear, and LayerNorm takes the constant away again.

        Raises:
            ConfigError: the head has no bias to add the constant with, or the token embeddings have another number of
                columns than the hidden states.
        """
        if self.dense.bias is None:
            raise ConfigError(
                "mlm.head=identity: the language-model head of this model.arch has no bias, without which its GELU is "
                "never nearly linear; leave mlm.head at random"
            )
        width, hidden_size = self.dense.weight.shape
        if width != hidden_size:
            raise ConfigError(
                f"mlm.head=identity: the encoder embeds tokens in {width} columns and has hidden states of "
                f"{hidden_size}, so no head is near the identity; leave mlm.head at random"
            )
        self.dense.weight.copy_(torch.eye(len(self.dense.weight)))
        self.dense.bias.fill_(_LINEAR_FROM)
        nn.init.ones_(self.norm.weight)
        nn.init.zeros_(self.norm.bias)
        nn.init.zeros_(self.bias)

    def forward(
        self, hidden: Float[Tensor, "*rows h"], labels: Int[Tensor, "*rows"], *, blocked: bool = False
    ) -> MLMOutput:
        """Cross entropy at the given positions only; a label of -100 marks a row that is not predicted.

        With ``blocked`` no more logits are held than those of a block of rows, for a head that predicts every token.
        """
        hidden, labels = hidden.flatten(0, -2), labels.flatten()
        if leaves_out_unused(hidden) and not (used := labels != UNUSED).all():
            rows = used.nonzero()[:, 0]
            hidden, labels = hidden.index_select(0, rows), labels.index_select(0, rows)
        x = self._transform(hidden)
        if blocked:
            return MLMOutput(*in_blocks(self._losses, x, self.weight, self.bias, labels), (labels != UNUSED).sum())
        return MLMOutput(*masked_cross_entropy(x, self.weight, self.bias, labels, self.vocab_size))

    def _losses(self, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return masked_cross_entropy(x, weight, bias, labels, self.vocab_size)[:2]

    def logits(self, hidden: Float[Tensor, "*rows h"]) -> Float[Tensor, "*rows V"]:
        """Scores over the vocabulary, for models that ZeRO-3 does not partition."""
        return F.linear(self._transform(hidden), self.weight[: self.vocab_size], self.bias[: self.vocab_size])

    def _transform(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden)))  # type: ignore[no-any-return]


class AggregationHead(nn.Module):
    r"""The aggregation layer of CAPT's Eq. 1, :math:`s(x) = A(h(x)) / \|A(h(x))\|`, with A = h -> ffn -> GELU -> h.

    Its input is the raw final hidden state of ``<s>`` (or the token mean), as in the paper's section 3.1 and Table 4.

    Args:
        hidden_size: columns of input and output, ``h``.
        inner_size: columns between the two layers; the paper takes the encoder's feed-forward size.
    """

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden_size, inner_size)
        self.outer = nn.Linear(inner_size, hidden_size)

    def forward(self, pooled: Float[Tensor, "n h"]) -> Float[Tensor, "n h"]:
        """Unit rows, normalised in fp32 because bf16 cannot tell similar directions apart at a temperature of .05."""
        y = self.outer(F.gelu(self.inner(pooled)))
        return F.normalize(y.to(torch.promote_types(y.dtype, torch.float32)), dim=-1, eps=1e-12)


# The tables with a row for each token id, padded to a multiple that matrix units prefer, or cut back to the ids.


TABLES = ("encoder.embeddings.word.weight", "mlm.weight", "mlm.bias")
"""Parameters of `CaptModel` that have a row for each token id."""


class WordEmbedding(nn.Embedding):
    """``classes`` rows for the token ids, then rows of zeros up to ``rows``, which belong to no id.

    The random draws are those of a table without the zeros, so that a seed gives the same model for any padding.
    """

    def __init__(self, classes: int, rows: int, width: int, padding_idx: int) -> None:
        super().__init__(classes, width, padding_idx=padding_idx)
        self.classes, self.num_embeddings = classes, rows
        if rows > classes:
            self.weight = nn.Parameter(F.pad(self.weight.detach(), (0, 0, 0, rows - classes)))

    @torch.no_grad()
    def draw(self, std: float) -> None:
        """N(0, ``std``) for the ids, in place; zeros beyond them."""
        nn.init.normal_(self.weight[: self.classes], 0.0, std)
        nn.init.zeros_(self.weight[self.classes :])


def with_rows(state: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """``state`` with ``rows`` rows in each of :data:`TABLES`: zeros are appended, or the last rows are left out."""
    out = dict(state)
    for name in TABLES:
        if name in out and out[name].ndim > 0 and len(out[name]) != rows:
            beyond = (0, 0) * (out[name].ndim - 1) + (0, rows - len(out[name]))
            out[name] = F.pad(out[name], beyond)
    return out

"""The heads over the pooled vector of each text. Losses are sums, which add up over micro-batches and ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from capt.pretrain.bottleneck.config import BottleneckSection
from capt.pretrain.bottleneck.texts import Texts
from capt.pretrain.models.architecture import EncoderConfig
from capt.pretrain.models.cross_entropy import UNUSED, in_blocks
from capt.pretrain.models.heads import MLMHead
from capt.pretrain.models.layers import EncoderLayer, dropout, initialise_weights, to_autocast


class BottleneckOutput(NamedTuple):
    """Sums over a micro-batch, 0 for a head that there is not.

    Attributes:
        bow: cross entropies of the bags of words, one for each text that holds a word.
        bow_correct: the texts of which the most probable token is one of theirs.
        decoder: cross entropies of the decoder, one for each word.
        decoder_correct: the words that are the most probable token at their positions.
    """

    bow: Tensor
    bow_correct: Tensor
    decoder: Tensor
    decoder_correct: Tensor

    def of(self, section: BottleneckSection) -> list[tuple[str, float, Tensor, Tensor]]:
        """The name, weight, sum and number of hits of each head that the job has."""
        bow = [("bow", section.bow_weight, self.bow, self.bow_correct)] if section.bow else []
        decoder = [("decoder", section.decoder_weight, self.decoder, self.decoder_correct)] if section.decoder else []
        return bow + decoder


class BagHead(nn.Module):
    r"""The distribution of a text's tokens from its pooled vector h: softmax(LayerNorm(A h) W^T + b).

    The loss of a text of tokens :math:`w_1, \dots, w_n` is :math:`-\frac{1}{n} \sum_i \log p_{w_i}`, the cross entropy
    with its token frequencies (DupMAE, Liu et al. 2022, but from one vector in place of a maximum over positions).

    Args:
        word: the table of token embeddings, whose weight is W unless the head has its ``own``.
        classes: the first rows of W, those that are tokens.
        hidden: columns of h.
        eps: of the LayerNorm.
        own: with a matrix W of its own.
    """

    def __init__(self, word: nn.Embedding, classes: int, hidden: int, eps: float, *, own: bool) -> None:
        super().__init__()
        rows, width = word.weight.shape
        self.classes = classes
        self.dense = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width, eps=eps)
        # Registered here as well, where the product runs: ZeRO-3 gathers the parameters of the module that runs.
        self.weight = nn.Parameter(torch.zeros(rows, width)) if own else word.weight
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, pooled: Float[Tensor, "t h"], bags: Int[Tensor, "t k"]) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and the number of texts of which the most probable token is one of theirs.

        Every bag has a word; ``UNUSED`` (-100) is none.
        """
        x = self.norm(self.dense(pooled))
        return in_blocks(self._losses, x, self.weight, self.bias, bags)

    def _losses(self, x: Tensor, weight: Tensor, bias: Tensor, bags: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, weight[: self.classes])
        exact = torch.promote_types(logits.dtype, torch.float32)
        logits = logits.to(exact) + bias[: self.classes].to(exact)
        there = bags != UNUSED
        share = there.to(exact) / there.sum(1, keepdim=True)
        mean = (share * logits.gather(1, bags.clamp_min(0))).sum()
        correct = ((logits.argmax(1, keepdim=True) == bags) & there).any(1).sum()
        return logits.logsumexp(1).sum() - mean, correct


class Decoder(nn.Module):
    r"""RetroMAE's enhanced decoding (Xiao et al. 2022, section 3.2): every word of a text from its vector h.

    One layer. The query of position i is :math:`h + p_i`; keys and values are :math:`h + p_0` and, of each other word j
    that row i may see (`Texts.visible`), :math:`e_j + p_j`. Embeddings e are the encoder's, and so is the
    language-model head that scores the output. h and e go through a LayerNorm first. Positions p count within
    the text and are sinusoids, so that encoders without a table of positions and texts of any length are served alike.
    """

    def __init__(self, config: EncoderConfig, word: nn.Embedding) -> None:
        super().__init__()
        width = word.weight.shape[1]
        self.weight = word.weight  # registered here as well, where it is read: see `BagHead`
        self.widen = nn.Linear(width, config.hidden, bias=False) if width != config.hidden else None
        self.word_norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)
        self.vector_norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)
        self.layer = EncoderLayer(config)

    def forward(
        self, pooled: Float[Tensor, "n M h"], tokens: Int[Tensor, "n L"], texts: Texts, rate: float
    ) -> Float[Tensor, "n L h"]:
        """The output at each position, before the language-model head.

        Args:
            pooled: the vector of each text of each window.
            tokens: the original tokens.
            texts: of the windows.
            rate: share of the other words that a position does not see.
        """
        words = F.embedding(tokens, self.weight)
        words = self.word_norm(words if self.widen is None else self.widen(words))
        vectors = self.vector_norm(pooled.to(words.dtype))
        positions = sinusoids(tokens.shape[1] + 1, vectors.shape[-1], vectors.device).to(words.dtype)
        at = positions[texts.places().clamp(0, tokens.shape[1])]
        own = texts.numbers.clamp_min(0)[:, :, None].expand(-1, -1, vectors.shape[-1])
        queries = vectors.gather(1, own) + at
        keys = torch.cat([vectors + positions[0], words + at], 1)
        attended = self.layer.attention(to_autocast(queries), to_autocast(keys), texts.visible(rate)[:, None])
        x = self.layer.attention_norm(queries + dropout(attended, self.layer.dropout, self.training))
        return self.layer.feed_forward(x)


def sinusoids(length: int, width: int, device: torch.device) -> Float[Tensor, "l w"]:
    """The positions of Vaswani et al. 2017: sines in the first half of the columns, cosines in the other."""
    half = torch.arange((width + 1) // 2, device=device) / ((width + 1) // 2)
    angles = torch.arange(length, device=device)[:, None] * 10_000.0**-half
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :width]


class Bottleneck(nn.Module):
    """The heads of a job.

    Args:
        section: the job's ``bottleneck``.
        config: the encoder's, with ``model.pooling``.
        word: its table of token embeddings.
    """

    def __init__(self, section: BottleneckSection, config: EncoderConfig, word: nn.Embedding) -> None:
        super().__init__()
        self.classes = config.classes
        self.pooling, self.rate = section.pooling or config.pooling, section.decoder_rate
        own = section.bow_matrix == "own"
        self.bow = BagHead(word, config.classes, config.hidden, config.layer_norm_eps, own=own) if section.bow else None
        self.decoder = Decoder(config, word) if section.decoder else None
        initialise_weights(self, config.initializer_range)
        if self.bow is not None and own:
            nn.init.normal_(self.bow.weight, 0.0, config.initializer_range)

    def forward(
        self, hidden: Float[Tensor, "n L h"], tokens: Int[Tensor, "n L"], texts: Texts, mlm: MLMHead
    ) -> BottleneckOutput:
        """The losses of the ``texts`` in ``tokens``, which have the final states ``hidden`` once they are corrupted.

        ``mlm`` is the encoder's language-model head, which the decoder shares.
        """
        pooled = texts.pool(hidden, self.pooling)
        zero = pooled.new_zeros(())
        bow, decoder = (zero, zero), (zero, zero)
        if self.bow is not None:
            bow = self.bow(pooled.flatten(0, 1)[texts.held()], texts.bags())
        if self.decoder is not None:
            decoder = mlm(self.decoder(pooled, tokens, texts, self.rate), texts.words, blocked=True)[:2]
        return BottleneckOutput(*bow, *decoder)


def bottleneck_flops(section: BottleneckSection, config: EncoderConfig, length: int) -> float:
    """Forward and backward FLOP of the heads on a window of ``length`` tokens that is one text; a multiply-add is 2."""
    h, width = config.hidden, config.embedding_size
    scored = 2 * h * width + 2 * width * config.classes
    layer = 8 * h * h + 4 * h * config.ffn + 4 * h * length
    return 3.0 * (section.bow * scored + section.decoder * length * (layer + scored))

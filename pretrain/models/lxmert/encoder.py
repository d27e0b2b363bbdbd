"""The LXMERT encoder (Tan and Bansal 2019): words and regions, each through layers of its own, then through both."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pretrain.models import attention
from pretrain.models.attention import Packed
from pretrain.models.layers import EncoderLayer, autocast_dtype, checkpointed
from pretrain.models.lxmert.config import LxmertConfig
from pretrain.models.lxmert.flops import encoder_flops
from pretrain.models.lxmert.layers import CrossLayer, RegionEmbeddings, WordEmbeddings


class Hidden(NamedTuple):
    """Final hidden states.

    Attributes:
        words: of all words (b, L, h), what padding has being of no meaning, or (k, h) of those that were asked for.
        regions: of the pictures whose regions are read, (p, R, h); p = b unless fewer were asked for.
    """

    words: Float[Tensor, "*words h"]
    regions: Float[Tensor, "p R h"]


class LxmertEncoder(nn.Module):
    """Embeddings and layers of both modalities; `initialise_weights` draws them as BERT's.

    Args:
        config: sizes, with what the data decide filled in (``vocab_size``, ``pad_id``, ``feature_size``).
    """

    def __init__(self, config: LxmertConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.pad_id = config.hidden, config.known("pad_id")
        kind = config.activation_checkpointing
        self.words = WordEmbeddings(config)
        self.regions = RegionEmbeddings(config)
        self.word_layers = nn.ModuleList(
            checkpointed(EncoderLayer(config), kind) for _ in range(config.language_layers)
        )
        self.region_layers = nn.ModuleList(
            checkpointed(EncoderLayer(config), kind) for _ in range(config.vision_layers)
        )
        self.cross_layers = nn.ModuleList(checkpointed(CrossLayer(config), kind) for _ in range(config.cross_layers))

    def forward(
        self,
        tokens: Int[Tensor, "b L"],
        features: Float[Tensor, "b R f"],
        boxes: Float[Tensor, "b R 4"],
        *,
        padded: bool,
        present: Bool[Tensor, "b R"] | None,
        read: Int[Tensor, " k"] | None = None,
        pictures: int | None = None,
    ) -> Hidden:
        """Final hidden states, everywhere or where they are read.

        With ``read`` and ``pictures`` the last layer leaves out what nobody reads; what it returns is the same.

        Args:
            tokens: ids, padded on the right.
            features: of the regions; zeros where there is none.
            boxes: x1, y1, x2, y2, divided by width and height; zeros where there is no region.
            padded: whether any token is padding.
            present: True where there is a region (None = everywhere). The words of a picture without any region see
                its empty ones, so that no attention is over nothing.
            read: flat positions of the words that are read, token j of sentence i being i L + j (None = all). Padding
                is not read, but for the first token of a sentence of nothing else.
            pictures: the regions of the last ``pictures`` pictures are read (None = of all).

        Raises:
            DataError: the sentence is longer than ``model.max_positions``.
        """
        words, regions = self.words(tokens), self.regions(features, boxes)
        word_mask: Tensor | Packed | None = _mask(tokens != self.pad_id) if padded else None
        packed = None
        if padded and attention.prefers_packing(words):
            word_mask = packed = _packed(tokens != self.pad_id)
            words = packed.pack(words)[None]
            read = None if read is None else packed.position(read)
        region_mask = None if present is None else _mask(present)
        autocast = autocast_dtype(words)
        for layer in self.word_layers:
            words = layer(words, word_mask, None, autocast)
        for layer in self.region_layers:
            regions = layer(regions, region_mask, None, autocast)
        everything = len(tokens)
        for layer in self.cross_layers[:-1]:
            words, regions = layer(words, regions, word_mask, region_mask, None, everything, autocast)
        pictures = everything if pictures is None else pictures
        words, regions = self.cross_layers[-1](words, regions, word_mask, region_mask, read, pictures, autocast)
        return Hidden(words if packed is None or read is not None else packed.unpack(words[0]), regions)

    def first(
        self,
        tokens: Int[Tensor, "b L"],
        features: Float[Tensor, "b R f"],
        boxes: Float[Tensor, "b R 4"],
        *,
        padded: bool,
        present: Bool[Tensor, "b R"] | None,
    ) -> Float[Tensor, "b h"]:
        """The final state of the first token, ``[CLS]``, of each sentence, which is all that fine-tuning reads."""
        b, length = tokens.shape
        read = torch.arange(b, device=tokens.device) * length
        return self(  # type: ignore[no-any-return]
            tokens, features, boxes, padded=padded, present=present, read=read, pictures=0
        ).words

    @property
    def word_embedding(self) -> nn.Embedding:
        """The table of token embeddings, whose weight the language-model head shares."""
        return self.words.word

    def flops(self, words: int | float, regions: int | float) -> float:
        """Forward FLOP of a sentence of ``words`` tokens and a picture of ``regions`` regions, read everywhere."""
        return encoder_flops(self.config, words, regions)


def _packed(real: Bool[Tensor, "b L"]) -> Packed:
    real = real.clone()
    real[:, 0] = True  # a sentence of nothing but padding keeps one row, which attends to itself
    return Packed(real.flatten().nonzero().squeeze(1), (real.shape[0], real.shape[1]), real[:, None, None, :])


def _mask(real: Bool[Tensor, "b L"]) -> Bool[Tensor, "b 1 1 L"]:
    return (real | ~real.any(1, keepdim=True))[:, None, None, :]

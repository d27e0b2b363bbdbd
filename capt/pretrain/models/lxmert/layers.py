"""The layers that LXMERT adds to BERT's: the two embeddings, and the cross-modality layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from capt.pretrain.base.errors import DataError
from capt.pretrain.models import layers
from capt.pretrain.models.layers import EncoderLayer, Packed, attend, autocast_dtype, checkpointed, dropout, to_autocast
from capt.pretrain.models.lxmert.config import LxmertConfig, encoder_flops

SEGMENTS = 2
"""Rows of BERT's table of token types. LXMERT's sentences are of type 0; the other row is kept for lossless exports."""


class WordEmbeddings(nn.Module):
    """Word + position + token-type embeddings, LayerNorm, dropout, as in BERT.

    Positions count from 0. The first row of the position and of the token-type table is a constant zero, for LXMERT
    (airsplay's ``BertEmbeddings`` and Hugging Face's alike) declares it padding.
    """

    def __init__(self, config: LxmertConfig) -> None:
        super().__init__()
        self.max_positions = config.max_positions
        self.dropout = config.dropout
        self.word = nn.Embedding(config.known("vocab_size"), config.hidden, padding_idx=config.known("pad_id"))
        self.position = nn.Embedding(config.max_positions, config.hidden, padding_idx=0)
        self.token_type = nn.Embedding(SEGMENTS, config.hidden, padding_idx=0)
        self.norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)

    def forward(self, tokens: Int[Tensor, "b L"]) -> Float[Tensor, "b L h"]:
        """Input of the first word layer. Raises ``DataError`` when the sentence is longer than the position table."""
        length = tokens.shape[1]
        if length > self.max_positions:
            raise DataError(f"a sentence of {length} tokens is longer than model.max_positions {self.max_positions}")
        constant = self.token_type(torch.zeros(1, dtype=torch.long, device=tokens.device))
        position = self.position(torch.arange(length, device=tokens.device))
        return dropout(self.norm(self.word(tokens) + (position + constant)), self.dropout, self.training)


class RegionEmbeddings(nn.Module):
    """(LN(W f + b) + LN(U x + c)) / 2 of a region's feature f and box x, then dropout. Regions have no order."""

    def __init__(self, config: LxmertConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.feature = nn.Linear(config.known("feature_size"), config.hidden)
        self.feature_norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)
        self.box = nn.Linear(4, config.hidden)
        self.box_norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)

    def forward(self, features: Float[Tensor, "b R f"], boxes: Float[Tensor, "b R 4"]) -> Float[Tensor, "b R h"]:
        """Input of the first region layer."""
        own = self.box.weight.dtype  # of 16 bits where the engine has cast the weights; else fp32 outside of autocast
        feature, box = self.feature(features.to(own)).to(own), self.box(boxes.to(own)).to(own)
        return dropout((self.feature_norm(feature) + self.box_norm(box)) / 2, self.dropout, self.training)


class CrossAttention(nn.Module):
    """Words attend to regions and regions to words, both through the same weights and both from the inputs.

    The two directions share every matrix product: their rows are laid end to end.
    """

    def __init__(self, config: LxmertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.attention_dropout
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key_value = nn.Linear(config.hidden, 2 * config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)

    def forward(
        self,
        queries: Float[Tensor, "q h"],
        x: Float[Tensor, "k h"],
        shapes: tuple[int, int, int],
        pictures: int,
        word_mask: Bool[Tensor, "b 1 1 L"] | Packed | None,
        region_mask: Bool[Tensor, "b 1 1 R"] | None,
    ) -> Float[Tensor, "q h"]:
        """The attention output of each row of ``queries``.

        Args:
            queries: the ``b L`` words (packed: the real ones), then the regions of the last ``p`` pictures, ``p R``.
            x: the words, then all ``b R`` regions.
            shapes: b, the number of rows that are words, R.
            pictures: the regions of the last ``pictures`` pictures ask (p).
            word_mask: True for words that regions may look at, or how the words are packed.
            region_mask: True for regions that words may look at.
        """
        b, words, regions = shapes
        p = self.dropout if self.training else 0.0
        q_words, q_regions = self.query(queries).split([words, pictures * regions])
        kv_words, kv_regions = self.key_value(x).split([words, b * regions])
        packed = word_mask if isinstance(word_mask, Packed) else None
        if packed is not None:
            q_words = packed.unpack(q_words)
        of_words = self._attend(q_words, kv_regions, b, region_mask, p)
        out = [of_words.flatten(0, 1) if packed is None else packed.pack(of_words)]
        if pictures:
            if packed is not None:
                kv_words, word_mask = packed.unpack(kv_words), packed.mask
            assert not isinstance(word_mask, Packed)
            # Regions of the last pictures look at the words of their own pairs.
            of_last = kv_words.reshape(b, -1, kv_words.shape[-1])[b - pictures :]
            mask = None if word_mask is None else word_mask[b - pictures :]
            out.append(self._attend(q_regions, of_last, pictures, mask, p).flatten(0, 1))
        return self.output(torch.cat(out))  # type: ignore[no-any-return]

    def _attend(self, q: Tensor, kv: Tensor, b: int, mask: Tensor | None, p: float) -> Tensor:
        h = q.shape[-1]
        k, v = kv.view(b, -1, 2, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        y = attend(q.view(b, -1, self.heads, h // self.heads).transpose(1, 2), k, v, mask, p)
        return y.transpose(1, 2).reshape(b, -1, h)


class CrossLayer(nn.Module):
    """LXMERT's cross-modality layer: cross-attention from the inputs, then a Transformer layer for each modality."""

    def __init__(self, config: LxmertConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.cross = CrossAttention(config)
        self.cross_norm = nn.LayerNorm(config.hidden, eps=config.layer_norm_eps)
        self.words = EncoderLayer(config)
        self.regions = EncoderLayer(config)

    def forward(
        self,
        words: Float[Tensor, "_ L h"],
        regions: Float[Tensor, "b R h"],
        word_mask: Bool[Tensor, "b 1 1 L"] | Packed | None,
        region_mask: Bool[Tensor, "b 1 1 R"] | None,
        read: Int[Tensor, " k"] | None,
        pictures: int,
        autocast: torch.dtype | None,
    ) -> tuple[Float[Tensor, "*words h"], Float[Tensor, "p R h"]]:
        """Words and regions after the layer.

        Args:
            words: of the layer below; packed sentences are one sequence of all their words.
            regions: of the layer below.
            word_mask: True for real words, or how the words are packed.
            region_mask: True for real regions.
            read: flat positions in ``words`` of those to return, (k, h); None = all, as they came.
            pictures: the regions of the last ``pictures`` pictures are returned (p).
            autocast: the precision to enter, which fairscale's recomputation does not know.
        """
        if autocast is not None:
            with torch.autocast(words.device.type, autocast):
                return self._compute(words, regions, word_mask, region_mask, read, pictures)
        return self._compute(words, regions, word_mask, region_mask, read, pictures)

    def _compute(
        self,
        words: Tensor,
        regions: Tensor,
        word_mask: Tensor | Packed | None,
        region_mask: Tensor | None,
        read: Tensor | None,
        pictures: int,
    ) -> tuple[Tensor, Tensor]:
        b, count, h = regions.shape
        shape, first = words.shape, b - pictures
        number = shape[0] * shape[1]
        x = torch.cat([words.reshape(-1, h), regions.reshape(-1, h)])
        low = to_autocast(x)
        rows, queries = x, low
        if first:
            # Words, regions that nobody reads, regions that are read: the second do not ask, but are looked at.
            kept = [number, first * count, pictures * count]
            rows, queries = (torch.cat(y.split(kept)[::2]) for y in (x, low))
        attended = self.cross(queries, low, (b, number, count), pictures, word_mask, region_mask)
        mixed = self.cross_norm(rows + dropout(attended, self.dropout, self.training))
        words, regions = mixed.split([number, pictures * count])
        words = self.words.attend(words.view(shape), word_mask, None)
        # The feed-forward part is row by row, so rows that nobody reads are left out before it.
        words = self.words.feed_forward(words if read is None else words.reshape(-1, h)[read])
        regions = regions.view(pictures, count, h)
        if pictures:
            regions = self.regions(regions, region_mask if region_mask is None else region_mask[first:], None, None)
        return words, regions


# The LXMERT encoder (Tan and Bansal 2019): words and regions, each through layers of its own, then through both.


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
        # On a CPU padding costs time in every layer, so the words are laid end to end without it.
        if padded and layers.prefers_packing(words):
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
            # The layers before the last are needed whole, whatever is read of the last.
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

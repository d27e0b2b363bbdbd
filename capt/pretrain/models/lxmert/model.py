"""The model of vision-language pretraining: both views through one encoder, and the heads of LXMERT and CAPT."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.capt import misfits
from capt.pretrain.models.heads import AggregationHead, MLMHead, MLMOutput
from capt.pretrain.models.layers import initialise_weights
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.layers import LxmertEncoder
from capt.pretrain.models.lxmert.read import AGGREGATION, TIED, PretrainedLxmert

logger = logging.getLogger(__name__)


class Pooler(nn.Module):
    """tanh(W h + b) of the first word's final state, which the matching and the answer head read."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, first: Float[Tensor, "n h"]) -> Float[Tensor, "n h"]:
        """The pooled state of each pair."""
        return torch.tanh(self.dense(first))


class AnswerHead(nn.Module):
    """Logits of answers from pooled states: Linear, GELU, LayerNorm, Linear, the inner width being twice the encoder's.

    Args:
        hidden_size: width of the encoder, ``h``.
        answers: number of logits.
        inputs: columns of the input; ``2 h`` for NLVR2, whose input is the pooled states of two pairs.
        eps: of the LayerNorm.
    """

    def __init__(self, hidden_size: int, answers: int, *, inputs: int | None = None, eps: float = 1e-12) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden_size if inputs is None else inputs, 2 * hidden_size)
        self.norm = nn.LayerNorm(2 * hidden_size, eps=eps)
        self.outer = nn.Linear(2 * hidden_size, answers)

    def forward(self, pooled: Float[Tensor, "n i"]) -> Float[Tensor, "n answers"]:
        """Return a row of logits for each row of ``pooled``."""
        return self.outer(self.norm(F.gelu(self.inner(pooled))))  # type: ignore[no-any-return]


class RegionPredictions(NamedTuple):
    """Predictions for each region; None for classes that the data do not have."""

    objects: Float[Tensor, "*rows objects"] | None
    attributes: Float[Tensor, "*rows attributes"] | None
    features: Float[Tensor, "*regressed f"]


class RegionHeads(nn.Module):
    """Object class, attribute class and feature of each region: one dense + GELU + LayerNorm, three linear maps."""

    def __init__(self, config: LxmertConfig) -> None:
        super().__init__()
        h, objects, attributes = config.hidden, config.known("object_classes"), config.known("attribute_classes")
        self.dense = nn.Linear(h, h)
        self.norm = nn.LayerNorm(h, eps=config.layer_norm_eps)
        self.objects = nn.Linear(h, objects) if objects else None
        self.attributes = nn.Linear(h, attributes) if attributes else None
        self.features = nn.Linear(h, config.known("feature_size"))

    def forward(self, hidden: Float[Tensor, "n R h"], regressed: Tensor | None = None) -> RegionPredictions:
        """Predictions for every region.

        Args:
            hidden: final states of the regions.
            regressed: flat positions (m) of the regions whose features are predicted, (m, f); None = all, (n, R, f).
        """
        x = self.norm(F.gelu(self.dense(hidden)))
        return RegionPredictions(
            None if self.objects is None else self.objects(x),
            None if self.attributes is None else self.attributes(x),
            self.features(x if regressed is None else x.flatten(0, -2)[regressed]),
        )


# The heads on LXMERT: the pooler, those of the regions, and that of the answers.


class LxmertOutput(NamedTuple):
    """Inputs of the losses. Logits have the precision of the forward pass; all but ``s`` are of the corrupted view.

    Attributes:
        s: unit rows of the originals in fp32, None without contrast.
        s_hat: unit rows of their corruptions.
        mlm: sums over the masked words.
        matching: logits of (does not match, matches).
        objects: logits of the classes of every region, None without such classes.
        attributes: as for objects.
        features: predicted features, of every region, or (m, f) of those that were asked for.
        answers: logits of the answers, None without an answer head.
    """

    s: Float[Tensor, "n d"] | None
    s_hat: Float[Tensor, "n d"] | None
    mlm: MLMOutput
    matching: Float[Tensor, "n 2"]
    objects: Float[Tensor, "n R objects"] | None
    attributes: Float[Tensor, "n R attributes"] | None
    features: Float[Tensor, "*regressed f"]
    answers: Float[Tensor, "n answers"] | None


class LxmertModel(nn.Module):
    """LXMERT with the heads of its pretraining, and CAPT's aggregation head.

    Both views go through the encoder in one forward pass, the originals first, so that every parameter is used once a
    backward pass. The last layer leaves out what no head reads.

    Args:
        config: sizes, with what the data decide filled in.
        contrast: with the aggregation head; without it the model is LXMERT.
    """

    def __init__(self, config: LxmertConfig, contrast: bool = True) -> None:
        super().__init__()
        self.config = config
        h, eps = config.hidden, config.layer_norm_eps
        self.encoder = LxmertEncoder(config)
        self.pooler = Pooler(h)
        self.mlm = MLMHead(self.encoder.word_embedding, config.known("vocab_size"), eps)
        self.matching = nn.Linear(h, 2)
        self.region_heads = RegionHeads(config)
        answers = config.known("answers")
        self.answer_head = AnswerHead(h, answers, eps=eps) if answers else None
        self.aggregation = AggregationHead(h, config.ffn) if contrast else None
        initialise_weights(self, config.initializer_range)

    def forward(
        self,
        tokens: Int[Tensor, "n L"],
        corrupted: Int[Tensor, "n L"],
        masked: Int[Tensor, " k"],
        labels: Int[Tensor, " k"],
        features: Float[Tensor, "n R f"],
        corrupted_features: Float[Tensor, "n R f"],
        boxes: Float[Tensor, "n R 4"],
        present: Bool[Tensor, "n R"] | None = None,
        regressed: Int[Tensor, " m"] | None = None,
        *,
        padded: bool = False,
        heads: bool = True,
    ) -> LxmertOutput:
        """Representations of both views (Eq. 1) and predictions from the corrupted one.

        Args:
            tokens: the original sentences, not read without contrast.
            corrupted: the sentences with words masked.
            masked: flat positions of the words to predict, token j of sentence i being i L + j.
            labels: their ids.
            features: of the original regions, not read without contrast.
            corrupted_features: the same with regions masked.
            boxes: of the regions, the same in both views.
            present: True where there is a region; None = everywhere.
            regressed: flat positions of the regions whose features are predicted; None = all of them.
            padded: whether any token of either view is padding.
            heads: False leaves out the predictions, which are then empty, and changes nothing else.
        """
        n, length = corrupted.shape
        if self.aggregation is not None:  # both views in one pass: the originals first, then the corrupted ones
            corrupted = torch.cat([tokens, corrupted])
            corrupted_features = torch.cat([features, corrupted_features])
            boxes = boxes.repeat(2, 1, 1)
            present = None if present is None else present.repeat(2, 1)
        # Only the first token of each view and the masked ones of the corrupted view are read, as flat positions.
        first = torch.arange(len(corrupted), device=corrupted.device) * length
        read = torch.cat([first, masked + (len(corrupted) - n) * length])
        hidden = self.encoder(
            corrupted, corrupted_features, boxes, padded=padded, present=present, read=read, pictures=n
        )
        cls, words = hidden.words.split([len(first), len(masked)])
        s, s_hat, pooled = self._represent(cls, n)
        if not heads:
            nothing = pooled.new_zeros(0)
            return LxmertOutput(s, s_hat, MLMOutput(*pooled.new_zeros(3)), nothing, None, None, nothing, None)
        objects, attributes, regions = self.region_heads(hidden.regions, regressed)
        return LxmertOutput(
            s=s,
            s_hat=s_hat,
            mlm=self.mlm(words, labels),
            matching=self.matching(pooled),
            objects=objects,
            attributes=attributes,
            features=regions,
            answers=None if self.answer_head is None else self.answer_head(pooled),
        )

    def embed(
        self,
        tokens: Int[Tensor, "n L"],
        features: Float[Tensor, "n R f"],
        boxes: Float[Tensor, "n R 4"],
        present: Bool[Tensor, "n R"] | None = None,
        *,
        padded: bool,
    ) -> Float[Tensor, "n h"]:
        """Unit vectors s(x) of Eq. 1; without an aggregation head the normalised state that it would read."""
        cls = self.encoder.first(tokens, features, boxes, padded=padded, present=present)
        read = self.pooler(cls) if self.config.pooling == "pooled" else cls
        if self.aggregation is None:
            return F.normalize(read.float(), dim=-1, eps=1e-12)
        return self.aggregation(read)  # type: ignore[no-any-return]

    def _represent(self, cls: Tensor, n: int) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Unit rows of both views (None without contrast), and the pooled states of the corrupted one."""
        if self.aggregation is None:
            return None, None, self.pooler(cls)
        if self.config.pooling == "pooled":
            # One pass of the pooler over both views; the heads read the corrupted one.
            both = self.pooler(cls)
            s, s_hat = self.aggregation(both).split(n)
            return s, s_hat, both[n:]
        s, s_hat = self.aggregation(cls).split(n)
        return s, s_hat, self.pooler(cls[n:])


# Put weights of any origin into an `LxmertModel`; everything that does not fit is listed in the error.


HEADS = ("mlm.", "matching.", "region_heads.", "answer_head.", AGGREGATION)
"""Prefixes of the parts that a pretrained model may lack, so that they start from random weights."""


def build_model(state: Mapping[str, Tensor], config: LxmertConfig, source: str) -> LxmertModel:
    """Our model in evaluation mode with the weights ``state``; with an aggregation head if ``state`` has one.

    Raises:
        CheckpointError: as `load_weights` does.
    """
    plain = config.model_copy(update={"activation_checkpointing": "none"})
    model = LxmertModel(plain, contrast=any(name.startswith(AGGREGATION) for name in state))
    load_weights(model, state, source)
    return model.eval()


def load_weights(model: LxmertModel, state: Mapping[str, Tensor], source: str) -> None:
    """Copy ``state`` into ``model``, every parameter of it.

    Raises:
        CheckpointError: names are missing or unknown, shapes differ, or tied tensors are not equal. The first five are
            listed; ``source`` says where the weights came from.
    """
    if problems := misfits(model, state, TIED, TIED):
        listed = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"{source}: not the weights of this model: {listed}")
    model.load_state_dict(dict(state), strict=False)


def start_from(model: LxmertModel, pretrained: PretrainedLxmert, source: str) -> None:
    """Copy what ``pretrained``, read from ``source``, has into ``model``. The encoder and the pooler must be whole.

    Heads that it lacks, or that have other classes (objects, attributes and answers are classes of some data), stay
    as they were initialised; the log names them. Heads for which ``model`` has no place are left out.

    Raises:
        CheckpointError: a tensor of the encoder or of the pooler is missing or has another shape.
    """
    own = model.state_dict()
    # A head without a place here is left out, anything else that is unknown is named by `load_weights`.
    state = {name: tensor for name, tensor in pretrained.state.items() if name in own or not name.startswith(HEADS)}
    fresh = set()
    for name, tensor in own.items():
        if name in TIED or not name.startswith(HEADS):
            continue
        # Other classes than those of the source: its weights would answer for others.
        if name not in state or state[name].shape != tensor.shape:
            state[name] = tensor
            fresh.add(name.rsplit(".", 1)[0])
    load_weights(model, state, source)
    if fresh:
        logger.warning("%s: heads that start from random weights: %s", source, ", ".join(sorted(fresh)))

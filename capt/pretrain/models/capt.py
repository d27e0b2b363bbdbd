"""The model that CAPT trains: both views through one encoder, the language-model head, the aggregation head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.architecture import EncoderConfig
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.heads import AggregationHead, mean_over_tokens, take_rows, with_rows
from capt.pretrain.models.hf_map import HEAD, TIED, ties

Pairs = tuple[Float[Tensor, "n h"], Float[Tensor, "n h"]]
"""Rows of the original sequences, and of the corrupted ones."""


class CaptOutput(NamedTuple):
    """Inputs of the losses. ``s`` and ``s_hat`` are fp32 unit rows (n, d), None without contrast; ``mlm_*`` are sums.

    ``hidden`` are the final states of the corrupted view (n, L, h), where they are asked for.
    """

    s: Tensor | None
    s_hat: Tensor | None
    mlm_loss_sum: Tensor
    mlm_correct: Tensor
    mlm_count: Tensor
    hidden: Tensor | None = None


class CaptModel(nn.Module):
    """A text encoder with the heads of CAPT (Luo et al. 2020, sections 2-3).

    Both views go through the encoder in one forward pass, concatenated, so that every parameter is used once a
    backward pass. Hidden states are asked for only where they are read: at ``<s>`` and at the masked positions.

    Args:
        config: of the heads, and of the encoder where no ``encoder`` is given.
        contrast: with the aggregation head; without it the model is the MLM-only baseline.
        encoder: a pretrained encoder, whose weights stay as they are (None = that of ``config``, drawn anew).
    """

    def __init__(self, config: EncoderConfig, contrast: bool = True, encoder: Encoder | None = None) -> None:
        super().__init__()
        self.config = config
        self.encoder: Encoder = config.build_encoder() if encoder is None else encoder
        self.mlm = config.build_mlm_head(self.encoder.word_embedding, self.encoder.vocab_size)
        self.aggregation = AggregationHead(self.encoder.hidden_size, config.ffn) if contrast else None
        # Heads are always new; of an encoder that is given no weight is drawn.
        drawn = self if encoder is None else nn.ModuleList(head for head in (self.mlm, self.aggregation) if head)
        config.initialise(drawn)

    def forward(
        self,
        tokens: Int[Tensor, "n L"],
        corrupted: Int[Tensor, "n L"],
        positions: Int[Tensor, "masked m"],
        labels: Int[Tensor, "masked m"] | None,
        documents: Int[Tensor, "n L"] | None = None,
        padded: bool = False,
        runs: int | None = None,
        whole: bool = False,
    ) -> CaptOutput:
        """Representations of both views (Eq. 1) and the MLM loss on the corrupted one, or on both.

        Args:
            tokens: the original sequences x (not read without contrast).
            corrupted: the corrupted sequences x^.
            positions: the masked positions of ``corrupted``, or in ``2n`` rows those of ``tokens`` before them; any
                valid index where the label is -100.
            labels: the original ids at ``positions``, -100 = unused; None leaves out the language-model head, whose
                sums are then 0, and nothing else.
            documents: document number of each token, to keep attention inside documents (None = whole sequence).
            padded: whether any token of either view is padding.
            runs: the number of runs of equal numbers in ``documents``, where the caller knows it on the host.
            whole: return the hidden states of the corrupted view as well. Dropout then draws other masks.
        """
        if self.aggregation is None:
            assert labels is not None
            rows = None if whole else positions
            hidden = self.encoder(corrupted, padded=padded, documents=documents, runs=runs, rows=rows)
            masked = take_rows(hidden, positions) if whole else hidden
            return CaptOutput(None, None, *self.mlm(masked, labels))._replace(hidden=hidden if whole else None)
        n = len(tokens)
        views = torch.cat([tokens, corrupted])
        documents = None if documents is None else documents.repeat(2, 1)
        runs = None if runs is None else 2 * runs
        if whole or self.config.pooling == "mean":
            hidden = self.encoder(views, padded=padded, documents=documents, runs=runs)
            pooled = self._mean(hidden, views, padded) if self.config.pooling == "mean" else hidden[:, 0]
            masked = take_rows(hidden[-len(positions) :], positions)
        else:
            # The corrupted view is read at `<s>` and at the masked positions, the original at `<s>` again and again.
            rows = F.pad(positions, (1, 0))
            if len(positions) == n:
                rows = torch.cat([torch.zeros_like(rows), rows])
            hidden = self.encoder(views, padded=padded, documents=documents, runs=runs, rows=rows)
            pooled = hidden[:, 0]
            masked = hidden[-len(positions) :, 1:]
        s, s_hat = self.aggregation(pooled).split(n)
        states = hidden[n:] if whole else None
        if labels is None:
            return CaptOutput(s, s_hat, *s.new_zeros(3))._replace(hidden=states)
        return CaptOutput(s, s_hat, *self.mlm(masked, labels))._replace(hidden=states)

    def encode(self, tokens: Int[Tensor, "n L"], padded: bool) -> Float[Tensor, "n L h"]:
        """Final hidden states at every position."""
        return self.encoder(tokens, padded=padded)  # type: ignore[no-any-return]

    def embed(self, tokens: Int[Tensor, "n L"], padded: bool) -> Float[Tensor, "n h"]:
        """Unit vectors s(x) of Eq. 1; without an aggregation head the normalised pooled hidden state itself."""
        if self.config.pooling == "mean":
            pooled = self._mean(self.encode(tokens, padded), tokens, padded)
        else:
            first = torch.zeros_like(tokens[:, :1])
            pooled = self.encoder(tokens, padded=padded, rows=first)[:, 0]
        if self.aggregation is None:
            return F.normalize(pooled.float(), dim=-1, eps=1e-12)
        return self.aggregation(pooled)  # type: ignore[no-any-return]

    def pool_views(
        self,
        tokens: Int[Tensor, "n L"],
        corrupted: Int[Tensor, "n L"],
        documents: Int[Tensor, "n L"] | None,
        padded: bool,
    ) -> dict[str, Pairs]:
        """Both views' hidden states in fp32, pooled as ``cls`` (the state of ``<s>``) and as ``mean`` (over tokens).

        The encoder's own output without a head, by which a model trained on MLM alone compares with one of CAPT.
        """
        n = len(tokens)
        views = torch.cat([tokens, corrupted])
        documents = None if documents is None else documents.repeat(2, 1)
        hidden = self.encoder(views, padded=padded, documents=documents).float()
        mean = mean_over_tokens(hidden, views, self.encoder.pad_id)
        return {"cls": (hidden[:n, 0], hidden[n:, 0]), "mean": (mean[:n], mean[n:])}

    def _mean(self, hidden: Tensor, tokens: Tensor, padded: bool) -> Tensor:
        if not padded:
            return hidden.mean(1)
        return mean_over_tokens(hidden, tokens, self.encoder.pad_id)


# Build a `CaptModel` from weights of any origin; everything that does not fit is listed in the error.


def build_model(state: Mapping[str, Tensor], config: EncoderConfig, source: str) -> CaptModel:
    """Our model in evaluation mode with the weights ``state``; with an aggregation head if ``state`` has one.

    Rows that padded the vocabulary (``pad_vocab_to``) are left out.

    Raises:
        CheckpointError: as :func:`load_weights` does.
    """
    # Nothing is trained here: no graph is compiled, and nothing is recomputed.
    plain = config.model_copy(update={"compile": False, "activation_checkpointing": "none"})
    model = CaptModel(plain, contrast=any(name.startswith(HEAD) for name in state))
    load_weights(model, state, source)
    return unpadded(model).eval()


def unpadded(model: CaptModel) -> CaptModel:
    """``model`` without the rows that ``pad_vocab_to`` added: the same function of the same ids."""
    config = model.config
    if config.vocab_rows == config.classes:
        return model
    plain = CaptModel(config.model_copy(update={"pad_vocab_to": 1}), contrast=model.aggregation is not None)
    plain.to(model.mlm.bias).load_state_dict(with_rows(model.state_dict(), config.classes))
    return plain.train(model.training)


def load_weights(model: CaptModel, state: Mapping[str, Tensor], source: str) -> None:
    """Copy ``state`` into ``model``.

    Raises:
        CheckpointError: names are missing or unknown, shapes differ, or tied tensors are not equal. All are listed;
            ``source`` says where the weights came from.
    """
    if problems := misfits(model, state, TIED, ties(model.config)):
        raise CheckpointError(f"{source}: not the weights of this model: {'; '.join(problems)}")
    # Not strict: second names of tied tensors may be missing, all else was compared.
    model.load_state_dict(dict(state), strict=False)


def misfits(
    model: nn.Module, state: Mapping[str, Tensor], optional: Collection[str], tied: Mapping[str, str]
) -> list[str]:
    """Return the reasons why ``state`` cannot be the weights of ``model``: names, shapes, and tied tensors that differ.

    Args:
        model: whose tensors are needed.
        state: the tensors that there are.
        optional: names that may be missing, because a tied tensor has the values.
        tied: each second name of a tensor and its first one.
    """
    expected = model.state_dict()
    problems = [f"{name} is missing" for name in sorted(expected.keys() - set(optional) - state.keys())]
    problems += [f"{name} is unknown" for name in sorted(state.keys() - expected.keys())]
    problems += [
        f"{name} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    return problems + [
        f"{name} differs from {other}, of which it is a second name"
        for name, other in tied.items()
        if name in state and other in state and not torch.equal(state[name], state[other])
    ]

"""A representation in a file of its own: a vector for each of the first tokens, compared by late interaction.

ColBERT's MaxSim (Khattab and Zaharia 2020, arXiv:2004.12832), as a mean over the tokens of the query.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from capt.pretrain.config.base import PositiveInt, Section
from capt.pretrain.convert.output import write_export
from capt.pretrain.engine.durable import write_tensors
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.pairs.config import PairJob
from capt.pretrain.pairs.load import LoadedPairModel
from capt.pretrain.pairs.module import PairModule
from capt.pretrain.pairs.representations import Representation
from capt.pretrain.pairs.texts import PaddedTexts


class Options(Section):
    """Settings of the representation."""

    vectors: PositiveInt = 4


class TokenVectors(PairModule):
    """The first tokens of a text as unit vectors, one after another; of a shorter text the rest are zeros."""

    @classmethod
    def width_of(cls, job: PairJob, encoder: Encoder) -> int:
        return Options.model_validate(job.model.representation_options).vectors * super().width_of(job, encoder)

    def embed(self, texts: PaddedTexts) -> Tensor:
        hidden = self.encoder.model(texts.tokens, padded=texts.padded)
        if self.projection is not None:
            hidden = self.projection(hidden)
        vectors = F.normalize(hidden.to(torch.promote_types(hidden.dtype, torch.float32)), dim=2)
        vectors = vectors * (texts.tokens != self.encoder.model.pad_id)[..., None]
        count = self.width // vectors.shape[2]
        return F.pad(vectors[:, :count], (0, 0, 0, max(0, count - vectors.shape[1]))).flatten(1)


def max_sim(queries: Tensor, documents: Tensor, options: Options) -> Tensor:
    """The largest cosine of each token of a query with a token of a document, in the mean over the query's tokens."""
    q, d = (rows.unflatten(1, (options.vectors, -1)) for rows in (queries, documents))
    cosines = torch.einsum("mic,njc->mnij", q, d)
    best = cosines.masked_fill(~d.any(2)[None, :, None], -torch.inf).amax(3)
    asked = q.any(2).to(q.dtype)
    return (best * asked[:, None]).sum(2) / asked.sum(1, keepdim=True)


def export(trained: LoadedPairModel, out: Path, *, overwrite: bool, **others: Any) -> Path:
    """Write the weights and the number of vectors, and compare the vectors of what is read back with ours."""
    model = trained.model.cpu()

    def write(folder: Path) -> None:
        about = {"representation": trained.job.model.representation, **trained.job.model.representation_options}
        (folder / "config.json").write_text(json.dumps(about))
        write_tensors(folder / "model.safetensors", model.state_dict(), {})

    @torch.no_grad()
    def difference(folder: Path) -> float:
        texts = PaddedTexts(torch.arange(6, 12).view(2, 3), False)
        before = model.embed(texts)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return float((model.embed(texts) - before).abs().max())

    return write_export(out, write=write, check=difference, card="# toy", agrees="same vectors", overwrite=overwrite)


TOKENS = Representation(
    "a vector for each of the first tokens, compared by late interaction", "tests.toy_representation:TokenVectors",
    "tests.toy_representation:max_sim", "tests.toy_representation:export", "token-vectors", options=Options,
)  # fmt: skip

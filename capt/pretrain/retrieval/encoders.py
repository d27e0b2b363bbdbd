"""Any text encoder as one kind of object: our runs, Hugging Face folders, sentence-transformers folders, hub ids."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from capt.pretrain.base.distributed import device
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, shown
from capt.pretrain.base.verification import sha256
from capt.pretrain.contrast.similarity import Similarity
from capt.pretrain.engine.checkpoint import find_best, read_manifest
from capt.pretrain.engine.task import Role
from capt.pretrain.language.load import load_hf, load_model, trained_pooling
from capt.pretrain.models.architecture import encoder_of_type
from capt.pretrain.models.capt import CaptModel
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.encoder import load_encoder as load_foreign
from capt.pretrain.models.foreign.encoder import read_encoder
from capt.pretrain.models.heads import mean_over_tokens
from capt.pretrain.models.hf_config import SENTENCE_FILES, TOKENIZER_FILES, hub_hint, local_folder
from capt.pretrain.models.hf_folder import is_hf, read_json
from capt.pretrain.models.sentence_folder import SETTINGS, pooling_file, require_embedder
from capt.pretrain.pairs.load import load_model as load_pairs
from capt.pretrain.pairs.representations import similarity_of
from capt.pretrain.pairs.texts import PaddedTexts
from capt.pretrain.retrieval.options import EncoderOptions
from capt.pretrain.retrieval.search import Scoring
from capt.pretrain.retrieval.sentence_models import (
    limit_of,
    load_sentence_model,
    positions_of,
    reads_roles,
    role_limit,
    role_prompts,
    set_limit,
    token_counts,
    tokens_without_row,
)
from capt.pretrain.retrieval.store import DType, VectorIdentity, digest
from capt.tokenizer.encode import TextTokenizer, require_short_prompt

logger = logging.getLogger(__name__)


POOLINGS = ("mean", "cls", "head")
_SOME_TEXT = "a text"
_PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class TextEncoder(ABC):
    """A model in evaluation mode that turns each text into a row of numbers: a vector, unless it has `compare`."""

    name: str
    dimension: int
    similarity: str = "cosine"
    exports_unit_rows = False
    """True where the model's export has vectors of length 1, and `encode` has them as they are pooled."""
    compare: Similarity | None = None
    """The similarity of rows that are no vectors; `similarity` is then the name of the representation."""
    _facts: dict[str, Any]

    def __init__(self, name: str, prompts: Mapping[str, str], options: EncoderOptions) -> None:
        self.name = name
        self.options = options
        given = {"query": options.query_prompt, "document": options.document_prompt}
        # Of each role, and under the other names that the model has (`prompted`).
        self.prompts: dict[str, str] = {**prompts, **{role: prompts.get(role, "") for role in get_args(Role)}}
        self.prompts |= {role: prompt for role, prompt in given.items() if prompt is not None}

    def prompted(self, prompt: str | None) -> tuple[TextEncoder, Role]:
        """Return an encoder and the role in which it puts ``prompt`` before texts.

        Args:
            prompt: the name of a prompt of the model, or a text; None = what a text without a role has.
        """
        if prompt is None or prompt in ("query", "document"):
            return self, "query" if prompt == "query" else "document" if prompt else "text"
        other = copy.copy(self)
        other.prompts = {**self.prompts, "text": self.prompts.get(prompt, prompt)}
        return other, "text"

    def limit(self, role: Role) -> int:
        """Tokens of a text at most, its prompt and special tokens included; 0 = of any length."""
        return int(self._facts["length"])

    def identity(self, role: Role, dtype: DType = "fp32") -> VectorIdentity:
        """Everything that decides the vector of a text in ``role``."""
        facts = {**self._facts, "length": self.limit(role)}
        return VectorIdentity(prompt=self.prompts[role], dimension=self.dimension, dtype=dtype, **facts)

    def named(self, role: Role) -> dict[str, Any]:
        """The model, ``role`` and options as `capt encode` takes them, to say how more vectors are made."""
        path = Path(self.name)
        return {"model": str(path.absolute()) if path.exists() else self.name, "role": role, **asdict(self.options)}

    @property
    def scoring(self) -> Scoring:
        """The way in which the rows are compared."""
        return Scoring(self.similarity == "cosine", self.compare)

    def require_vectors(self, why: str) -> None:
        """Raise ``ConfigError`` where a text is no vector, and ``why`` that is needed."""
        if self.compare is not None:
            raise ConfigError(f"{self.name}: a text is no vector (model.representation={self.similarity}), and {why}")

    def protocol(self) -> str:
        """Say in one line how a text becomes a vector."""
        facts = self._facts
        prompts = ", ".join(f"{role} {self.prompts[role]!r}" for role in ("query", "document") if self.prompts[role])
        query, document = self.limit("query"), self.limit("document")
        length = f"at most {document} tokens" if document else "texts of any length"
        length += f" ({query} of a query)" if query != document else ""
        return (
            f"{self.similarity} of {self.dimension} dimensions, {facts['pooling']}, {length}, "
            f"{'prompts ' + prompts if prompts else 'no prompts'}, {facts['precision']} on {device().type}"
        )

    def require_short_prompts(self) -> None:
        """Raise ``ConfigError`` for a prompt that no text could follow, before anything is tokenized."""
        for role in ("query", "document"):
            what, remedy = f"{self.name}, {role}", f"shorten it (--{role}-prompt)"
            require_short_prompt(self.prompts[role], self.limit(role), what, remedy)

    def require_room(self) -> None:
        """Raise ``ConfigError`` for a prompt that leaves no token for a text, so that all texts would be alike."""
        self.require_short_prompts()
        for role in ("query", "document"):
            length = self.limit(role)
            if self.prompts[role] and length and self.lengths([""], role)[0] >= length:
                raise ConfigError(
                    f"{self.name}: the {role} prompt {self.prompts[role][:60]!r} fills all {length} tokens, and leaves "
                    f"none for a text; shorten it (--{role}-prompt) or raise --length"
                )

    @abstractmethod
    def lengths(self, texts: Sequence[str], role: Role) -> list[int]:
        """The number of tokens of each text as the model sees it."""

    @abstractmethod
    def encode(self, texts: Sequence[str], role: Role) -> Float[np.ndarray, "n d"]:
        """A vector for each text, in one batch, in fp32, not normalized."""


Embed = Callable[[Int[Tensor, "n L"], bool], Float[Tensor, "n d"]]
"""The vectors of padded rows of ids; the flag says whether any of them is padded."""


class OwnEncoder(TextEncoder):
    """A model of ours, or of a family that `capt.pretrain.models.foreign` knows.

    Args:
        name: for messages.
        embed: the model, on this rank's device.
        tokenizer: of the model.
        room: tokens of a text at most.
        facts: the parts of an `VectorIdentity` that files decide.
        options: what the user has decided.
        prompts: of the model, by role.
        limits: tokens of a query and of a document at most, where the model has a limit for each.
        usual: tokens that texts are cut to where the user gives no length; None = ``room``.
    """

    def __init__(
        self,
        name: str,
        embed: Embed,
        tokenizer: TextTokenizer,
        room: int,
        facts: Mapping[str, Any],
        options: EncoderOptions,
        *,
        prompts: Mapping[str, str] | None = None,
        limits: Mapping[str, int] | None = None,
        usual: int | None = None,
    ) -> None:
        super().__init__(name, prompts or {}, options)
        if options.length is not None and not 3 <= options.length <= room:
            raise ConfigError(f"length {options.length}: {name} takes 3 to {room} tokens")
        self._embed, self._tokenizer = embed, tokenizer
        # A length that the user gave holds for queries and documents alike.
        self._limits = {} if options.length is not None else dict(limits or {})
        self._facts = {**facts, "length": options.length or min(usual or room, room)}
        # One empty text tells the number of columns.
        self.dimension = self._vectors([[self._tokenizer.special.bos, self._tokenizer.special.eos]]).shape[1]
        self.require_room()

    def limit(self, role: Role) -> int:
        """The most tokens of a text. Where each role has a limit, a text without a role has the document's."""
        return self._limits.get("document" if role == "text" else role, super().limit(role))

    def lengths(self, texts: Sequence[str], role: Role) -> list[int]:
        """The number of tokens of each text, with ``<s>`` and ``</s>``."""
        return [len(row) for row in self._ids(texts, role)]

    def encode(self, texts: Sequence[str], role: Role) -> Float[np.ndarray, "n d"]:
        """The vectors of ``<s> prompt text </s>``, cut to the length."""
        return self._vectors(self._ids(texts, role))

    def _ids(self, texts: Sequence[str], role: Role) -> list[list[int]]:
        return self._tokenizer.encode_framed([self.prompts[role] + text for text in texts], self.limit(role))

    @torch.inference_mode()
    def _vectors(self, ids: list[list[int]]) -> Float[np.ndarray, "n d"]:
        longest, pad = max(map(len, ids)), self._tokenizer.special.pad
        tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in ids], device=device())
        return self._embed(tokens, any(len(row) < longest for row in ids)).float().cpu().numpy()


class SentenceEncoder(TextEncoder):
    """A sentence-transformers folder, computed by that library: modules, prompts and pooling as the folder says."""

    def __init__(self, name: str, model: Any, facts: Mapping[str, Any], options: EncoderOptions) -> None:
        super().__init__(name, {**(model.prompts or {}), **role_prompts(model)}, options)
        self._model = model.to(device()).eval()
        if options.length is not None:
            if limit_of(model) is None:
                raise ConfigError(f"length {options.length}: {name} takes texts of any length; leave it out")
            room = positions_of(model)
            if room is not None and options.length > room:
                raise ConfigError(f"length {options.length}: {name} takes at most {room} tokens")
            set_limit(self._model, options.length)
        self.similarity = "dot" if model.similarity_fn_name in ("dot", "dot_product") else "cosine"
        if model.similarity_fn_name in ("euclidean", "manhattan"):
            logger.warning(
                "%s: made for %s distances; texts are compared by cosine here", name, model.similarity_fn_name
            )
        self._reads_roles, self._without_row = reads_roles(model), tokens_without_row(model)
        self._facts = {**facts, "precision": _PRECISIONS.get(model.dtype, "fp32"), "length": 0}
        self.require_short_prompts()
        # A tokenizer without special tokens gives an empty text none.
        self._may_be_empty = any(self.lengths([""], role) == [0] for role in ("query", "document", "text"))
        self.dimension = int(self.encode([_SOME_TEXT], "document").shape[1])
        self.require_room()
        self._tell_unused(model.prompts or {})

    def _tell_unused(self, saved: Mapping[str, str]) -> None:
        """Warn of prompts that a user may expect before queries or documents, and that the library does not put there.

        ``encode_document`` takes "document" before "passage", and every folder has that one, if only as an empty text.
        """
        used = {self.prompts["query"], self.prompts["document"]}
        unused = [name for name, text in saved.items() if text and text not in used]
        if unused and "" in used:
            roles = " and ".join(role for role in ("query", "document") if not self.prompts[role])
            logger.warning(
                "%s: no prompt before a %s, as sentence-transformers has it; its prompts %s are not used, --%s-prompt "
                "puts one there",
                self.name, roles, ", ".join(map(shown, unused[:5])), roles.split()[0],
            )  # fmt: skip

    def limit(self, role: Role) -> int:
        """Tokens of a text at most, which may be fewer for one of the roles; 0 = of any length."""
        return role_limit(self._model, role) or 0

    def identity(self, role: Role, dtype: DType = "fp32") -> VectorIdentity:
        """Everything that decides the vector; with the role where the model reads it."""
        identity = super().identity(role, dtype)
        if not self._reads_roles:
            return identity
        return VectorIdentity(**{**vars(identity), "prompt": f"{role}: {identity.prompt}"})

    def lengths(self, texts: Sequence[str], role: Role) -> list[int]:
        """The number of tokens of each text; of characters where the folder has no such tokenizer."""
        whole = [self.prompts[role] + text for text in texts]
        counts = token_counts(self._model, whole, self.limit(role))
        return [*map(len, whole)] if counts is None else counts

    def encode(self, texts: Sequence[str], role: Role) -> Float[np.ndarray, "n d"]:
        """The vectors of ``encode_query`` and ``encode_document``; of ``encode`` for a text without a role."""
        for token in self._without_row:
            if (bad := next((text for text in texts if token in self.prompts[role] + text), None)) is not None:
                raise DataError(
                    f"{self.name}: the model has no row for its token {shown(token)}, which is in the text "
                    f"{shown(bad, 60)}; take it out"
                )
        by_role = {"query": self._model.encode_query, "document": self._model.encode_document}
        # A batch without a token is an error there; beside a text with some, empty ones have vectors.
        beside = [_SOME_TEXT] if self._may_be_empty and not any(self.lengths(texts, role)) else []
        rows = by_role.get(role, self._model.encode)(
            [*texts, *beside],
            # An empty prompt switches the default one off.
            prompt=self.prompts[role],
            batch_size=len(texts) + len(beside),
            show_progress_bar=False,
            convert_to_numpy=True,
            # The store keeps them as they are: a dot product may be what the model was trained for.
            normalize_embeddings=False,
        )
        return np.asarray(rows[: len(texts)], dtype=np.float32)


def load_text_encoder(path: Path, options: EncoderOptions) -> TextEncoder:
    """The encoder at ``path``: a run or checkpoint of ours, a Hugging Face or sentence-transformers folder, a hub id.

    Raises:
        CheckpointError: none of them, damaged, or code or pickles in it.
        ConfigError: the pooling or the length is not one that it has.
    """
    if options.pooling is not None and options.pooling not in POOLINGS:
        raise ConfigError(f"pooler {options.pooling!r}: choose from {', '.join(POOLINGS)}")
    folder = local_folder(path, SENTENCE_FILES)
    # A sentence-transformers folder is a Hugging Face folder as well, so it is asked first.
    if (folder / "modules.json").is_file():
        if options.pooling is not None:
            raise ConfigError(f"{path}: a sentence-transformers folder says itself how it pools; leave --pooler out")
        model = load_sentence_model(folder)
        pooled = " + ".join(type(module).__name__ for module in model.children())
        return SentenceEncoder(str(path), model, facts_of(hashes_of_folder(folder), pooled), options)
    if options.pooling is None:
        pooling_file(folder)  # refuses a folder that has lost its modules.json
    if is_hf(folder):
        pooling = options.pooling or trained_pooling(folder) or "mean"
        config = read_json(folder / "config.json")
        require_embedder(folder, config, read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {})
        facts = facts_of(hashes_of_folder(folder), pooling)
        if encoder_of_type(config.get("model_type")) is None:
            return _of_foreign(path, folder, pooling, facts, options)
        trained = load_hf(folder)
    elif folder.is_dir():
        checkpoint = find_best(folder)
        manifest = read_manifest(checkpoint)
        if manifest.task == "capt_pairs":
            return _of_pairs(path, checkpoint, options)
        if manifest.task != "capt_language":
            raise CheckpointError(
                f"{path}: a checkpoint of task {manifest.task}, which has no vectors of texts; give one of "
                "capt_language or capt_pairs"
            )
        trained = load_model(checkpoint)
        pooling = options.pooling or trained.job.trained_pooling or "mean"
        facts = facts_of(hashes_of_checkpoint(checkpoint), pooling)
    else:
        raise CheckpointError(f"{path}: no such folder{hub_hint(path)}")
    embed, is_run = _embed_of(trained.model, pooling, str(path)), not is_hf(folder)
    usual = _usual_length(folder)
    # Position rows beyond the windows of training are random still, but for a model that came with more.
    if is_run and not trained.job.model.init:
        usual = trained.job.data.sequence_length
    encoder = OwnEncoder(
        str(path), embed, trained.tokenizer, trained.model.encoder.max_positions, facts, options, usual=usual
    )
    encoder.exports_unit_rows = is_run
    return encoder


def _usual_length(folder: Path) -> int | None:
    """The ``model_max_length`` of ``folder``, to which transformers and sentence-transformers cut texts."""
    path = folder / "tokenizer_config.json"
    length = read_json(path).get("model_max_length") if path.is_file() else None
    return int(length) if isinstance(length, int | float) and length >= 3 else None


def _of_pairs(path: Path, checkpoint: Path, options: EncoderOptions) -> TextEncoder:
    """A model of pairs, with the prompts and lengths of its source of the largest weight, as its export has them."""
    if options.pooling is not None:
        raise ConfigError(f"{path}: a run of pairs pools as it was trained; leave --pooler out")
    trained = load_pairs(checkpoint)
    model = trained.model.to(device())
    read = trained.reading()
    # The digest of files, and not the path: a copy of the model finds the same vectors.
    name, compare = trained.job.model.representation, similarity_of(trained.job)
    pooled = model.encoder.pooling if compare is None else f"{name} {trained.job.model.representation_options}"
    facts = facts_of(hashes_of_checkpoint(checkpoint), f"{pooled}, projection {model.projection is not None}")

    def embed(tokens: Int[Tensor, "n L"], padded: bool) -> Tensor:
        return model.embed(PaddedTexts(tokens, padded))

    encoder = OwnEncoder(
        str(path), embed, trained.tokenizer, model.encoder.model.max_positions, facts, options,
        prompts={"query": read.prompts.query, "document": read.prompts.document},
        limits={"query": read.query_length, "document": read.document_length},
    )  # fmt: skip
    if compare is not None:
        encoder.similarity, encoder.compare = name, compare
    return encoder


def _of_foreign(
    path: Path, folder: Path, pooling: str, facts: Mapping[str, Any], options: EncoderOptions
) -> TextEncoder:
    if pooling == "head":
        raise CheckpointError(f"{path}: it has no aggregation head; use --pooler mean or cls")
    pretrained = read_encoder(folder)
    encoder = load_foreign(pretrained, str(path)).to(device()).eval()

    def embed(tokens: Int[Tensor, "n L"], padded: bool) -> Tensor:
        return _pooled(encoder, tokens, padded, pooling)

    return OwnEncoder(
        str(path), embed, pretrained.tokenizer, encoder.max_positions, facts, options, usual=_usual_length(folder)
    )


def _embed_of(model: CaptModel, pooling: str, source: str) -> Embed:
    if pooling == "head" and model.aggregation is None:
        raise CheckpointError(f"{source}: trained without contrast, so it has no aggregation head; use mean or cls")
    model.to(device()).eval()
    # The head reads what it was trained on.
    read = model.config.pooling if pooling == "head" else pooling

    def embed(tokens: Int[Tensor, "n L"], padded: bool) -> Tensor:
        rows = _pooled(model.encoder, tokens, padded, read)
        return model.aggregation(rows) if pooling == "head" and model.aggregation is not None else rows

    return embed


def _pooled(encoder: Encoder, tokens: Int[Tensor, "n L"], padded: bool, pooling: str) -> Float[Tensor, "n h"]:
    """The hidden state of the first token (cls), of which the last layer computes no other, or their mean."""
    if pooling == "cls":
        return encoder(tokens, padded=padded, rows=torch.zeros_like(tokens[:, :1]))[:, 0].float()  # type: ignore[no-any-return]
    return mean_over_tokens(encoder(tokens, padded=padded).float(), tokens, encoder.pad_id)


def hashes_of_checkpoint(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint, as its manifest has them."""
    return {name: record.sha256 for name, record in read_manifest(checkpoint).files.items()}


def hashes_of_folder(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder that can decide a vector."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".json", ".safetensors", ".txt", ".model")]
    return {str(path.relative_to(folder)): sha256(path) for path in files}


def facts_of(hashes: Mapping[str, str], pooling: str) -> dict[str, Any]:
    """The parts of an `VectorIdentity` that files decide."""
    of_tokenizer = {
        name: value
        for name, value in hashes.items()
        if name.startswith("tokenizer/") or any(Path(name).match(pattern) for pattern in TOKENIZER_FILES)
    }
    # A new file of the tokenizer gives other tokens, and so other vectors, with the same weights.
    model = digest((name, value) for name, value in hashes.items() if name not in of_tokenizer)
    return {
        "model": model,
        "tokenizer": digest(of_tokenizer.items()),
        "pooling": pooling,
        "precision": "fp32",
    }
